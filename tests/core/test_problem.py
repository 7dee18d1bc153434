"""Problems: dims by position and name, symbols, dtypes, options, and what is refused with which words."""

from __future__ import annotations

import dataclasses

import pytest

from tlhub.errors import ArgumentError
from tlhub.problem import generalise, make, patterns, serves, signature, symbols, typed
from tlhub.specs import Arg, Dim, Kernel, Option, Problem, Scalar

pytestmark = pytest.mark.light


def divides(problem: Problem) -> str | None:
    heads, kv = problem.dim["H"], problem.dim["H_kv"]
    if isinstance(heads, int) and isinstance(kv, int) and (kv == 0 or heads % kv):
        return f"H_kv={kv} does not divide H={heads}"
    return None


PRODUCT = Kernel(
    name="product",
    revision=3,
    dims=(Dim("B", 1, elide=True), Dim("M"), Dim("N"), Dim("K")),
    inputs=(
        Arg("a", ("B", "M", "K"), when={"trans_a": False}),
        Arg("a", ("B", "K", "M"), when={"trans_a": True}),
        Arg("b", ("B", "K", "N")),
        Arg("bias", ("N",), dtype="option:out_dtype", when={"bias": True}),
    ),
    outputs=(Arg("c", ("B", "M", "N"), dtype="option:out_dtype"),),
    dtypes=("float32", "float16", "int8"),
    options=(
        Option("trans_a", (False, True), False),
        Option("bias", (False, True), False),
        Option(
            "out_dtype",
            ("float32", "float16", "int32"),
            {"float32": "float32", "float16": "float16", "int8": "int32"},
        ),
    ),
    scalars=(Scalar("alpha", default=1.0),),
    patterns=(("M",), ("M", "N", "K"), ("B", "M", "N", "K")),
    reference="none:none",
    tolerance="none:none",
    flops=lambda d: 2.0 * d["M"] * d["N"] * d["K"],
)

SPARSE = dataclasses.replace(
    PRODUCT,
    name="sparse",
    dims=(Dim("M"), Dim("nnz", when={"sparse": True}), Dim("rows", "M", when={"sparse": True}), Dim("N")),
    inputs=(Arg("a", ("M", "N"), when={"sparse": False}), Arg("a", ("nnz",), when={"sparse": True})),
    outputs=(Arg("c", ("M",)),),
    options=(Option("sparse", (False, True), False),),
    patterns=(("M", "nnz"),),
)

HEADS = Kernel(
    name="heads",
    revision=1,
    dims=(Dim("S"), Dim("H"), Dim("H_kv", "H"), Dim("S_kv", "S")),
    inputs=(Arg("q", ("S", "H")), Arg("k", ("S_kv", "H_kv"))),
    outputs=(Arg("o", ("S", "H")),),
    dtypes=("float32",),
    reference="none:none",
    tolerance="none:none",
    flops=lambda d: 0.0,
    patterns=(("S", "H", "H_kv", "S_kv"),),
    check=divides,
)


def test_positions_names_and_defaults_make_one_problem() -> None:
    positional = make(PRODUCT, (8, 4, 2), "float32", {})
    assert positional.dims == (("B", 1), ("M", 8), ("N", 4), ("K", 2))
    assert positional == make(PRODUCT, {"K": 2, "M": 8, "N": 4}, "float32", {"trans_a": False})
    assert positional == make(PRODUCT, (1, 8, 4, 2), "float32", {"out_dtype": "float32"})
    assert hash(positional) == hash(make(PRODUCT, [8, 4, 2], "float32", {}))


def test_trailing_optional_dims_by_position() -> None:
    assert make(HEADS, (16, 8), "float32", {}).dim == {"S": 16, "H": 8, "H_kv": 8, "S_kv": 16}
    assert make(HEADS, (16, 8, 2), "float32", {}).dim == {"S": 16, "H": 8, "H_kv": 2, "S_kv": 16}


