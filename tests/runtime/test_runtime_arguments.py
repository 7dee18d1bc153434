"""What a call refuses and what it serves: the host shim, through CompiledKernel."""

from __future__ import annotations

import lab
import numpy as np
import pytest
from runtime_help import rows, wrong

# -- values ----------------------------------------------------------------------------------------


def test_computes_with_and_without_out(add):
    a, b, out = rows(3, 5), rows(3, 5) + 1, np.full((3, 5), np.nan, "float32")
    assert add(a, b, out=out) is out
    np.testing.assert_array_equal(out, a + b)
    np.testing.assert_array_equal(add(a, b, alpha=0.5), (a + b) / 2)
    np.testing.assert_array_equal(add(a, b, out=out, alpha=3), 3 * (a + b))


def test_the_batch_may_be_left_out_where_it_is_one(add):
    a = rows(2, 3, 4)
    assert add(a, a).shape == (2, 3, 4)
    assert add(a[:1], a[:1]).shape == (1, 3, 4)
    assert add(a[0], a[0]).shape == (3, 4)
    np.testing.assert_array_equal(add(a[0], a[:1]), 2 * a[0])  # the first input says how
    wrong(add, a, a[0], match=r"expected shape \(B=2, M=3, N=4\), got \(3, 4\)", argument="b")


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 3, 4), (1, 1), (1, 7), (7, 1), (13, 17)])
def test_every_size(add, shape):
    a = rows(*shape)
    np.testing.assert_array_equal(add(a, a), 2 * a)


def test_several_outputs_are_a_tuple_and_scalars_have_defaults():
    moments = lab.compiled("moments", "moments")
    a = rows(3, 4, dtype="float64")
    total, count = moments(a)
    np.testing.assert_allclose(total, a.sum(1) / 2)  # 1/sqrt(4)
    assert count.dtype == np.int64 and count.tolist() == [4, 4, 4]
    outs = (np.empty(3), np.empty(3, "int64"))
    result = moments(a, scale=1.0, shift=-4, out=outs)
    assert result[0] is outs[0] and result[1] is outs[1]
    np.testing.assert_array_equal(outs[0], a.sum(1))
    assert outs[1].tolist() == [0, 0, 0]
    wrong(moments, a, out=outs[0], match="expected a tuple of 2 arrays", argument="out")
    wrong(moments, a, out=outs[:1], match="got 1 of them", argument="out")
    wrong(moments, a, shift=1.5, match="expected an int, got a float", argument="shift")


def test_a_default_of_one_over_the_root_of_nothing_is_finite():
    total, count = lab.compiled("moments", "moments")(np.empty((2, 0)))
    assert total.tolist() == [0, 0] and count.tolist() == [0, 0]


# -- strides, offsets, alignment ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x[::-1],
        lambda x: x[::-2, ::-1],
        lambda x: np.asfortranarray(x),
        lambda x: x.T,
        lambda x: np.broadcast_to(x[:1], (6, 6)),
        lambda x: np.broadcast_to(x[:, :1], (6, 6)),
        lambda x: x[1:, 1:],
    ],
)
def test_any_stride_is_served_exactly(add, view):
    base = rows(6, 6)
    a = view(base)
    out = view(np.full((6, 6), -7, "float32")) if not np.shares_memory(view(base)[:1], view(base)[-1:]) else None
    if out is not None and out.flags.writeable:
        add(a, a, out=out)
        np.testing.assert_array_equal(out, 2 * a)
    np.testing.assert_array_equal(add(a, a), 2 * a)


def test_nothing_outside_a_strided_output_is_written(add):
    base = np.full((6, 8), -7, "float32")
    add(rows(3, 4), rows(3, 4), out=base[1:4, 2:6])
    assert (base[1:4, 2:6] == 2 * rows(3, 4)).all()
    base[1:4, 2:6] = -7
    assert (base == -7).all()


def test_broadcast_batch(add):  # A10: stride 0 is a real input
    left = np.broadcast_to(np.ones((1, 32, 32), "float32"), (32, 32, 32))
    assert (add(left, np.ones((32, 32, 32), "float32")) == 2).all()


def test_strides_of_single_rows_carry_no_meaning():  # A09
    unit = lab.compiled("unit_rows")
    x = np.lib.stride_tricks.as_strided(np.ones(77, "float32"), (1, 77), (4, 4))
    np.testing.assert_array_equal(unit(x, x), 2 * np.ones((1, 77), "float32"))
    column = np.lib.stride_tricks.as_strided(np.ones(77, "float32"), (77, 1), (4, 400))
    np.testing.assert_array_equal(unit(column, column), 2 * np.ones((77, 1), "float32"))


