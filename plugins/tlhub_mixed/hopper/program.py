"""The program of a product on Hopper's tensor cores: a kernel for each plan, on operands as they are or on copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tlhub.build.program import Branch, CudaProgram, Expression, Launch, Parameter, TensorMap
from tlhub.cuda import tensor_cores
from tlhub.specs import DTYPES, Config, Problem
from tlhub_mixed.cuda import code
from tlhub_mixed.cuda.products import products
from tlhub_mixed.hopper.plan import BYTES, Plan

_ALIGNMENT = 16  # bytes, of addresses and strides in tensor maps
_SMALL = " && ".join(f"{dim} < 0x7fff0000" for dim in "MN") + " && K < 0x20000000"
"""The condition that extents, up to the end of the last tile, are ints."""

SPAN = 64  # columns of b, from the first of a tile on, that have one scale where scales are of blocks

NO_SCALES, OF_ROWS, OF_BLOCKS = range(3)


class Kind(NamedTuple):
    """How a problem is computed: ``scales`` of the operands, whether sums are ``promoted``, an operand's ``parts``."""

    scales: int
    promoted: bool
    parts: int


def kind(problem: Problem) -> Kind:
    """Return how *problem*, of any product, is computed."""
    option, a = problem.option, dict(problem.dtypes)["a"]
    scaling = option.get("scaling")
    if scaling == "block":
        return Kind(OF_BLOCKS, True, 1)
    if scaling:
        return Kind(OF_ROWS, a != "int8" and not option["fast_accum"], 1)
    if a == "float32":
        split = option["compute"] == "3xtf32"
        return Kind(NO_SCALES, split, 3 if split else 1)
    return Kind(NO_SCALES, a.startswith("float8") and not option["fast_accum"], 1)


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
    a, b = (_dtype(problem, name) for name in "ab")
    promoted = kind(problem).promoted
    return [products(a, b, (plan.at_once(promoted) for plan in plans)), *(_instance(problem, plan) for plan in plans)]


def values(problem: Problem, plans: Sequence[Plan]) -> Mapping[str, Expression]:
    """Return what the branches have names for: whether arrays fit, the bytes of copies, and what each plan costs."""
    made, item = kind(problem), _item(problem, "a")
    batches, _, columns = code.extents(problem, "c")
    return {
        "padded": f"(K < 1 ? 1 : CEIL_DIV(K, {BYTES // item})) * {BYTES // item}",
        **{f"fits_{name}": "0" if _copied(problem, name) else _mappable(problem, name) for name in "ab"},
        "fits_c": f"{_mappable(problem, 'c')} && ALIGNED({columns} * {_item(problem, 'c')}, {_ALIGNMENT})",
        **{
            f"copy_{name}": f"fits_{name} ? 0 : CEIL_DIV(padded * {made.parts * item} * {rows} * {batches}, 256) * 256"
            for name, rows in (("a", "M"), ("b", "N"))
        },
        **{f"cost_{i}": _price(problem, plan) for i, plan in enumerate(plans)},
    }


Unpacked: TypeAlias = "tuple[tuple[str, tuple[Launch, ...]], ...]"
"""Launches that write b to its place in the scratch memory, by the conditions under which they are taken."""


def branches(problem: Problem, plans: Sequence[Plan], unpacked: Unpacked = ()) -> tuple[Branch, ...]:
    """Return the branches: the cheapest plan, on arrays as they are, or on copies of operands in scratch memory.
    *unpacked*: of a problem that has no b."""
    whole = ["N % 2 == 0"] if _glu(problem) else []
    whole += [f"N_2 % {SPAN} == 0"] if _scaled(problem) and _glu(problem) else []
    pack = (_pack(problem),)
    ways: list[tuple[str, tuple[Launch, ...]]]
    if unpacked:
        ways = [(f"fits_a && {when}" if when else "fits_a", launches) for when, launches in unpacked]
        ways += [(when, (*launches, *pack)) for when, launches in unpacked]
    else:
        ways = [("fits_a && fits_b", ()), ("", pack)]
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


def _dtype(problem: Problem, name: str) -> str:
    """Return the dtype of an operand or of c; that of weights which are unpacked is a's."""
    return dict(problem.dtypes).get(name, problem.dtype)


def _item(problem: Problem, name: str) -> int:
    return DTYPES[_dtype(problem, name)][1] // 8


def _mappable(problem: Problem, name: str) -> str:
    """Return the condition that a tensor map can be made of *name* where it is, with rows along K, or of c along N: not
    empty, elements side by side, an address and strides above 0 that are multiples of 16 bytes. Strides of dims of
    extent 1 do not count."""
    item = _item(problem, name)
    batch, row, column = code.strides(problem, name)
    extents = code.extents(problem, name)
    steps = (
        f"({extent} == 1 || {step} > 0 && ALIGNED({step} * {item}, {_ALIGNMENT}))"
        for extent, step in zip(extents, (batch, row), strict=False)
    )
    filled = (f"{extent} > 0" for extent in extents)
    return " && ".join([f"{column} == 1", f"ALIGNED(DATA({name}), {_ALIGNMENT})", *filled, *steps])


