"""The program of attention_decode on Hopper: kernels by the number of rows that share a kv head, and one for rows."""

from __future__ import annotations

import math
from dataclasses import replace

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter, TensorMap
from tlhub.specs import Config, Problem
from tlhub_attention.cuda import code, decode_code
from tlhub_attention.cuda.decode_plan import CHUNK, Plan
from tlhub_attention.hopper.decode_plan import BARRIERS, threads

_WIDTH = 64  # channels of a row in shared memory

_LEAST_PART = 8  # positions of a page that are copied at once


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*; what tensor maps cannot take is computed row by row."""
    chosen = [Plan.parse(text) for text in str(config["plans"]).split()]
    channels = int(problem.dim["D"]), int(problem.dim["D_v"])
    source = [
        decode_code.flags(problem),
        f"constexpr int PART = {_part(problem)};",
        code.source(problem, *decode_code.FILES, "decode_hopper.cuh"),
        *(f"HOPPER_DECODE({plan.shared(*channels, BARRIERS)}, {', '.join(map(str, plan))})\n" for plan in chosen),
    ]
    branches = (_branch(problem, plan, channels, last=plan == chosen[-1]) for plan in chosen)
    by_rows, when = decode_code.rows(problem)
    return CudaProgram("\n".join(source), (*branches, Branch((by_rows,), when)), values=decode_code.values(problem))


def _branch(problem: Problem, plan: Plan, channels: tuple[int, int], last: bool) -> Branch:
    """Return the branch of a plan; *last*: it is for any number of rows."""
    maps = tuple(_map(problem, name, _part(problem)) for name in "kv")
    launch = Launch(
        kernel=f"decode_{plan.rows}",
        grid=(plan.grid, 1, 1),
        block=(threads(plan), 1, 1),
        parameters=(*maps, Parameter("void *", "WORKSPACE"), *decode_code.parameters(problem)),
        shared=plan.shared(*channels, BARRIERS),
        programmatic=True,
    )
    fits = [*(code.mappable(name, decode_code.ITEM) for name in "kv"), *_whole_parts(problem)]
    when = " && ".join([*decode_code.served(plan, last), *fits])
    return Branch((launch,), when, workspace=plan.scratch(channels[1]))


def _map(problem: Problem, name: str, positions: int) -> TensorMap:
    """Return the tensor map of array *name*, in boxes of positions of one head.

    A box has all channels in rows of 64, so that memory is read in order, or where 64 does not divide them 64 of them.
    """
    flat = code.tensor_map(problem, name, (_WIDTH, positions))
    channels = int(problem.dim["D" if name == "k" else "D_v"])
    width, rows = (_WIDTH, channels // _WIDTH) if channels % _WIDTH == 0 else (channels, 1)
    return replace(
        flat,
        dims=(width, rows, *flat.dims[1:]),
        strides=(_WIDTH * decode_code.ITEM, *flat.strides),
        box=(_WIDTH, rows, positions, 1, 1),
        promotion=128,  # measured: with 256 memory is read 1% slower
    )


def _part(problem: Problem) -> int:
    """Return how many keys a bulk copy brings: all of a chunk's, or as many as are of one page."""
    page = problem.dim["page"] if problem.option["paged"] else CHUNK
    return max(_LEAST_PART, math.gcd(page, CHUNK)) if isinstance(page, int) else CHUNK


def _whole_parts(problem: Problem) -> list[str]:
    """Return the condition that no part lies in two pages."""
    return [f"page > 0 && page % {_part(problem)} == 0"] if problem.option["paged"] else []
