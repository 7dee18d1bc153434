"""The CPU programs for other machines: one without AVX and conversions of float16, and ones that are not here."""

from __future__ import annotations

from typing import Any

import pytest

import tlhub
from tlhub import testing

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("gemm_w4a16", "float16", {"epilogue": "gelu", "bias": True}),
    ("gemm_scaled", "float8_e4m3fn", {"scaling": "block", "trans_b": True, "out_dtype": "float16"}),
    ("quantize", "float16", {}),
]
NAMES = [name for name, _, _ in CASES]


def get(case: tuple[str, str, dict[str, Any]], arch: str) -> Any:
    name, dtype, options = case
    dims = {d: d for d in ("MK" if name == "quantize" else "MNK")}
    return tlhub.get(name, dims, dtype, arch=f"cpu:{arch}", **options)


@pytest.mark.tvm
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_machine_without_avx_is_within_the_tolerance(case: tuple[str, str, dict[str, Any]]) -> None:
    kernel = get(case, "x86-64-v2")
    for m, n, k in ((1, 2, 128), (130, 258, 256), (197, 300, 640)):
        sizes = {"M": m, "N": n, "K": k, "M_128": -(-m // 128), "N_128": -(-n // 128), "K_128": k // 128}
        sizes |= {"K_2": k // 2, "G": k // 128}
        testing.check(kernel, dims={d: sizes[d] for d, _ in kernel.problem.dims})


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["x86-64-v4", "aarch64"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_it_compiles_for(case: tuple[str, str, dict[str, Any]], arch: str) -> None:
    assert get(case, arch).arch == f"cpu:{arch}"