def _clusters(problem: Problem, plan: Plan) -> str:
    """Return how many clusters have a tile, or tiles that share B."""
    batches, rows, _ = code.extents(problem, "c")
    return f"{batches} * CEIL_DIV({rows}, {plan.rows * plan.share}) * CEIL_DIV(N, {plan.columns})"


def _price(problem: Problem, plan: Plan) -> str:
    made = kind(problem)
    return plan.price(_clusters(problem, plan), made.promoted, BYTES // _item(problem, "a"), made.parts)


def _copied(problem: Problem, name: str) -> bool:
    """Tell whether an operand is never taken as it is: it is split in parts, or weights that are unpacked."""
    return kind(problem).parts > 1 or name not in dict(problem.dtypes)


def _glu(problem: Problem) -> bool:
    return bool(problem.option.get("glu"))


def _scaled(problem: Problem) -> bool:
    return kind(problem).scales == OF_BLOCKS


def _name(plan: Plan) -> str:
    return "product_" + str(plan).replace("-", "_")


def _instance(problem: Problem, plan: Plan) -> str:
    item, glu = _item(problem, "c"), _glu(problem)
    sizes = (plan.rows, plan.columns, plan.stages(item, glu, _scaled(problem)))
    numbers = (*sizes, plan.share, plan.split, plan.band, plan.chunk(item, glu))
    return f"PRODUCT({_name(plan)}, {plan.shared(item, glu, _scaled(problem))}, {', '.join(map(str, numbers))})"


def _operand(problem: Problem, name: str, box: int, copied: bool) -> TensorMap:
    """Return the tensor map of a or b, boxes of 128 bytes of K and *box* rows; *copied*: of its copy, if it has one.

    float32 is rounded to tf32 as it is loaded: the tensor core cuts what it is given, which errs twice as far, and
    always towards 0.
    """
    dtype, item = _dtype(problem, name), _item(problem, name)
    at = "0" if name == "a" else "copy_a"
    batches, rows, _ = code.extents(problem, name)
    batch, row, _ = code.strides(problem, name)
    width = f"padded * {kind(problem).parts}"

    def either(of_array: str, of_copy: str) -> str:
        if name not in dict(problem.dtypes):
            return of_copy
        return f"(fits_{name} ? {of_array} : {of_copy})" if copied else of_array

    def step(extent: str, stride: str, of_copy: str) -> str:
        return either(f"({extent} == 1 ? {_ALIGNMENT} : {stride} * {item})", f"{of_copy} * {item}")

    return TensorMap(
        "tfloat32" if dtype == "float32" else dtype,
        either(f"DATA({name})", room(at)),
        (either("K", width), rows, batches),
        (step(rows, row, width), step(batches, batch, f"{width} * {rows}")),
        (BYTES // item, box, 1),
    )


def _result(problem: Problem, chunk: int) -> TensorMap:
    """Return the tensor map of c, in boxes of *chunk* columns and 16 rows."""
    item = _item(problem, "c")
    batches, rows, columns = code.extents(problem, "c")
    batch, row, _ = code.strides(problem, "c")
    steps = (f"({extent} == 1 ? {_ALIGNMENT} : {step} * {item})" for extent, step in ((rows, row), (batches, batch)))
    extents, box = (columns, rows, batches), (chunk, 16, 1)
    return TensorMap(dict(problem.dtypes)["c"], "DATA(c)", extents, tuple(steps), box, swizzle=chunk * item)


def room(at: str) -> str:
    """Return an address in the scratch memory."""
    return f"(void *)((char *)WORKSPACE + {at})"


def _product(problem: Problem, plan: Plan, copied: bool, direct: bool) -> Launch:
    """Return the launch of *plan*; *direct*: it stores element by element."""
    item = _item(problem, "c")
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
        shared=plan.shared(item, _glu(problem), _scaled(problem)),
        cluster=(plan.cluster, 1, 1),
        programmatic=True,
    )


def _pack(problem: Problem) -> Launch:
    """Return the launch that copies those of a and b that do not fit."""

    def operand(name: str, at: str, rows: str) -> tuple[Parameter, ...]:
        there = name in dict(problem.dtypes)
        steps = code.strides(problem, name) if there else ("0", "0", "0")
        return (
            Parameter("void *", f"DATA({name})" if there else 0),
            *(Parameter("int64_t", step) for step in steps),
            Parameter("void *", f"(fits_{name} ? (void *)0 : {room(at)})" if there else 0),
            Parameter("int64_t", rows),
        )

    batches = code.extents(problem, "c")[0]
    sizes = (Parameter("int64_t", value) for value in (batches, "K", "padded"))
    parameters = (*sizes, *operand("a", "0", "M"), *operand("b", "copy_a", "N"))
    return Launch("pack_operands", ("SMS * 8", 1, 1), (256, 1, 1), parameters)
