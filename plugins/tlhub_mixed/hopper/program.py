"""The program of a product on Hopper's tensor cores: a kernel for each plan, on operands as they are or on copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlhub.build.program import Branch, CudaProgram, Expression, Launch, Parameter, TensorMap
from tlhub.cuda import tensor_cores
from tlhub.specs import Config, Problem
from tlhub_mixed.cuda import code, operands
from tlhub_mixed.cuda.operands import ALIGNMENT, OF_BLOCKS, dtype_of, item_of, kind, room
from tlhub_mixed.cuda.products import products
from tlhub_mixed.hopper.plan import BYTES, Plan

_SMALL = " && ".join(f"{dim} < 0x7fff0000" for dim in "MN") + " && K < 0x20000000"
"""The condition that extents, up to the end of the last tile, are ints."""

SPAN = 64  # columns of b, from the first of a tile on, that have one scale where scales are of blocks


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*."""
    plans = [Plan.parse(text) for text in str(config["plans"]).split()]
    made = kind(problem)
    constants = {"SCALES": made.scales, "PROMOTED": int(made.promoted), "PARTS": made.parts}
    source = [code.source(problem, constants, *FILES), *kernels(problem, plans), ""]
    return CudaProgram("\n".join(source), branches(problem, plans), values=values(problem, plans))


FILES = ("pack.cuh", tensor_cores.FILE, "product_hopper.cuh")
"""The texts that the kernels are in, after call.cuh."""


def kernels(problem: Problem, plans: Sequence[Plan]) -> list[str]:
    """Return the source of products, and of a kernel for each plan, to follow that of ``FILES``."""
    a, b = (dtype_of(problem, name) for name in "ab")
    promoted = kind(problem).promoted
    return [products(a, b, (plan.at_once(promoted) for plan in plans)), *(_instance(problem, plan) for plan in plans)]


def values(problem: Problem, plans: Sequence[Plan]) -> Mapping[str, Expression]:
    """Return what the branches have names for: whether arrays fit, the bytes of copies, and what each plan costs."""
    columns = code.extents(problem, "c")[2]
    return {
        **operands.values(problem, kind(problem).parts),
        "fits_c": f"{operands.aligned(problem, 'c')} && ALIGNED({columns} * {item_of(problem, 'c')}, {ALIGNMENT})",
        **{f"cost_{i}": _price(problem, plan) for i, plan in enumerate(plans)},
    }


def branches(problem: Problem, plans: Sequence[Plan]) -> tuple[Branch, ...]:
    """Return the branches: the cheapest plan, on arrays as they are, or on copies of operands in scratch memory."""
    whole = ["N % 2 == 0"] if _glu(problem) else []
    whole += [f"N_2 % {SPAN} == 0"] if _scaled(problem) and _glu(problem) else []
    ways: list[tuple[str, tuple[Launch, ...]]] = [("fits_a && fits_b", ()), ("", (operands.pack(problem),))]
    found: list[Branch] = []
    for i, plan in enumerate(plans):
        cheapest = [f"cost_{i} <= cost_{j}" for j in range(i + 1, len(plans))]
        small = [_SMALL, f"{_clusters(problem, plan)} * {plan.cluster} < 0x7fff0000", *whole, *cheapest]
        for way, before in ways:
            for stored, direct in (("fits_c", False), ("", True)):
                launches = (*before, _product(problem, plan, copied=bool(before), direct=direct))
                when = " && ".join(filter(None, [way, stored, *small]))
                found.append(Branch(launches, when, "copy_a + copy_b" if before else 0))
    return tuple(found)


def _clusters(problem: Problem, plan: Plan) -> str:
    """Return how many clusters have a tile, or tiles that share B."""
    batches, rows, _ = code.extents(problem, "c")
    return f"{batches} * CEIL_DIV({rows}, {plan.rows * plan.share}) * CEIL_DIV(N, {plan.columns})"