def test_a_stride_that_the_program_takes_for_granted_is_required():
    unit = lab.compiled("unit_rows")
    a = rows(6, 6)
    np.testing.assert_array_equal(unit(a[::2, :3], rows(3, 3)), a[::2, :3] + rows(3, 3))
    wrong(unit, a.T, a, match="expected stride 1 in dim N, got strides", argument="a")
    wrong(unit, a, a.T, match="in C order without gaps", argument="b")
    wrong(unit, a[:, :3], a[:, :3], match="in C order without gaps", argument="b")


def test_data_must_be_aligned_to_the_item_only(add):
    memory = np.zeros(4 * 12 + 8, np.uint8)
    for offset in (0, 4, 8):
        a = memory[offset : offset + 48].view("float32").reshape(3, 4)
        assert (add(a, a) == 0).all()
    odd = memory[1:49].view("float32").reshape(3, 4)
    wrong(add, odd, odd, match="aligned to its item size of 4 bytes", argument="a")


# -- refusals ----------------------------------------------------------------------------------------


def test_wrong_shapes(add):
    a = rows(3, 4)
    error = wrong(
        add, a, rows(3, 5), match=r"add: argument 'b': expected shape \(M=3, N=4\), got \(3, 5\)", argument="b"
    )
    assert error.expected == "shape (M=3, N=4)" and error.got == "(3, 5)"
    wrong(add, rows(3), rows(3), match=r"got \(3,\)", argument="a")
    wrong(add, rows(1, 1, 3, 4), a, match=r"got \(1, 1, 3, 4\)", argument="a")
    wrong(add, np.float32(3), a, match="expected an array of float32", argument="a")
    wrong(add, np.array(3, "float32"), a, match=r"got \(\)", argument="a")
    wrong(add, a, a, out=np.empty((4, 4), "float32"), match="expected shape", argument="c")
    wrong(add, a, a, out=np.empty((1, 4), "float32"), match="expected shape", argument="c")


def test_bound_extents_are_required():
    kernel = lab.compiled("add", wanted={"M": 3, "N": 4})
    a = rows(3, 4)
    np.testing.assert_array_equal(kernel(a, a), 2 * a)
    wrong(kernel, a.T, a.T, match=r"expected shape \(M=3, N=4\), got \(4, 3\)", argument="a")
    wrong(kernel, rows(2, 3, 4), rows(2, 3, 4), match=r"expected shape \(B=1, M=3, N=4\)", argument="a")
    square = lab.compiled("add", wanted={"B": "B", "M": "X", "N": "X"})
    assert square(rows(3, 3), rows(3, 3)).shape == (3, 3)
    wrong(square, a, a, match=r"expected shape \(.*M=3, N=3\), got \(3, 4\)", argument="a")


def test_a_binary_of_fixed_extents_refuses_to_be_bound_to_others():
    _, library, _ = lab.linked("te", "add", (1, 6, 8))
    assert library.module["tlhub_bind"](1, 6, 8) is not None
    for dims in ((1, 6, 9), (2, 6, 8), (1, -1, 8), (1, 6), (1, 6, 8.0)):
        with pytest.raises((ValueError, TypeError)):
            library.module["tlhub_bind"](*dims)


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (lambda a: a.astype("float64"), "float64"),
        (lambda a: a.astype("int32"), "int32"),
        (lambda a: a > 0, "bool"),
        (lambda a: a.astype("float16"), "float16"),
        (lambda a: a.astype("complex64"), "complex64"),
        (lambda a: a.astype("uint32"), "uint32"),
        (lambda a: a.astype(object), "object"),
        (lambda a: a.astype(str), "str"),
        (lambda a: a.astype(">f4"), ">f4"),
    ],
)
def test_wrong_dtypes(add, made, got):
    a = rows(3, 4)
    error = wrong(add, a, made(a), match="argument 'b': expected .*float32", argument="b")
    assert got in str(error.got)
    wrong(add, a, a, out=made(a).copy(), match="argument 'c'", argument="c")


@pytest.mark.parametrize("thing", [None, [1.0], (1.0,), 3, 2.5, True, "text", b"x", {}, object(), memoryview(b"abcd")])
def test_things_that_are_no_arrays(add, thing):
    a = rows(3, 4)
    wrong(add, thing, a, match="argument 'a': expected an array of float32", argument="a")
    wrong(add, a, thing, match="argument 'b': expected an array of float32", argument="b")
    wrong(add, thing, a, out=a.copy(), match="argument 'a': expected an array of float32", argument="a")
    if thing is not None:
        wrong(add, a, a, out=thing, match=r"argument 'c' \(out\): expected an array", argument="c")