def test_symbols_are_numbered_by_first_appearance() -> None:
    one = make(HEADS, ("len", 8), "float32", {})
    assert one.dims == (("S", "?0"), ("H", 8), ("H_kv", 8), ("S_kv", "?0"))
    assert one == make(HEADS, ("T", 8), "float32", {})
    assert one != make(HEADS, ("T", 8, 8, "U"), "float32", {})


@pytest.mark.parametrize("extent", [64.0, True, -1, None, 2.5, "6 4", "", 2**31, b"M", (1,)])
def test_what_is_no_extent_is_refused_by_name(extent: object) -> None:
    with pytest.raises(ArgumentError, match="dim N") as caught:
        make(PRODUCT, (64, extent, 64), "float32", {})
    assert caught.value.argument == "N" and isinstance(caught.value, (ValueError, TypeError))


@pytest.mark.parametrize("shape", [(64,), (64, 64), (1, 2, 3, 4, 5), "64,64,64", 64, None])
def test_wrong_number_of_dims(shape: object) -> None:
    with pytest.raises(ArgumentError, match="product"):
        make(PRODUCT, shape, "float32", {})


def test_numpy_integers_are_integers() -> None:
    import numpy as np

    assert make(PRODUCT, tuple(np.int64([8, 4, 2])), "float32", {}) == make(PRODUCT, (8, 4, 2), "float32", {})
    assert make(PRODUCT, (8, 4, 2), np.float32, {}) == make(PRODUCT, (8, 4, 2), np.dtype("float32"), {})


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'trans_a'"):
        make(PRODUCT, (8, 4, 2), "float32", {"transa": True})
    with pytest.raises(ArgumentError, match="did you mean 'float32'"):
        make(PRODUCT, (8, 4, 2), "flaot32", {})
    with pytest.raises(ArgumentError, match="allowed: False, True"):
        make(PRODUCT, (8, 4, 2), "float32", {"trans_a": 1})
    with pytest.raises(ArgumentError, match="does not take dtype 'float64'"):
        make(PRODUCT, (8, 4, 2), "float64", {})
    with pytest.raises(ArgumentError, match="no dim 'X'"):
        make(PRODUCT, {"M": 1, "N": 1, "X": 1}, "float32", {})
    with pytest.raises(ArgumentError, match="dim K is missing"):
        make(PRODUCT, {"M": 1, "N": 1}, "float32", {})
    with pytest.raises(ArgumentError, match="alpha is a scalar"):
        make(PRODUCT, (8, 4, 2), "float32", {"alpha": 2.0})


def test_dtypes_by_argument() -> None:
    mixed = make(PRODUCT, (8, 4, 2), {"a": "int8", "b": "float16"}, {})
    assert dict(mixed.dtypes) == {"a": "int8", "b": "float16", "c": "int32"}
    with pytest.raises(ArgumentError, match="no input 'bias' takes a dtype"):
        make(PRODUCT, (8, 4, 2), {"a": "int8", "bias": "float16"}, {"bias": True})
    with pytest.raises(ArgumentError, match="empty"):
        make(PRODUCT, (8, 4, 2), {}, {})


def test_the_kernels_own_rule_names_both_numbers() -> None:
    with pytest.raises(ArgumentError, match="H_kv=2 does not divide H=33"):
        make(HEADS, (4, 33, 2), "float32", {})


def test_signature_follows_the_options() -> None:
    plain = signature(PRODUCT, make(PRODUCT, (8, 4, 2), "float32", {}))
    assert [(t.name, t.extents) for t in plain.inputs] == [("a", (1, 8, 2)), ("b", (1, 2, 4))]
    assert plain.elide == "B" and [s.name for s in plain.scalars] == ["alpha"]
    full = signature(PRODUCT, make(PRODUCT, (8, 4, 2), "float16", {"trans_a": True, "bias": True}))
    assert [(t.name, t.dims) for t in full.inputs] == [
        ("a", ("B", "K", "M")),
        ("b", ("B", "K", "N")),
        ("bias", ("N",)),
    ]
    assert [(t.name, t.dtype, t.output) for t in full.outputs] == [("c", "float16", True)]


