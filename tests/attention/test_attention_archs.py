"""The CPU programs for other machines: one without AVX and conversions of float16, and ones that are not here."""

from __future__ import annotations

from typing import Any

import pytest

import tlhub
from tlhub import testing
from tlhub.problem import symbols
from tlhub.specs import Kernel
from tlhub_attention.contracts.backward import ATTENTION_BWD
from tlhub_attention.contracts.decode import DECODE
from tlhub_attention.contracts.forward import ATTENTION
from tlhub_attention.contracts.varlen import VARLEN

CASES: list[tuple[Kernel, str, dict[str, Any]]] = [
    (ATTENTION, "float16", {"causal": True, "lse": True}),
    (ATTENTION, "float64", {"causal": True, "lse": True}),
    (ATTENTION_BWD, "float16", {"causal": True}),
    (DECODE, "bfloat16", {"paged": True}),
    (VARLEN, "bfloat16", {"lse": True}),
]
NAMES = [f"{kernel.name}-{dtype}" for kernel, dtype, _ in CASES]
SIZES = {"B": 2, "H": 4, "H_kv": 2, "D": 40, "D_v": 24, "S": 13, "S_kv": 130, "P": 9, "page": 16, "L": 4}
SIZES |= {"T": 70, "T_kv": 210, "N1": 4}


def get(case: tuple[Kernel, str, dict[str, Any]], arch: str) -> Any:
    kernel, dtype, options = case
    return tlhub.get(kernel.name, symbols(kernel, dtype, options), dtype, arch=f"cpu:{arch}", **options)


@pytest.mark.tvm
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_machine_without_avx_is_within_the_tolerance(case: tuple[Kernel, str, dict[str, Any]]) -> None:
    kernel = get(case, "x86-64-v2")
    testing.check(kernel, dims={name: SIZES[name] for name, _ in kernel.problem.dims})


MACHINES = {"x86-64-v4": 62, "aarch64": 183}  # as an ELF header numbers them


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(MACHINES))
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_it_compiles_for(case: tuple[Kernel, str, dict[str, Any]], arch: str) -> None:
    library = get(case, arch).entry.read("kernel.so")
    assert int.from_bytes(library[18:20], "little") == MACHINES[arch]