def test_wrong_counts(add):
    a = rows(3, 4)
    wrong(add, a, match=r"expected 2 inputs \(a, b\), got 1", argument="b")
    wrong(add, match=r"expected 2 inputs \(a, b\), got 0", argument="a")
    error = wrong(add, a, a, a.copy(), match=r"expected 2 inputs \(a, b\), got 3", argument=None)
    assert "out=" in error.hint
    wrong(add, a, out=a.copy(), match=r"expected 2 inputs \(a, b\), got 1", argument="b")
    wrong(add, a, a, a, out=a.copy(), match=r"expected 2 inputs", argument=None)


def test_wrong_scalars(add):
    a = rows(3, 4)
    error = wrong(add, a, a, alhpa=2.0, match="no scalar 'alhpa'; its scalars are alpha", argument="alhpa")
    assert "did you mean 'alpha'" in error.hint
    wrong(add, a, a, out=a.copy(), beta=2.0, match="no scalar 'beta'", argument="beta")
    for value, got in ((True, "a bool"), ("2", "a string"), ([2], "a list"), (np.array(2.0), "an array")):
        wrong(add, a, a, alpha=value, match=f"expected a float, got {got}", argument="alpha")
    for given in ({}, {"out": a.copy()}):  # what tvm-ffi makes of it differs between versions
        error = wrong(add, a, a, alpha=10**400, **given, match="a number of 64 bits, got a larger", argument="alpha")
        assert error.hint == "alpha=float(...)"
    assert (add(a, a, alpha=np.float32(2)) == 4 * a).all()
    assert (add(a, a, alpha=np.int64(2)) == 4 * a).all()
    assert (add(a, a, alpha=None) == 2 * a).all()


def test_stream_and_workspace_are_refused_rather_than_ignored(add):
    a = rows(3, 4)
    wrong(add, a, a, stream=0, match="expected None", argument="stream")
    wrong(add, a, a, workspace=a.copy(), match="needs no workspace", argument="workspace")
    wrong(add, a, a, out=a.copy(), workspace=3, match="needs no workspace", argument="workspace")


def test_an_output_may_not_overlap_an_argument(add):  # A22
    t = np.ones((64, 64), "float32")
    wrong(add, t, t.copy(), out=t, match="overlaps argument 'a'", argument="c")
    wrong(add, t.copy(), t, out=t.T, match="overlaps argument 'b'", argument="c")
    wrong(add, t[:32], t[:32], out=t[16:48], match="overlaps", argument="c")
    wrong(add, t[::-1][:8], t[:8].copy(), out=t[56:][::-1], match="overlaps", argument="c")
    assert (t == 1).all()
    add(t[:32], t[:32], out=t[32:])  # side by side is no overlap
    assert (t[32:] == 2).all() and (t[:32] == 1).all()
    moments = lab.compiled("moments", "moments")
    memory = np.zeros(12)
    wrong(
        moments, np.ones((3, 4)), out=(memory[:3], memory[1:4].view("int64")),
        match="argument 'count'.*overlaps argument 'total'", argument="count",
    )  # fmt: skip


def test_an_output_may_not_overlap_itself(add):
    a = rows(4, 4)
    strided = np.lib.stride_tricks.as_strided
    for strides in ((0, 4), (4, 4), (4, 0), (8, 4), (-4, 4)):
        start = np.zeros(64, "float32")[16:]
        wrong(add, a, a, out=strided(start, (4, 4), strides), match="do not share memory", argument="c")
    out = strided(np.zeros(64, "float32"), (4, 4), (4, 16))
    np.testing.assert_array_equal(add(a, a, out=out), 2 * a)


def test_the_library_is_checked_when_it_is_called_alone():
    _, library, _ = lab.linked("add")
    main = library.module["main"]
    a = rows(3, 4)
    out = np.zeros_like(a)
    main(a, a, out, None, None)
    assert (out == 2 * a).all()
    with pytest.raises(TypeError, match=r"add: expected 5 arguments \(a, b, c, workspace, alpha\), got 3"):
        main(a, a, out)


def test_a_compiled_kernel_tells_what_it_is(add):
    assert "T.prim_func" in add.source()
    assert add.key == "0" * 64 and add.origin == "built" and add.match == "exact"
    assert "add" in repr(add)
