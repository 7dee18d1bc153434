"""Arrays of every library in, results of the caller's kind out."""

from __future__ import annotations

import lab
import ml_dtypes
import numpy as np
import pytest

from tlhub.errors import ArgumentError


@pytest.fixture(scope="module")
def add():
    return lab.compiled("add")


A = np.arange(12, dtype="float32").reshape(3, 4)


class Foreign:
    """An array of a library that speaks nothing but DLPack."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


# -- NumPy -----------------------------------------------------------------------------------------


def test_numpy_gives_numpy(add):
    result = add(A, A)
    assert type(result) is np.ndarray and result.dtype == np.float32 and result.flags.c_contiguous
    np.testing.assert_array_equal(result, 2 * A)


def test_read_only_inputs_are_served_and_stay_untouched(add):
    frozen = A.copy()
    frozen.flags.writeable = False
    for _ in range(2):
        np.testing.assert_array_equal(add(frozen, A), 2 * A)
        np.testing.assert_array_equal(add(A, frozen, out=np.empty_like(A)), 2 * A)
        np.testing.assert_array_equal(add(np.broadcast_to(A[:1], (3, 4)), frozen[::-1]), A[:1] + A[::-1])
    assert not frozen.flags.writeable
    np.testing.assert_array_equal(frozen, A)


def test_a_read_only_output_is_refused(add):
    out = np.zeros_like(A)
    out.flags.writeable = False
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"'c' \(out\): expected an array that may be written, got a read-only"):
            add(A, A, out=out)
    assert (out == 0).all()


def test_masked_arrays_are_refused_and_other_subclasses_served(add):
    with pytest.raises(ArgumentError, match="argument 'b': expected an array without a mask"):
        add(A, np.ma.array(A))
    with pytest.raises(ArgumentError, match=r"argument 'c' \(out\): expected an array without a mask"):
        add(A, A, out=np.ma.array(A))
    np.testing.assert_array_equal(add(A.view(np.matrix), A), 2 * A)


def test_strides_of_part_of_an_item_are_refused(add):
    odd = np.ndarray((3, 4), "float32", np.zeros(64, np.uint8).data, 0, (17, 4))
    with pytest.raises(ArgumentError, match="argument 'a': expected strides of whole items of 4 bytes"):
        add(odd, A)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_ml_dtypes_pass_with_the_contracts_dtype(dtype):
    kernel = lab.compiled("bits", "bits", dtype=dtype)
    kind = getattr(ml_dtypes, dtype)
    a = np.array([0, 1, -2.5, np.nan, 0.0078125, 448], kind)
    result = kernel(a)
    assert result.dtype == kind
    np.testing.assert_array_equal(result.view(np.uint8), a.view(np.uint8))
    out = np.zeros(12, kind)[::2]
    assert kernel(a, out=out) is out
    assert out.tobytes() == a.tobytes()
    frozen = np.broadcast_to(a[:1], (6,))
    assert (kernel(frozen).astype(float) == 0).all()
    integers = a.view(f"uint{8 * a.itemsize}")
    with pytest.raises(ArgumentError, match=f"argument 'a': expected dtype {dtype}, got uint"):
        kernel(integers)
    with pytest.raises(ArgumentError, match=rf"argument 'c' \(out\): expected dtype {dtype}, got uint"):
        kernel(a, out=integers.copy())
    with pytest.raises(ArgumentError, match="got float8_e5m2" if a.itemsize == 1 else "got float16"):
        kernel(a.view("float16") if a.itemsize == 2 else a.view(ml_dtypes.float8_e5m2))
    with pytest.raises(ArgumentError, match="got int4"):
        kernel(np.zeros(6, ml_dtypes.int4))
    frozen_out = a.copy()
    frozen_out.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        kernel(a, out=frozen_out)


def test_float16_needs_no_detour():
    a = np.array([1, 2, 65504], "float16")
    np.testing.assert_array_equal(lab.compiled("bits", "bits", dtype="float16")(a), a)


# -- others ----------------------------------------------------------------------------------------


def test_torch_gives_torch(add):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    t = torch.from_numpy(A.copy())
    result = add(t, t)
    assert type(result) is torch.Tensor and result.dtype is torch.float32
    assert torch.equal(result, 2 * t)
    out = torch.empty(4, 3).T
    assert add(t, t.T.contiguous().T, out=out) is out
    assert torch.equal(out, 2 * t)
    assert torch.equal(add(t[1:].expand(2, 4), t[:1].expand(2, 4)), t[1:] + t[:1])
    assert torch.equal(add(t, A), 2 * t)  # the first input says which kind
    with pytest.raises(ArgumentError, match="argument 'a': expected dtype float32, got float64"):
        add(t.double(), t)


def test_torch_tensors_that_are_not_what_they_seem(add):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    t = torch.from_numpy(A.copy())
    add(t, t)  # the kind is known from here on
    lazy = torch.complex(t, t).conj().imag
    assert lazy.is_neg()
    leaf = t.clone().requires_grad_()
    for x, words in ((lazy, "lazy negation"), (leaf, "needs no gradient"), (leaf * 2, "needs no gradient")):
        for arguments in ((x, t, t.clone()), (t, x, t.clone()), (t, t, x)):
            with pytest.raises(ArgumentError, match=words):
                add(*arguments[:2], out=arguments[2])
        with pytest.raises(ArgumentError, match=words):
            add(t, x)
    with torch.no_grad():
        assert torch.equal(add(leaf, t), 2 * t)
    assert torch.equal(add(lazy.resolve_neg(), t), 0 * t)
    for odd in (t.to_sparse(), t.to("meta")):
        with pytest.raises(ArgumentError, match="argument 'b': expected a dense tensor"):
            add(t, odd)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_torch_narrow_floats(dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    t = torch.tensor([1, -2.5, 448]).to(getattr(torch, dtype))
    result = lab.compiled("bits", "bits", dtype=dtype)(t)
    assert result.dtype is t.dtype and torch.equal(result.float(), t.float())


def test_jax_gives_new_jax_arrays(add):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    j = jax.numpy.asarray(A)
    result = add(j, j)
    assert isinstance(result, jax.Array) and result.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(result), 2 * A)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"'c' \(out\): expected an array that may be written, got a JAX array"):
            add(j, j, out=j)
    np.testing.assert_array_equal(np.asarray(j), A)
    out = np.empty_like(A)
    assert add(j, A, out=out) is out
    np.testing.assert_array_equal(out, 2 * A)
    narrow = jax.numpy.asarray([1, -2.5, 3], "bfloat16")
    same = lab.compiled("bits", "bits", dtype="bfloat16")(narrow)
    assert isinstance(same, jax.Array) and same.dtype == narrow.dtype and (same == narrow).all()


def test_other_arrays_that_speak_dlpack(add):
    f = Foreign(A)
    result = add(f, A)
    np.testing.assert_array_equal(np.asarray(result), 2 * A)
    out = Foreign(np.zeros_like(A))
    assert add(f, f, out=out) is out
    np.testing.assert_array_equal(out.array, 2 * A)
    frozen = A.copy()
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match="argument 'b': expected an array that DLPack can hand over, got .*Foreign"):
        add(A, Foreign(frozen))


def test_tensors_of_tvm_ffi(add):
    import tvm_ffi

    t = tvm_ffi.from_dlpack(A.copy())
    np.testing.assert_array_equal(np.from_dlpack(add(t, t)), 2 * A)
