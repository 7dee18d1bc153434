"""The program of products with narrow weights on Hopper: few rows as on any GPU, many by wgmma, on unpacked weights."""

from __future__ import annotations

from tlhub.build.program import CudaProgram
from tlhub.cuda import tensor_cores, warp_mma
from tlhub.specs import Config, Problem
from tlhub_mixed.cuda import code, weights_program
from tlhub_mixed.hopper import program as products
from tlhub_mixed.hopper.plan import Plan

_FEW = 128
"""Rows of a up to which weights are rather read again than unpacked."""


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*, for calls of more rows than the kernels for few have."""
    plans = [Plan.parse(text) for text in str(config["plans"]).split()]
    files = ("pack.cuh", tensor_cores.FILE, warp_mma.FILE, "product_hopper.cuh", *weights_program.FILES)
    source = [
        weights_program.HEADERS,
        code.source(problem, weights_program.numbers(problem), *files),
        *products.kernels(problem, plans),
        *weights_program.kernels(problem),
        *weights_program.unpackers(),
        "",
    ]
    unpacked = tuple(
        (when, (launch,)) for when, launch in weights_program.unpack(problem, products.room("copy_a"), "padded")
    )
    few = weights_program.branches(problem, arch, f"M <= {_FEW}")
    return CudaProgram(
        "\n".join(source),
        (*few, *products.branches(problem, plans, unpacked)),
        values=products.values(problem, plans),
    )
