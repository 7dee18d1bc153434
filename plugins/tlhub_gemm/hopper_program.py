"""The program of gemm on Hopper's tensor cores: a kernel for each plan, and the CUDA cores for what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tlhub.build.program import Branch, CudaProgram, Expression, Launch, Parameter, TensorMap
from tlhub.cuda import tensor_cores
from tlhub.specs import DTYPES, Config, Problem
from tlhub_gemm import cuda_code, simt_program, skinny_program
from tlhub_gemm.hopper_plan import BLOCK, DEPTH, ITEM, Plan, finish, load
from tlhub_gemm.skinny_plan import tiles

_ALIGNMENT = 16  # bytes, of addresses and strides in tensor maps
_LINE = 128  # bytes that memory is read by; rows that begin elsewhere take up to twice as long

FILES: tuple[str | Path, ...] = (
    tensor_cores.FILE,
    tensor_cores.FILE.with_name("staging.cuh"),
    *(f"{name}.cuh" for name in ("operand", "hopper_tiles", "hopper_finish", "hopper", "align")),
)
"""The texts that the kernels are in."""


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program: kernels of ``plans``, kernels for few rows if *config* has some, and the CUDA cores'."""
    chosen, few = plans(config), tiles(config)
    files = dict.fromkeys((*FILES, *(skinny_program.files(arch) if few else ()), *simt_program.FILES))
    products = tensor_cores.from_shared(dict(problem.dtypes)["a"], [*few, *(plan.columns for plan in chosen)])
    instances = skinny_program.kernels(problem, config, arch) + kernels(problem, chosen)
    served = (
        *skinny_program.branches(problem, config, arch),
        *branches(problem, chosen),
        *simt_program.branches(problem),
    )
    source = cuda_code.source(problem, *files) + products + instances
    return CudaProgram(source, served, values=values(problem, chosen))


def plans(config: Config) -> tuple[Plan, ...]:
    """Return the plans that a config names. Raises BuildError."""
    return tuple(Plan.parse(text) for text in str(config["plans"]).split())


def kernels(problem: Problem, plans: Sequence[Plan]) -> str:
    """Return the source of a kernel for each plan, to follow that of ``FILES`` and of their products."""
    return "\n".join([*(_instance(problem, plan) for plan in plans), ""])


def values(problem: Problem, plans: Sequence[Plan]) -> dict[str, Expression]:
    """Return what the branches have names for: whether arrays fit, the bytes of copies, and what each plan costs."""
    arrays = [_Array.of(problem, name) for name in "abc"]
    fits = {array.fits: cuda_code.mappable(problem, array.name, _ALIGNMENT) for array in arrays}
    fits["fits_c"] += f" && ALIGNED(EXTENT(c, 2) * {_item(problem)}, {_ALIGNMENT})"  # whole 16 bytes are written
    if problem.option["residual"] and _item(problem, "residual") == ITEM:
        fits["fits_c"] += f" && {cuda_code.mappable(problem, 'residual', _ALIGNMENT)}"
    copies = {array.missing: array.copy for array in arrays[:2]}
    loads = {f"load_{array.name}": load(array.name) for array in arrays[:2]}
    how = bool(problem.option["trans_b"]), finish(problem.option)
    costs = {f"cost_{i}": plan.price(*how) for i, plan in enumerate(plans)}
    return {**fits, **copies, **loads, **costs}


def branches(problem: Problem, plans: Sequence[Plan]) -> tuple[Branch, ...]:
    """Return the branches: the cheapest plan on arrays as they are, where tensor maps can be made of them all, else
    storing c element by element, else on copies of the operands in scratch memory."""
    cheapest = ([f"cost_{i} <= cost_{j}" for j in range(i + 1, len(plans))] for i in range(len(plans)))
    chosen = {p: " && ".join([_serves(problem, p), *cheap]) for p, cheap in zip(plans, cheapest, strict=True)}
    a, b, c = (_Array.of(problem, name) for name in "abc")
    near, far = a.copied("0"), b.copied(a.missing)
    scratch = f"{a.missing} + {b.missing}"
    operands, all_three = f"{a.fits} && {b.fits}", f"{a.fits} && {b.fits} && {c.fits}"
    return (
        *(Branch((_gemm(problem, p, a, b, c),), f"{all_three} && {when}") for p, when in chosen.items()),
        *(Branch((_gemm(problem, p, a, b),), f"{operands} && {when}") for p, when in chosen.items()),
        *(Branch((_align(problem, a, b), _gemm(problem, p, near, far)), when, scratch) for p, when in chosen.items()),
    )


def _serves(problem: Problem, plan: Plan) -> str:
    """Return the condition that a call is one for *plan*: its tiles, and a step past the last of them, are ints; and
    values along N begin where a box may, at a multiple of 16 bytes."""
    small = f"K > {plan.least_k} && {cuda_code.SMALL} && {_clusters(plan)} * {plan.cluster} < 0x7fff0000"
    across = _glu(problem) and not problem.option["trans_b"]
    boxes = (f"ALIGNED(N_2 * {ITEM}, {_ALIGNMENT})",) if across else ()
    return " && ".join([small, *cuda_code.even(problem), *boxes])


def _clusters(plan: Plan) -> str:
    """Return how many clusters have a tile, or tiles that share operands."""
    return f"B * CEIL_DIV(M, {plan.rows * plan.share_b}) * CEIL_DIV(N, {plan.columns * plan.share_a})"


