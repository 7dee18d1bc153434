"""What the contract of attention declares, and what it refuses."""

from __future__ import annotations

import pytest

from tlhub import problem
from tlhub.errors import ArgumentError
from tlhub.specs import Problem
from tlhub_attention import tlhub_kernels
from tlhub_attention.contracts.forward import ATTENTION, DTYPES, FLOAT8, flops
from tlhub_attention.cpu.schedules import FLASH, configs
from tlhub_cpu import TARGET

pytestmark = pytest.mark.light

V3 = TARGET.facts("cpu:x86-64-v3")


def make(shape: object = (2, 5, 6, 16), dtype: object = "float32", **options: object) -> Problem:
    return problem.make(ATTENTION, shape, dtype, options)  # type: ignore[arg-type]


def test_dims_that_are_not_given_follow_those_that_are() -> None:
    assert make().dim == {"B": 2, "S": 5, "H": 6, "D": 16, "H_kv": 6, "S_kv": 5, "D_v": 16}
    named = make({"B": 1, "S": 2, "H": 6, "D": 8, "H_kv": 3, "S_kv": 9, "D_v": 4})
    shapes = {t.name: t.extents for t in problem.signature(ATTENTION, named).inputs}
    assert shapes == {"q": (1, 2, 6, 8), "k": (1, 9, 3, 8), "v": (1, 9, 3, 4)}


@pytest.mark.parametrize("lse", [False, True])
def test_lse_is_an_output_of_its_own_in_float32(lse: bool) -> None:
    outputs = problem.signature(ATTENTION, make(dtype="bfloat16", lse=lse)).outputs
    assert [(t.name, t.extents, t.dtype) for t in outputs] == [
        ("o", (2, 5, 6, 16), "bfloat16"),
        *([("lse", (2, 6, 5), "float32")] if lse else []),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_o_has_the_dtype_of_q_but_for_float8(dtype: str) -> None:
    assert dict(make(dtype=dtype).dtypes)["o"] == ("bfloat16" if dtype.startswith("float8") else dtype)


def test_scalars_are_given_at_the_call() -> None:
    assert [(s.name, s.kind, s.default) for s in ATTENTION.scalars] == [
        ("scale", "float", "1/sqrt(D)"),
        ("window", "int", 0),
        ("softcap", "float", 0.0),
    ]
    with pytest.raises(ArgumentError, match="window is a scalar"):
        make(window=3)


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2), (2, 3), (4, 0)])  # A34 is the first two
def test_heads_that_do_not_divide_are_refused_with_both_counts(heads: int, kv_heads: int) -> None:
    with pytest.raises(ArgumentError, match=f"H={heads} .*H_kv={kv_heads}"):
        make({"B": 1, "S": 4, "H": heads, "D": 8, "H_kv": kv_heads})


def test_float64_does_not_mix() -> None:
    with pytest.raises(ArgumentError, match="float64 does not mix"):
        make(dtype={"q": "float64", "k": "float32", "v": "float64"})
    assert dict(make(dtype="float64", out_dtype="bfloat16").dtypes)["o"] == "bfloat16"


def test_slopes_are_the_last_input_of_all_kernels() -> None:
    for kernel in tlhub_kernels():
        shape = {d.name: 8 for d in kernel.dims if d.default is None and not d.when or d.name == "S_kv"}
        inputs = problem.signature(kernel, problem.make(kernel, shape, "float16", {"alibi": True})).inputs
        assert (inputs[-1].name, inputs[-1].extents, inputs[-1].dtype) == ("slopes", (8,), "float32")


def test_factors_are_for_float8() -> None:
    inputs = problem.signature(
        ATTENTION, make({"B": 2, "S": 5, "H": 6, "D": 16, "H_kv": 3}, FLOAT8[0], scaled=True)
    ).inputs
    assert [(t.name, t.extents) for t in inputs[3:]] == [("q_scale", (2, 6)), ("k_scale", (2, 3)), ("v_scale", (2, 3))]
    with pytest.raises(ArgumentError, match="scaled=True, and v is bfloat16; scales are for q, k and v in float8"):
        make(dtype={"q": FLOAT8[0], "k": FLOAT8[1], "v": "bfloat16"}, scaled=True)


def test_flops_count_two_products_and_half_of_them_under_a_causal_mask() -> None:
    dims = {"B": 2, "S": 3, "H": 5, "D": 7, "H_kv": 1, "S_kv": 11, "D_v": 13}
    pairs = 2 * 5 * 3 * 11
    assert flops(dims) == 2 * pairs * 7 + 2 * pairs * 13
    assert flops({**dims, "causal": True}) == flops(dims) / 2


@pytest.mark.parametrize("arch", ["x86-64-v2", "x86-64-v3", "x86-64-v4", "znver3", "znver4", "aarch64", "neoverse-v1"])
def test_blocks_are_whole_tiles_and_tiles_fit_the_registers(arch: str) -> None:
    for config in configs(make(), TARGET.facts(f"cpu:{arch}")):
        lanes, vectors, tile = (int(config[n]) for n in ("lanes", "vectors", "tile"))  # type: ignore[arg-type]
        wide = lanes == 16 or "86" not in arch and "zn" not in arch
        assert tile * vectors + vectors + 1 <= (32 if wide else 16)
        assert int(config["block_q"]) % (lanes * vectors) == 0  # type: ignore[arg-type]
        assert int(config["block_k"]) % tile == 0  # type: ignore[arg-type]
        assert int(config["block_k"]) * tile % lanes == 0  # type: ignore[arg-type]


def test_one_binary_serves_every_size() -> None:
    assert set(FLASH.symbolic) == {d.name for d in ATTENTION.dims}
