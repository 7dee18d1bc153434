"""Which types gemm combines: every triple is served by a CPU, or cannot be, or is refused by what says which is."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tlhub import problem, resolve
from tlhub.errors import ArgumentError
from tlhub_cpu import TARGET
from tlhub_gemm.contract import DTYPES, GEMM
from tlhub_gemm.cpu import BLOCKED

pytestmark = pytest.mark.light

FACTS = TARGET.facts("cpu:x86-64-v3")
CHOICES = {o.name: o.choices for o in GEMM.options}


def judge(dtype: str, **options: Any) -> str:
    """Return ``served``, or what the CPU's schedule or the contract says."""
    try:
        made = problem.make(GEMM, (64, 64, 64), dtype, options)
    except ArgumentError as error:
        return f"contract: {error.message}"
    found = resolve.resolve([BLOCKED], made, FACTS)
    return "served" if found.candidates else f"cpu: {found.rejected[0].reason}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_served_says_what_is(dtype: str) -> None:
    for accum, out in itertools.product(CHOICES["accum"], CHOICES["out_dtype"]):
        said = judge(dtype, accum=accum, out_dtype=out)
        if said == "served":
            continue
        instead = re.findall(r"'(\w+)'", said.partition("; ")[2])
        if said.startswith("cpu: ") or instead:
            assert instead, said
            if judge(dtype, out_dtype=out) == "served":
                assert "served" in [judge(dtype, accum=a, out_dtype=out) for a in instead], said
        else:
            assert re.search(rf"with {dtype} inputs; allowed: a float|narrower than the {dtype} inputs", said), said


@pytest.mark.parametrize(
    ("dtype", "options", "said"),
    [
        ("float32", {"compute": "tf32"}, "a CPU multiplies float32 as 'ieee'"),
        ("float32", {"compute": "3xtf32"}, "a CPU multiplies float32 as 'ieee'"),
        ("float16", {"compute": "tf32"}, "it is for float32 in both"),
        ("float8_e5m2", {"fast_accum": True}, "a CPU adds up in full float32"),
        ("int8", {"fast_accum": True}, "it is for float8 with accum='float32'"),
        ("bfloat16", {"tensor_core": True}, "a CPU has no tensor cores"),
    ],
)
def test_ways_to_compute_that_are_not_served_say_what_is(dtype: str, options: dict[str, Any], said: str) -> None:
    assert said in judge(dtype, **options)
    assert judge(dtype) == "served"
