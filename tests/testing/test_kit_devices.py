"""Arrays on another device keep their strides and what is around them; references may be computed there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tlhub import catalog, problem
from tlhub.specs import Tensor
from tlhub.testing import default_scalars, devices, inputs, numbers, poisoned
from tlhub.testing.data import numpy_dtype, spilled


def test_numpys_own_stay_where_they_are() -> None:
    x = np.arange(6.0)
    assert devices.put(x, "cpu:0")[0] is x and devices.put(x, "other:1")[0] is x


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e5m2", "int8", "bool"])
def test_a_view_is_the_same_view_of_a_copy(dtype: str) -> None:
    """PyTorch's own CPU stands for a GPU: what is written there comes back, with all around it."""
    torch = pytest.importorskip("torch")
    whole = np.zeros((6, 10), numpy_dtype(dtype))
    whole[1:5:2, 3:7] = np.arange(8).reshape(2, 4) % 2
    view = whole[1:5:2, 3:7]
    placed, fetch = devices._torch(view, "cpu")
    assert placed.dtype == getattr(torch, dtype) and tuple(placed.shape) == (2, 4) and placed.stride() == (20, 1)
    assert (placed.float().numpy() == view.astype("float32")).all()
    placed[0, 1] = 0
    placed.as_strided((1,), (1,), 0)[0] = 1  # before the view
    assert whole[0, 0] == 0 and view[0, 1] == 1, "it is a copy"
    fetch()
    assert view[0, 1] == 0 and whole[0, 0] == 1 and whole.astype("float32").sum() == 4


def test_checking_puts_arrays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(devices, "_torch", lambda array, device, real=devices._torch: real(array, "cpu"))
    kernel = catalog.load().kernel("gemm")
    calls: list[Any] = []

    class Compiled:
        problem = problem.make(kernel, (5, 7, 3), "bfloat16", {})
        arch, fault = "cuda:sm_90a", ""

        def __call__(self, a: Any, b: Any, *, out: Any, alpha: float, out_scale: float) -> None:
            calls.append(out)
            torch.matmul(a, b, out=out)
            if self.fault == "bits":
                out[0, 0, 0] += len(calls) / 64
            if self.fault == "spill":
                out.as_strided((1,), (1,), out.storage_offset() - 1)[0] = 0

    compiled = Compiled()
    assert 0 < numbers.check(compiled, kernel=kernel, times=3) <= 1
    assert [type(out) for out in calls] == [torch.Tensor] * 3
    compiled.fault = "bits"
    with pytest.raises(AssertionError, match="two calls gave output 'c' different bits"):
        numbers.check(compiled, kernel=kernel, times=2)
    compiled.fault = "spill"
    with pytest.raises(AssertionError, match="outside output 'c'"):
        numbers.check(compiled, kernel=kernel)