def _price(problem: Problem, plan: Plan) -> str:
    made = kind(problem)
    return plan.price(_clusters(problem, plan), made.promoted, made.scales, BYTES // item_of(problem, "a"), made.parts)


def _glu(problem: Problem) -> bool:
    return bool(problem.option.get("glu"))


def _scaled(problem: Problem) -> bool:
    return kind(problem).scales == OF_BLOCKS


def _name(plan: Plan) -> str:
    return "product_" + str(plan).replace("-", "_")


def _instance(problem: Problem, plan: Plan) -> str:
    item, glu = item_of(problem, "c"), _glu(problem)
    sizes = (plan.rows, plan.columns, plan.stages(item, glu, kind(problem).scales))
    numbers = (*sizes, plan.share, plan.split, plan.band, plan.chunk(item, glu))
    return f"PRODUCT({_name(plan)}, {plan.shared(item, glu, kind(problem).scales)}, {', '.join(map(str, numbers))})"


def _operand(problem: Problem, name: str, box: int, copied: bool) -> TensorMap:
    """Return the tensor map of a or b, boxes of 128 bytes of K and *box* rows; *copied*: of its copy, if it has one.

    float32 is rounded to tf32 as it is loaded: the tensor core cuts what it is given, which errs twice as far, and
    always towards 0. Where scales are of blocks L2 fetches what a stage has: 2 to 6 % faster with few rows.
    """
    dtype, item = dtype_of(problem, name), item_of(problem, name)
    at = "0" if name == "a" else "copy_a"
    batches, rows, _ = code.extents(problem, name)
    batch, row, _ = code.strides(problem, name)
    width = f"padded * {kind(problem).parts}"

    def either(of_array: str, of_copy: str) -> str:
        return f"(fits_{name} ? {of_array} : {of_copy})" if copied else of_array

    def step(extent: str, stride: str, of_copy: str) -> str:
        return either(f"({extent} == 1 ? {ALIGNMENT} : {stride} * {item})", f"{of_copy} * {item}")

    return TensorMap(
        "tfloat32" if dtype == "float32" else dtype,
        either(f"DATA({name})", room(at)),
        (either("K", width), rows, batches),
        (step(rows, row, width), step(batches, batch, f"{width} * {rows}")),
        (BYTES // item, box, 1),
        promotion=BYTES if kind(problem).scales == OF_BLOCKS else 2 * BYTES,
    )


def _result(problem: Problem, chunk: int) -> TensorMap:
    """Return the tensor map of c, in boxes of *chunk* columns and 16 rows."""
    item = item_of(problem, "c")
    batches, rows, columns = code.extents(problem, "c")
    batch, row, _ = code.strides(problem, "c")
    steps = (f"({extent} == 1 ? {ALIGNMENT} : {step} * {item})" for extent, step in ((rows, row), (batches, batch)))
    extents, box = (columns, rows, batches), (chunk, 16, 1)
    return TensorMap(dict(problem.dtypes)["c"], "DATA(c)", extents, tuple(steps), box, swizzle=chunk * item)


def _product(problem: Problem, plan: Plan, copied: bool, direct: bool) -> Launch:
    """Return the launch of *plan*; *direct*: it stores element by element."""
    item = item_of(problem, "c")
    a = _operand(problem, "a", plan.rows, copied)
    b = _operand(problem, "b", plan.columns // plan.halves(_glu(problem)), copied)
    clusters, fit = _clusters(problem, plan), f"(SMS / {plan.share} * {plan.resident})"
    resident = clusters if plan.split > 1 else f"({clusters} < {fit} ? {clusters} : {fit})"
    return Launch(
        kernel=_name(plan),
        grid=(f"{resident} * {plan.cluster}", 1, 1),
        block=(plan.threads, 1, 1),
        parameters=(
            a,
            b,
            a if direct else _result(problem, plan.chunk(item, _glu(problem))),
            Parameter("int", int(direct)),
            *code.parameters(problem),
        ),
        shared=plan.shared(item, _glu(problem), kind(problem).scales),
        cluster=(plan.cluster, 1, 1),
        programmatic=True,
    )