def test_patterns_go_from_exact_to_general() -> None:
    exact = make(PRODUCT, (8, 8, 2), "float32", {})
    found = patterns(PRODUCT, exact)
    assert [[e for _, e in p.dims] for p in found] == [
        [1, 8, 8, 2],
        [1, "?0", 8, 2],
        [1, "?0", "?1", "?2"],
        ["?0", "?1", "?2", "?3"],
    ]
    assert all(serves(p, exact) for p in found)
    own = patterns(PRODUCT, exact, ("N",))
    assert own[1].dim == {"B": 1, "M": 8, "N": "?0", "K": 2} and (own[0], *own[2:]) == found
    assert patterns(PRODUCT, exact, ("M",)) == found


def test_a_narrower_binary_does_not_serve_a_wider_problem() -> None:
    wide = make(PRODUCT, ("M", "N", 2), "float32", {})
    assert serves(wide, make(PRODUCT, (8, 4, 2), "float32", {}))
    assert not serves(make(PRODUCT, (8, 4, 2), "float32", {}), wide)
    assert not serves(make(PRODUCT, ("M", "M", 2), "float32", {}), make(PRODUCT, (8, 4, 2), "float32", {}))
    assert not serves(wide, make(PRODUCT, (8, 4, 2), "float16", {}))
    assert not serves(wide, make(PRODUCT, (8, 4, 2), "float32", {"trans_a": True}))


