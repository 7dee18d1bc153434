"""The program of attention_decode on Hopper: kernels by the number of rows that share a kv head, and one for rows."""

from __future__ import annotations

import math
from dataclasses import replace

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter, TensorMap
from tlhub.cuda import tensor_cores
from tlhub.specs import Config, Problem
from tlhub_attention.cuda import code, decode_code
from tlhub_attention.cuda.decode_plan import Plan
from tlhub_attention.hopper.decode_plan import BARRIERS, CLUSTERS, GRID, exchange, threads, together

_WIDTH = 64  # channels of a row in shared memory

_LEAST_PART, _MOST_PART = 8, 16  # positions of a page that are copied at once


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*; what tensor maps cannot take is computed row by row."""
    chosen = [Plan.parse(text) for text in str(config["plans"]).split()]
    few = Plan.parse(str(config["together"]))
    channels = int(problem.dim["D"]), int(problem.dim["D_v"])
    shared = few.shared(*channels, BARRIERS) + exchange(channels[1])
    source = [
        decode_code.flags(problem),
        f"constexpr int PART = {_part(problem)};",
        code.source(problem, *decode_code.FILES, "decode_hopper.cuh", "decode_cluster.cuh"),
        *_products(problem, chosen),
        f"HOPPER_DECODE_TOGETHER({shared}, {', '.join(map(str, few))})\n",
        *(f"HOPPER_DECODE({plan.shared(*channels, BARRIERS)}, {', '.join(map(str, plan))})\n" for plan in chosen),
    ]
    branches = (
        *(_together(problem, few, shared, blocks) for blocks in CLUSTERS),
        *(_branch(problem, plan, channels, last=plan == chosen[-1]) for plan in chosen),
    )
    by_rows, when = decode_code.rows(problem)
    return CudaProgram("\n".join(source), (*branches, Branch((by_rows,), when)), values=decode_code.values(problem))


def _branch(problem: Problem, plan: Plan, channels: tuple[int, int], last: bool) -> Branch:
    """Return the branch of a plan; *last*: it is for any number of rows."""
    maps = tuple(_map(problem, name, plan) for name in "kv")
    launch = Launch(
        kernel=f"decode_{plan.rows}",
        grid=(GRID, 1, 1),
        block=(threads(plan), 1, 1),
        parameters=(*maps, Parameter("void *", "WORKSPACE"), *decode_code.parameters(problem)),
        shared=plan.shared(*channels, BARRIERS),
        programmatic=True,
    )
    when = " && ".join([*decode_code.served(plan, last), *_copyable(problem)])
    return Branch((launch,), when, workspace=plan.scratch(channels[1]))


def _together(problem: Problem, plan: Plan, shared: int, blocks: int) -> Branch:
    """Return the branch of a plan for few tiles, each of a cluster of so many blocks."""
    maps = tuple(_map(problem, name, plan) for name in "kv")
    launch = Launch(
        kernel="decode_together",
        grid=(blocks, "B * H_kv", 1),
        block=(threads(plan), 1, 1),
        parameters=(*maps, *decode_code.parameters(problem)),
        shared=shared,
        cluster=(blocks, 1, 1),
        programmatic=True,
    )
    when = [*decode_code.served(plan, last=False), "S == 1", together(plan, blocks), *_copyable(problem)]
    return Branch((launch,), " && ".join(when))


def _copyable(problem: Problem) -> list[str]:
    """Return the conditions that tensor maps can take keys and values, and copies parts of pages."""
    return [*(code.mappable(name, decode_code.ITEM) for name in "kv"), *_whole_parts(problem)]


def _products(problem: Problem, plans: list[Plan]) -> list[str]:
    """Return the products by wgmma of *plans*: queries with keys, weights with values."""
    columns = {n for plan in plans if plan.wide for n in (plan.chunk, int(problem.dim["D_v"]))}
    return [tensor_cores.from_registers(dict(problem.dtypes)["q"], columns)]


def _map(problem: Problem, name: str, plan: Plan) -> TensorMap:
    """Return the tensor map of array *name*, in boxes of positions of one head.

    A box has all channels in rows of 64, so that memory is read in order, or where 64 does not divide them, and for
    wgmma, 64 of them.
    """
    positions = _part(problem)
    flat = code.tensor_map(problem, name, (_WIDTH, positions))
    channels = int(problem.dim["D" if name == "k" else "D_v"])
    whole = channels % _WIDTH == 0 and not plan.wide
    width, rows = (_WIDTH, channels // _WIDTH) if whole else (channels, 1)
    return replace(
        flat,
        dims=(width, rows, *flat.dims[1:]),
        strides=(_WIDTH * decode_code.ITEM, *flat.strides),
        box=(_WIDTH, rows, positions, 1, 1),
        promotion=128,  # measured: with 256 memory is read 1% slower
    )


def _part(problem: Problem) -> int:
    """Return how many keys a bulk copy brings: as many as are of one page, whatever its number."""
    page = problem.dim["page"] if problem.option["paged"] else _MOST_PART
    return max(_LEAST_PART, math.gcd(page, _MOST_PART)) if isinstance(page, int) else _MOST_PART


def _whole_parts(problem: Problem) -> list[str]:
    """Return the condition that no part lies in two pages."""
    return [f"page > 0 && page % {_part(problem)} == 0"] if problem.option["paged"] else []