class _Array(NamedTuple):
    """An array as a tensor map takes it: C expressions of its address, and its strides of rows and batches in bytes."""

    name: str
    address: str
    strides: tuple[Expression, ...]

    @classmethod
    def of(cls, problem: Problem, name: str) -> _Array:
        """Return an array of the call where it is."""
        found = cuda_code.tensor_map(problem, name, (1, 1))
        return cls(name, found.address, found.strides)

    @property
    def fits(self) -> str:
        """The name of the condition that a tensor map can be made of the array where it is."""
        return f"fits_{self.name}"

    @property
    def missing(self) -> str:
        """The name of the bytes of the copy that is needed."""
        return f"missing_{self.name}"

    @property
    def pitch(self) -> str:
        """Bytes of a row of a copy."""
        return f"CEIL_DIV(EXTENT({self.name}, 2) * {ITEM}, {_LINE}) * {_LINE}"

    @property
    def copy(self) -> str:
        """Bytes of the copy that is needed, 0 where none is."""
        return f"{self.fits} ? 0 : CEIL_DIV({self.pitch} * EXTENT({self.name}, 1) * B, 256) * 256"

    def copied(self, at: str) -> _Array:
        """Return the array, or where it does not fit its copy, *at* so many bytes into the scratch memory."""
        row, batch = self.pitch, f"{self.pitch} * EXTENT({self.name}, 1)"
        steps = (f"({self.fits} ? {s} : {c})" for s, c in zip(self.strides, (row, batch), strict=True))
        return _Array(self.name, f"({self.fits} ? {self.address} : {_room(at)})", tuple(steps))

    def map(self, problem: Problem, box: tuple[int, int], item: int) -> TensorMap:
        """Return a tensor map with boxes of (columns, rows) that are swizzled by their width."""
        made = cuda_code.tensor_map(problem, self.name, box)
        return replace(made, address=self.address, strides=self.strides, swizzle=box[0] * item)


def _room(at: str) -> str:
    return f"(void *)((char *)WORKSPACE + {at})"


def _name(plan: Plan) -> str:
    return "hopper_" + str(plan).replace("-", "_")


def _item(problem: Problem, name: str = "c") -> int:
    """Return the bytes of an element of array *name*; of c where *problem* has none."""
    dtypes = dict(problem.dtypes)
    return DTYPES[dtypes.get(name, dtypes["c"])][1] // 8


def _glu(problem: Problem) -> bool:
    return bool(problem.option["glu"])


def _instance(problem: Problem, plan: Plan) -> str:
    scheme, c = "hopper::PINGPONG" if plan.ping else "hopper::COOPERATIVE", (_item(problem), _glu(problem))
    shared = (plan.share_a, plan.share_b, plan.split)
    numbers = (plan.rows, plan.columns, plan.stages(*c), *shared, plan.band, plan.chunk(*c))
    return f"HOPPER({_name(plan)}, {plan.shared(*c)}, {scheme}, {', '.join(map(str, numbers))})"


def _gemm(problem: Problem, plan: Plan, a: _Array, b: _Array, c: _Array | None = None) -> Launch:
    """Return the launch of *plan*; without *c* it stores element by element."""
    clusters = _clusters(plan)
    if plan.split == 1:  # as many as fit, and no more than there are tiles
        fit = f"(SMS / {plan.cluster})"
        clusters = f"({clusters} < {fit} ? {clusters} : {fit})"
    trans_a, trans_b = problem.option["trans_a"], problem.option["trans_b"]
    item, glu = _item(problem), _glu(problem)
    of_a = of_residual = a.map(problem, _box(not trans_a, plan.rows, plan.share_a), ITEM)
    size = _item(problem, "residual")
    if c and problem.option["residual"] and size == ITEM:
        of_residual = _Array.of(problem, "residual").map(problem, (plan.chunk(size, glu), plan.rows), size)
    return Launch(
        kernel=_name(plan),
        grid=(f"{clusters} * {plan.cluster}", 1, 1),
        block=(BLOCK, 1, 1),
        parameters=(
            of_a,
            b.map(problem, _box(bool(trans_b), plan.columns // (2 if glu else 1), plan.share_b), ITEM),
            c.map(problem, (plan.chunk(item, glu), 16), item) if c else of_a,
            of_residual,
            Parameter("int", int(c is None)),
            *cuda_code.parameters(problem),
        ),
        shared=plan.shared(item, glu),
        cluster=(plan.cluster, 1, 1),
        programmatic=True,
    )


def _box(along_k: bool, extent: int, parts: int) -> tuple[int, int]:
    """Return the box of one of *parts* of an operand's tile, *extent* along M or N."""
    return (DEPTH, extent // parts) if along_k else (64 if extent % 64 == 0 else 32, DEPTH // parts)


def _align(problem: Problem, a: _Array, b: _Array) -> Launch:
    """Return the launch that copies those of *a* and *b* that do not fit."""

    def operand(array: _Array, at: str) -> tuple[Parameter, ...]:
        name = array.name
        steps = (f"STRIDE({name}, {dim})" for dim in range(3))
        extents = (f"EXTENT({name}, {dim})" for dim in (1, 2))
        to = f"({array.fits} ? (void *)0 : {_room(at)})"
        return (
            Parameter("void *", array.address),
            *(Parameter("int64_t", step) for step in steps),
            Parameter("void *", to),
            Parameter("int64_t", f"{array.pitch} / {ITEM}"),
            *(Parameter("int64_t", extent) for extent in extents),
        )

    parameters = (Parameter("int64_t", "B"), *operand(a, "0"), *operand(b, a.missing))
    return Launch("align_operands", ("SMS * 8", 1, 1), (256, 1, 1), parameters)