class Elsewhere:
    """An array that is not NumPy's and cannot be made one: it has NumPy's protocols alone, as CuPy's have."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **named: Any) -> Any:
        if ufunc.signature is not None or method != "__call__":
            return NotImplemented
        return wrapped(ufunc(*map(bare, given), **{name: bare(value) for name, value in named.items()}))

    def __array_function__(self, called: Any, types: Any, given: Any, named: Any) -> Any:
        plain = {name: bare(value) for name, value in named.items() if name != "like"}
        return wrapped(called(*map(bare, given), **plain))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.own, name)
        return wrapped(found) if not callable(found) else lambda *a, **k: wrapped(found(*map(bare, a), **k))

    def __getitem__(self, key: Any) -> Any:
        return wrapped(self.own[bare(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.own[bare(key)] = bare(value)

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Any:
        return map(wrapped, self.own)

    def get(self) -> Any:
        return self.own

    def __bool__(self) -> bool:
        return bool(self.own)

    def __int__(self) -> int:
        return int(self.own)

    def __float__(self) -> float:
        return float(self.own)


def operator(name: str) -> Any:
    return lambda self, *others: wrapped(getattr(self.own, name)(*map(bare, others)))


NAMES = "add radd sub rsub mul rmul truediv rtruediv pow matmul neg abs lt le gt ge eq ne and or invert".split()
for _name in NAMES:
    setattr(Elsewhere, f"__{_name}__", operator(f"__{_name}__"))


def wrapped(x: Any) -> Any:
    return Elsewhere(x) if isinstance(x, (np.ndarray, np.generic)) else x


def bare(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(bare, x))
    return x.own if isinstance(x, Elsewhere) else x


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("gemm", "float16", {}),
        ("gemm", "bfloat16", {"trans_a": True, "trans_b": True, "epilogue": "gelu", "bias": True, "residual": True}),
        ("gemm", "float32", {"epilogue": "gelu_tanh"}),
        ("gemm", "float8_e5m2", {"epilogue": "silu", "out_dtype": "float8_e4m3fn"}),
        ("gemm", "int8", {"out_dtype": "int8", "epilogue": "relu"}),
        ("attention", "bfloat16", {"causal": True, "lse": True}),
        ("attention_bwd", "bfloat16", {"causal": True}),
        ("attention_decode", "bfloat16", {"lse": True}),
        ("attention_decode", "bfloat16", {"paged": True}),
        ("attention_varlen", "bfloat16", {"lse": True}),
        ("attention_varlen_bwd", "bfloat16", {"causal": True}),
    ],
)
def test_references_ask_nothing_but_numpys_protocols(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, options: dict[str, Any]
) -> None:
    kernel = catalog.load().kernel(name)
    sizes = {
        "M": 9,
        "N": 5,
        "B": 1,
        "S": 9,
        "H": 4,
        "D": 5,
        "H_kv": 2,
        "S_kv": 7,
        "P": 5,
        "page": 3,
        "L": 4,
        "T": 9,
        "N1": 3,
    }
    shape = {n: sizes.get(n, 7) for n in problem.symbols(kernel, dtype, options)}
    made = problem.make(kernel, shape, dtype, options)
    given, scalars = inputs(kernel, made), default_scalars(kernel, made)
    here = numbers._expected(kernel, made, given, scalars, "cuda:0")
    monkeypatch.setattr(numbers, "_LONG", 0.0)
    asked: list[str] = []

    def float64(arrays: Any, device: str) -> Any:
        asked.append(device)
        return {name: Elsewhere(x.astype(np.float64)) for name, x in arrays.items()}

    monkeypatch.setattr(numbers, "float64", float64)
    monkeypatch.setattr(numbers.contextlib, "suppress", lambda *kinds: numbers.contextlib.nullcontext())
    there = numbers._expected(kernel, made, given, scalars, "cuda:0")
    assert asked == ["cuda:0"]
    for one, other in zip((*here[0], *here[1]), (*there[0], *there[1]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("elsewhere", [lambda x: x, Elsewhere])
def test_the_judge_is_one_for_every_library(elsewhere: Any) -> None:
    want = np.array([[1.0, 2.0], [np.nan, np.inf], [-7e4, 0.0]])
    right, bound = np.array([[1.25, 2.0], [np.nan, np.inf], [-np.inf, 0.0]]), np.full((3, 2), 0.5)

    def worst(got: Any, dtype: str = "float16") -> float:
        return numbers._worst(elsewhere(got), elsewhere(want), elsewhere(bound), "c", np.dtype(dtype))

    assert worst(right) == 0.5
    for place, value in (((0, 1), 2.75), ((1, 0), 0.0), ((0, 1), np.nan), ((2, 0), np.inf), ((1, 1), -np.inf)):
        wrong = right.copy()
        wrong[place] = value
        with pytest.raises(AssertionError, match=rf"c\[{place[0]}, {place[1]}\] is .* 1 of 6 elements"):
            worst(wrong)
    with pytest.raises(AssertionError, match=r"c\[2, 0\] is -inf, expected -70000.0 .* 1 of 6"):
        worst(right, "float32")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "int8"])
def test_where_a_format_ends(dtype: str) -> None:
    kind = numpy_dtype(dtype)
    least = numbers._infinite(kind)
    if dtype in ("float64", "float8_e4m3fn", "int8"):
        assert least == np.inf
    else:
        with np.errstate(over="ignore"):  # ml_dtypes rounds to float32 on the way
            ends = np.array([least * (1 - 1e-6), least]).astype(kind).astype(np.float64)
        assert list(np.isinf(ends)) == [False, True]


@pytest.mark.parametrize("fault", ["", "number", "spill"])
def test_arrays_made_on_the_device_are_checked_there(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    torch = pytest.importorskip("torch")
    kernel = catalog.load().kernel("gemm")
    made = problem.make(kernel, (33, 7, 65), "bfloat16", {})
    sign, scalars, arrays = problem.signature(kernel, made), default_scalars(kernel, made), devices.TorchArrays("cpu")
    given = {t.name: arrays.random(t, seed) for seed, t in enumerate(sign.inputs)}
    assert {(x.dtype, tuple(x.shape)) for x in given.values()} == {(torch.bfloat16, t.extents) for t in sign.inputs}

    def compiled(a: Any, b: Any, *, out: Any, alpha: float, out_scale: float) -> None:
        assert a is given["a"] and b is given["b"]
        torch.matmul(a, b, out=out)
        if fault == "number":
            out[0, 3, 4] += 9
        if fault == "spill":
            out.as_strided((1,), (1,), out.storage_offset() + out.numel())[0] = 0

    monkeypatch.setattr(arrays, "double", lambda x: Elsewhere(x.double().numpy()))
    if not fault:
        assert 0 < numbers.check_there(compiled, kernel, made, given, scalars, arrays) <= 1
        return
    said = {"number": r"c\[0, 3, 4\] is .* 1 of 231 elements", "spill": "outside output 'c'"}[fault]
    with pytest.raises(AssertionError, match=said):
        numbers.check_there(compiled, kernel, made, given, scalars, arrays)


def test_a_reference_that_takes_numpys_arrays_alone_is_computed_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    kernel, compute = catalog.load().kernel("gemm"), numbers.function(catalog.load().kernel("gemm").reference)
    made = problem.make(kernel, (33, 7, 65), "float32", {})
    sign, scalars, arrays = problem.signature(kernel, made), default_scalars(kernel, made), devices.TorchArrays("cpu")
    given = {t.name: arrays.random(t, seed) for seed, t in enumerate(sign.inputs)}
    used = []

    def reference(problem: Any, inputs: Any, scalars: Any) -> Any:
        used.append([np.asarray(x) for x in inputs.values()])
        return compute(problem, inputs, scalars)

    monkeypatch.setattr(numbers, "function", lambda of: reference if of is kernel.reference else devices.function(of))
    monkeypatch.setattr(arrays, "double", lambda x: Elsewhere(x.double().numpy()))
    monkeypatch.setattr(numbers, "fetched", bare)
    for wrong in (0, 9):

        def compiled(a: Any, b: Any, *, out: Any, alpha: float, out_scale: float, wrong: int = wrong) -> None:
            torch.matmul(a, b, out=out)
            out[0, 3, 4] += wrong

        if wrong:
            with pytest.raises(AssertionError, match=r"c\[0, 3, 4\] is .* 1 of 231 elements"):
                numbers.check_there(compiled, kernel, made, given, scalars, arrays)
        else:
            assert 0 < numbers.check_there(compiled, kernel, made, given, scalars, arrays) <= 1
    assert len(used) == 2


def test_the_arrays_are_pytorchs_unless_cupy_alone_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "TorchArrays", lambda device: f"torch on {device}")
    monkeypatch.setattr(devices, "CupyArrays", lambda device: f"cupy on {device}")
    for preferred, found in (((), "torch"), (("cupy", "torch"), "torch"), (("cupy",), "cupy"), (("numpy",), "torch")):
        assert devices.pick("cuda:1", preferred) == f"{found} on cuda:1"


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float8_e4m3fn", "int8", "bool"])
def test_random_arrays_of_the_device_repeat(dtype: str) -> None:
    pytest.importorskip("torch")
    arrays, tensor = devices.TorchArrays("cpu"), Tensor("x", ("M", "N"), (33, 65), dtype, False)
    one, again, other = (arrays.random(tensor, seed).double() for seed in (1, 1, 2))
    assert (one == again).all() and (one != other).any() and arrays.empty(tensor).shape == (33, 65)


def test_poison_shows_through_a_copy() -> None:
    pytest.importorskip("torch")
    kernel = catalog.load().kernel("gemm")
    (output,) = poisoned(kernel, problem.make(kernel, (4, 3, 2), "float16", {}))
    placed, fetch = devices._torch(output, "cpu")
    fetch()
    assert np.isnan(output).all() and not spilled(output)
    placed.as_strided((1,), (1,), 0)[0] = 0
    fetch()
    assert spilled(output)