def test_generalise_keeps_nothing_of_the_names() -> None:
    assert generalise(make(PRODUCT, ("rows", 4, 2), "float32", {}), ("N",)).dim == {
        "B": 1,
        "M": "?0",
        "N": "?1",
        "K": 2,
    }


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "hint"),
    [
        ((64, -1, 64), "float32", {}, "N=1024"),
        ((64, 64.0, 64), "float32", {}, "N=64"),
        ((64, None, 64), "float32", {}, "N=1024"),
        ({"M": 1, "N": 1}, "float32", {}, "by position 16,16,16, by name M=16,N=16,K=16"),
        ({"M": 1, "N": 1, "quux": 1}, "float32", {}, "by position 16,16,16, by name M=16,N=16,K=16"),
        ((64,), "float32", {}, "by position 16,16,16, by name M=16,N=16,K=16"),
        (("M",), "float32", {}, "by position 16,16,16, by name M=16,N=16,K=16"),
        (("64x32x16",), "float32", {}, "dims are separated by commas: 64,32,16"),
        ("64,32,16", "float32", {}, "dims are a tuple: (64, 32, 16)"),
        ("64 32 16", "float32", {}, "dims are separated by commas: 64,32,16"),
        (None, "float32", {}, "by position 16,16,16, by name M=16,N=16,K=16"),
        ((8, 4, 2), "quux", {}, "tlhub kernels product"),
        ((8, 4, 2), {}, {}, "dtype='float32'"),
        ((8, 4, 2), {"a": "int8", "bias": "int8"}, {"bias": True}, "dtype={'a': 'int8', 'b': 'int8'}"),
        ((8, 4, 2), "float32", {"quux": 1}, "tlhub kernels product"),
        ((8, 4, 2), "float32", {"trans_a": 1}, "trans_a=True"),
        ((8, 4, 2), "float32", {"trans_a": "false"}, "trans_a=False"),
        ((8, 4, 2), "float32", {"trans_a": "tru"}, "did you mean True?"),
        ((8, 4, 2), "float32", {"out_dtype": "float33"}, "did you mean 'float32'?"),
        ((8, 4, 2), "float32", {"out_dtype": 7.5}, "tlhub kernels product"),
    ],
)
def test_every_refusal_ends_with_a_hint(shape: object, dtype: object, options: dict[str, object], hint: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(PRODUCT, shape, dtype, options)  # type: ignore[arg-type]
    assert caught.value.hint == hint and str(caught.value).endswith(f"\nhint: {hint}")


def test_numpy_bools_are_bools() -> None:
    import numpy as np

    assert make(PRODUCT, (8, 4, 2), "float32", {"trans_a": np.bool_(True)}).option["trans_a"] is True
    with pytest.raises(ArgumentError, match="out_dtype is True"):
        make(PRODUCT, (8, 4, 2), "float32", {"out_dtype": np.bool_(True)})


def test_a_combination_that_cannot_be_shows_the_contract() -> None:
    with pytest.raises(ArgumentError) as caught:
        make(HEADS, (4, 33, 2), "float32", {})
    assert caught.value.hint == "tlhub kernels heads"


@pytest.mark.parametrize(("dtype", "hint"), [("uint16", "a.astype('float32')"), ("complex64", "a.astype('float32')")])
def test_arrays_of_a_dtype_that_no_input_has(dtype: str, hint: str) -> None:
    import numpy as np

    from tlhub import operands

    with pytest.raises(ArgumentError, match=f"argument 'a': expected a dtype of .*, got {dtype}") as caught:
        operands.read(PRODUCT, (np.ones((3, 4), dtype), np.ones((4, 5), "float32")), {})
    assert caught.value.hint == hint
    narrow = dataclasses.replace(PRODUCT, dtypes=("float32", "bfloat16"))
    with pytest.raises(ArgumentError, match="argument 'b': expected a dtype of") as caught:
        operands.read(narrow, (np.ones((3, 4), "float32"), np.ones((4, 5), "uint16")), {})
    assert caught.value.hint == "b.view(ml_dtypes.bfloat16)"


def test_arrays_that_do_not_fit_are_shown_as_the_caller_has_them() -> None:
    import numpy as np

    from tlhub import operands

    a = np.ones((64, 48), "float32")
    with pytest.raises(ArgumentError, match=r"expected K=48, got shape \(64, 48\)") as caught:
        operands.read(PRODUCT, (a, a), {})
    assert caught.value.hint == "its dims are (B, K, N): tlhub kernels product"
    with pytest.raises(ArgumentError, match=r"expected dims \(B, M, K\), got shape \(64,\)") as caught:
        operands.read(PRODUCT, (a[:, 0], a), {})
    assert caught.value.hint == "tlhub kernels product"
    with pytest.raises(ArgumentError, match="its inputs are a, b") as caught:
        operands.read(PRODUCT, (a,), {})
    assert caught.value.hint == "tlhub.get_for('product', a, b)"


# -- dims of some options only ---------------------------------------------------------------------


def test_dims_that_an_option_brings():
    dense, sparse = make(SPARSE, (3, 5), "float32", {}), make(SPARSE, (3, 9, 5), "float32", {"sparse": True})
    assert dense.dim == {"M": 3, "N": 5} and sparse.dim == {"M": 3, "nnz": 9, "rows": 3, "N": 5}
    assert [t.extents for t in signature(SPARSE, sparse).inputs] == [(9,)]
    assert make(SPARSE, {"M": 3, "nnz": 9, "N": 5}, "float32", {"sparse": True}) == sparse
    for problem in (dense, sparse):
        dims, dtype, options = typed(SPARSE, problem)
        assert make(SPARSE, dims, dtype, options) == problem
        assert patterns(SPARSE, problem)[1].dim["M"] == "?0"
    assert list(symbols(SPARSE, "float32", {})) == ["M", "N"]
    assert list(symbols(SPARSE, "float32", {"sparse": True})) == ["M", "nnz", "rows", "N"]


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ({"M": 3, "nnz": 9, "N": 5}, {}, "no dim 'nnz' but with sparse=True; its dims are M, N\nhint: sparse=True"),
        ({"M": 3, "N": 5}, {"sparse": True}, "dim nnz is missing; required: M, nnz, N and optionally rows=M"),
        ((3, 9, 5), {}, "3 dims were given; it takes M, N"),
        ((3, 5), {"sparse": True}, "2 dims were given; it takes M, nnz, N and optionally rows=M"),
    ],
)
def test_dims_that_an_option_does_not_bring(shape, options, said):
    with pytest.raises(ArgumentError, match=said):
        make(SPARSE, shape, "float32", options)
