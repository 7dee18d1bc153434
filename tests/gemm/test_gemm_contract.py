"""The contract of gemm: declared whole, its defaults, what cannot exist, and what the CPU leaves to others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tlhub import problem
from tlhub.errors import ArgumentError
from tlhub.specs import Problem
from tlhub_cpu import TARGET
from tlhub_gemm.contract import DTYPES, GEMM
from tlhub_gemm.cpu import BLOCKED

FACTS = TARGET.facts("cpu:x86-64-v3")


def make(dtype: object = "float32", shape: object = (4, 5, 6), **options: object) -> Problem:
    return problem.make(GEMM, shape, dtype, options)  # type: ignore[arg-type]


def test_every_dtype_and_option_of_the_contract_is_declared() -> None:
    assert set(GEMM.dtypes) == {
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
    }
    choices = {o.name: set(o.choices) for o in GEMM.options}
    assert choices["compute"] == {"ieee", "tf32", "3xtf32"}
    assert choices["tensor_core"] == {None, True, False}
    assert choices["epilogue"] == {"none", "relu", "gelu", "gelu_tanh", "silu"}
    assert {"trans_a", "trans_b", "accum", "out_dtype", "fast_accum", "glu", "bias", "residual"} < set(choices)
    assert [s.name for s in GEMM.scalars] == ["alpha", "out_scale"]


def test_the_epilogue_is_the_one_of_mixed_precision() -> None:
    """A user learns one set of names and choices."""
    from tlhub_mixed.contracts import epilogue

    ours = {o.name: o for o in GEMM.options}
    for option in epilogue.options("float32"):
        assert set(option.choices) <= set(ours[option.name].choices)
    assert set(epilogue.SCALARS) < set(GEMM.scalars)
    (half,) = (d for d in GEMM.dims if d.name == epilogue.HALF.name)
    assert (half.default, half.when) == (epilogue.HALF.default, epilogue.HALF.when)


@pytest.mark.parametrize(
    ("dtype", "accum", "out"),
    [
        ("float64", "float64", "float64"),
        ("float32", "float32", "float32"),
        ("float16", "float32", "float16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float8_e4m3fn", "float32", "bfloat16"),
        ("float8_e5m2", "float32", "bfloat16"),
        ("int8", "int32", "int32"),
    ],
)
def test_sums_and_results_have_the_usual_dtypes_by_default(dtype: str, accum: str, out: str) -> None:
    made = make(dtype)
    assert (made.option["accum"], dict(made.dtypes)["c"]) == (accum, out)
    assert made.option["compute"] == "ieee" and made.option["epilogue"] == "none"
    assert made.dims == (("B", 1), ("M", 4), ("N", 5), ("K", 6))


@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (False, True), (True, False), (True, True)])
def test_transposition_turns_the_stored_dims(trans_a: bool, trans_b: bool) -> None:
    a, b = problem.signature(GEMM, make(trans_a=trans_a, trans_b=trans_b)).inputs
    assert a.extents == ((1, 6, 4) if trans_a else (1, 4, 6))
    assert b.extents == ((1, 5, 6) if trans_b else (1, 6, 5))


@pytest.mark.parametrize("out", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_what_is_added_to_a_narrow_result_is_float32(out: str) -> None:
    made = problem.signature(GEMM, make("float16", bias=True, residual=True, out_dtype=out))
    assert [(t.name, t.dtype) for t in made.inputs[2:]] == [("bias", "float32"), ("residual", "float32")]


def test_gates_and_values_make_one_column_of_c() -> None:
    made = make("float16", (4, 10, 6), glu=True, bias=True, residual=True)
    found = problem.signature(GEMM, made)
    shapes = {t.name: t.extents for t in (*found.inputs, *found.outputs)}
    assert shapes["b"] == (1, 6, 10) and shapes["bias"] == (10,)
    assert shapes["residual"] == shapes["c"] == (1, 4, 5)
    assert problem.generalise(made, ("M", "N", "K", "N_2")) in problem.patterns(GEMM, made)


def test_the_epilogue_adds_inputs_of_the_results_dtype() -> None:
    made = problem.signature(GEMM, make("float16", bias=True, residual=True, out_dtype="float32"))
    assert [(t.name, t.extents, t.dtype) for t in made.inputs[2:]] == [
        ("bias", (5,), "float32"),
        ("residual", (1, 4, 5), "float32"),
    ]


@pytest.mark.parametrize(
    ("dtype", "options", "word"),
    [
        ("int8", {"accum": "float32"}, "accum='float32'"),
        ("float32", {"accum": "int32"}, "accum='int32'"),
        ("float32", {"accum": "float16"}, "accum='float16'"),
        ("float64", {"accum": "float32"}, "narrower"),
        ("float32", {"out_dtype": "int32"}, "out_dtype='int32'"),
        ("float32", {"glu": True}, "N=5 with glu=True; N counts gates and values, so it is even"),
        ("int8", {"glu": True}, "glu with out_dtype='int32'"),
        ("float16", {"compute": "tf32"}, "compute='tf32'"),
        ("float32", {"compute": "tf32", "tensor_core": False}, "tensor_core=False"),
        ("float32", {"compute": "3xtf32", "accum": "float64"}, "compute='3xtf32'"),
        ("bfloat16", {"fast_accum": True}, "fast_accum"),
        ("float8_e4m3fn", {"fast_accum": True, "tensor_core": False}, "tensor_core=False"),
        ("int8", {"epilogue": "gelu"}, "epilogue='gelu'"),
        ({"a": "int8", "b": "float16"}, {}, "only the two float8 types mix"),
    ],
)
def test_impossible_combinations_are_refused_by_name(dtype: object, options: dict[str, object], word: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(dtype, **options)
    assert word in str(caught.value)


def test_the_two_float8_types_mix() -> None:
    made = make({"a": "float8_e4m3fn", "b": "float8_e5m2"})
    assert dict(made.dtypes)["b"] == "float8_e5m2"


@pytest.mark.parametrize(
    ("dtype", "options", "word"),
    [
        ("float16", {"accum": "float16"}, "accum='float16'"),
        ("float32", {"compute": "tf32"}, "compute='tf32'"),
        ("float32", {"compute": "3xtf32"}, "compute='3xtf32'"),
        ("float8_e5m2", {"fast_accum": True}, "fast_accum"),
        ("float32", {"tensor_core": True}, "tensor_core=True"),
    ],
)
def test_the_cpu_says_what_it_leaves_to_tensor_cores(dtype: str, options: dict[str, object], word: str) -> None:
    reason = BLOCKED.supports(make(dtype, **options), FACTS)
    assert reason is not None and word in reason


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tensor_core", [None, False])
def test_the_cpu_serves_every_dtype(dtype: str, tensor_core: bool | None) -> None:
    assert BLOCKED.supports(make(dtype, tensor_core=tensor_core), FACTS) is None


@pytest.mark.parametrize("arch", TARGET.archs)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_register_tiles_fit_the_registers_of_every_arch(arch: str, dtype: str) -> None:
    (config,) = BLOCKED.configs(make(dtype), TARGET.facts(f"cpu:{arch}"))
    lanes, mr, nr = config["lanes"], config["mr"], config["nr"]
    assert nr % lanes == 0  # type: ignore[operator]
    vectors = mr * nr // lanes + nr // lanes + 1  # type: ignore[operator]
    wide = lanes * (8 if dtype == "float64" else 4) == 64  # type: ignore[operator]
    registers = 32 if wide or not arch.startswith(("x86", "haswell", "skylake", "znver")) else 16
    assert vectors <= registers


def test_flops_count_a_product_and_a_sum_each() -> None:
    assert GEMM.flops({"B": 2, "M": 3, "N": 5, "K": 7}) == 420


def test_declaring_is_light() -> None:
    code = (
        "import sys; import tlhub_gemm; heavy = {'numpy', 'tvm', 'tvm_ffi', 'tilelang', 'torch'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path()})
    assert done.returncode == 0, done.stderr


def path() -> str:
    import os

    return os.pathsep.join(p for p in sys.path if p)
