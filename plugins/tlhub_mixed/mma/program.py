"""The program of a product by mma.sync: a kernel for each plan, on operands as they are or on copies."""

from __future__ import annotations

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.cuda import tensor_cores, warp_mma
from tlhub.specs import Config, Problem
from tlhub_mixed.cuda import code, operands
from tlhub_mixed.mma.plan import PLANS, Plan

_SMALL = "M < 0x7fff0000 && N < 0x7fff0000 && K < 0x1fff0000"
"""The condition that extents, and bytes of a row, are ints up to the end of the last tile."""

_FILES = (tensor_cores.FILE, warp_mma.FILE, "pack.cuh", "product_mma.cuh")
_HEADERS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>"  # warp_mma.cuh's
_SHAPES = {"int8": "m16n8k32.row.col.s32.s8.s8.s32", "float32": "m16n8k8.row.col.f32.tf32.tf32.f32"}
_FLOAT8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of all plans, for any sizes."""
    source = [
        _HEADERS,
        f'#define WARP_PRODUCT "{_instruction(problem)}"',
        code.source(problem, _constants(problem), *_FILES, operand="uint32_t" if problem.dtype == "float32" else None),
        *(f"PRODUCT({p.name}, {_shared(problem, p)}, {', '.join(map(str, (*p[:5], p.band)))})" for p in PLANS),
        "",
    ]
    depth = operands.BYTES // operands.item_of(problem, "a")
    costs = {f"cost_{i}": plan.price(_tiles(problem, plan), depth) for i, plan in enumerate(PLANS)}
    branches = _branches(problem, programmatic=code.number(arch) >= 90)
    return CudaProgram("\n".join(source), branches, values={**operands.values(problem, parts=1), **costs})


def _constants(problem: Problem) -> dict[str, object]:
    made = operands.kind(problem)
    products = made.parts if problem.dtype == "float32" else 0
    return {"SCALES": made.scales, "PROMOTED": int(made.promoted), "PARTS": 1, "TF32": products}


def _instruction(problem: Problem) -> str:
    """Return the shape and the types of the product of a warp, as PTX has them."""
    a, b = (operands.dtype_of(problem, name) for name in "ab")
    return _SHAPES.get(a) or f"m16n8k32.row.col.f32.{_FLOAT8[a]}.{_FLOAT8[b]}.f32"


def _shared(problem: Problem, plan: Plan) -> int:
    return plan.shared(split=operands.kind(problem).parts > 1)


def _tiles(problem: Problem, plan: Plan) -> str:
    batches, rows, _ = code.extents(problem, "c")
    columns = plan.columns // (2 if problem.option["glu"] else 1)
    return f"{batches} * CEIL_DIV({rows}, {plan.rows}) * CEIL_DIV({code.columns(problem)}, {columns})"


def _branches(problem: Problem, programmatic: bool) -> tuple[Branch, ...]:
    """Return the branches: the cheapest plan, on arrays as they are, or on copies of operands in scratch memory."""
    found = []
    for i, plan in enumerate(PLANS):
        cheapest = [f"cost_{i} <= cost_{j}" for j in range(i + 1, len(PLANS))]
        small = [_SMALL, f"{_tiles(problem, plan)} < 0x7fff0000", *(["N % 2 == 0"] if problem.option["glu"] else [])]
        when = " && ".join([*small, *cheapest])
        as_is, of_copies = (_product(problem, plan, copied, programmatic) for copied in (False, True))
        found.append(Branch((as_is,), f"fits_a && fits_b && {when}"))
        found.append(Branch((operands.pack(problem), of_copies), when, "copy_a + copy_b"))
    return tuple(found)


def _product(problem: Problem, plan: Plan, copied: bool, programmatic: bool) -> Launch:
    """Return the launch of *plan*; *copied*: on copies of the operands that do not fit."""
    both = (*_operand(problem, "a", "0", copied), *_operand(problem, "b", "copy_a", copied))
    return Launch(
        kernel=plan.name,
        grid=(_tiles(problem, plan), 1, 1),
        block=(plan.threads, 1, 1),
        parameters=(*both, *code.parameters(problem)),
        shared=_shared(problem, plan),
        programmatic=programmatic,
    )


def _operand(problem: Problem, name: str, at: str, copied: bool) -> tuple[Parameter, ...]:
    """Return where an operand, or its copy, is, and the bytes from a batch and from a row to the next."""
    item = operands.item_of(problem, name)
    batch, row, _ = code.strides(problem, name)
    rows = code.extents(problem, name)[1]

    def either(of_array: str, of_copy: str) -> str:
        return f"(fits_{name} ? {of_array} : {of_copy})" if copied else of_array

    return (
        Parameter("void *", either(f"DATA({name})", operands.room(at))),
        Parameter("int64_t", either(f"{batch} * {item}", f"padded * {item} * {rows}")),
        Parameter("int64_t", either(f"{row} * {item}", f"padded * {item}")),
    )
