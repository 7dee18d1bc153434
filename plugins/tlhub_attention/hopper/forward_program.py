"""The program of attention on Hopper's tensor cores: kernels for plain logits, one for others, and one for rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.cuda import tensor_cores
from tlhub.specs import DTYPES, Config, Problem
from tlhub_attention.cuda import code
from tlhub_attention.hopper.forward_plan import ITEM, Plan, box, chunk, round_up

_SERVED = f"H_kv > 0 && H % H_kv == 0 && S < {code.MOST} && S_kv < {code.MOST}"
_PLAIN = "softcap == 0 && scale > 1e-18"
"""The condition that the scale can be part of the exponent: a hidden key's -inf stays that by a factor above 0, and a
slope that is divided by it is a number."""


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*; what tensor maps cannot take is computed row by row."""
    return compose(problem, config, Kernel)


def compose(problem: Problem, config: Config, kind: type[Kernel]) -> CudaProgram:
    """Return the program of kernels of a *kind*."""
    chosen = [Plan.parse(text) for text in str(config["plans"]).split()]
    kernels = [kind(problem, plan, False) for plan in chosen] + [kind(problem, chosen[-1].capped, True)]
    text = code.source(problem, "rows.cuh", tensor_cores.FILE, *kind.FILES)
    dtype = dict(problem.dtypes)["q"]
    products = [
        tensor_cores.from_shared(dtype, {plan.keys for plan in chosen}),
        tensor_cores.from_registers(dtype, [round_up(_channels(problem)[1], 32)]),
    ]
    source = "\n".join([text, *products, *(kernel.instance() for kernel in kernels), ""])
    branches = (*_branches(problem, kernels), Branch((_rows(problem),), _SERVED))
    return CudaProgram(source, branches, values=code.values(problem))


def _branches(problem: Problem, kernels: Sequence[Kernel]) -> Iterator[Branch]:
    """Yield the branches of *kernels*: plain logits by the cheapest plan, others by the last kernel; o by bulk copies,
    or element by element where no tensor map can be made of it."""
    rank = code.rank(problem)
    fits = " && ".join([_SERVED, *(code.mappable(name, ITEM, rank) for name in "qkv")])
    bulk = code.mappable("o", _item(problem), rank)
    *plain, _ = kernels
    for i, kernel in enumerate(kernels):
        cheapest = [f"{kernel.price} <= {other.price}" for other in plain[i + 1 :]]
        when = " && ".join([fits, f"{kernel.tiles} < {code.MOST}", *([] if kernel.capped else [_PLAIN, *cheapest])])
        yield Branch(kernel.launches(direct=False), f"{when} && {bulk}", kernel.workspace)
        yield Branch(kernel.launches(direct=True), when, kernel.workspace)


@dataclass(frozen=True)
class Kernel:
    """A kernel of *plan*; ``capped``: for logits of any scale, with and without a soft cap."""

    problem: Problem
    plan: Plan
    capped: bool

    FILES: ClassVar[tuple[str, ...]] = ("softmax.cuh", "forward_hopper.cuh")
    KEYS: ClassVar[str] = "S_kv"  # that a query may see
    BESIDE: ClassVar[int] = 0  # bytes of shared memory besides the plan's

    @property
    def name(self) -> str:
        return f"hopper_{self.plan}" + ("_capped" if self.capped else "")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The channels of q and of v, and the bytes of an element of o."""
        return (*_channels(self.problem), _item(self.problem))

    @property
    def shared(self) -> int:
        return self.plan.shared(*self.sizes) + self.BESIDE

    @property
    def tiles(self) -> str:
        """How many tiles there are, at most."""
        return f"B * H * CEIL_DIV(S, {self.plan.queries})"

    @property
    def price(self) -> str:
        return self.plan.price(*self.sizes, keys=self.KEYS)

    @property
    def workspace(self) -> str:
        return "0"

    @property
    def arguments(self) -> str:
        """What follows the names in the kernel's source: HOPPER's arguments."""
        plan, sizes = self.plan, self.sizes
        numbers = (plan.groups, plan.keys, plan.tiles(*sizes), plan.buffers(*sizes))
        return f"{self.shared}, {str(self.capped).lower()}, {', '.join(map(str, numbers))}"

    def instance(self) -> str:
        """Return the kernel's source, to follow ``FILES``."""
        return f"HOPPER({self.name}, {self.arguments})"

    def launches(self, direct: bool) -> tuple[Launch, ...]:
        """Return a call's; *direct*: o is stored element by element."""
        return (self.launch(direct),)

    def launch(self, direct: bool, *before: Parameter) -> Launch:
        """Return the launch of as many blocks as fit, with parameters *before* those of a call."""
        _, d_v, item = self.sizes
        return Launch(
            kernel=self.name,
            grid=(f"({self.tiles} < SMS ? {self.tiles} : SMS)", 1, 1),
            block=(self.plan.threads, 1, 1),
            parameters=(
                code.tensor_map(self.problem, "q", (64, self.plan.queries)),
                code.tensor_map(self.problem, "k", (64, self.plan.keys)),
                code.tensor_map(self.problem, "v", (box(d_v), self.plan.keys)),
                code.tensor_map(self.problem, "q" if direct else "o", (chunk(d_v, item), 16)),
                Parameter("int", int(direct)),
                *before,
                *code.parameters(self.problem),
            ),
            shared=self.shared,
            programmatic=True,
        )


def _channels(problem: Problem) -> tuple[int, int]:
    """Return the channels of q and of v."""
    return int(problem.dim["D"]), int(problem.dim["D_v"])


def _item(problem: Problem) -> int:
    """Return the bytes of an element of o."""
    return DTYPES[dict(problem.dtypes)["o"]][1] // 8


def _rows(problem: Problem) -> Launch:
    rows = "CEIL_DIV(B * H * S, 4)"
    grid = (f"({rows} < SMS * 16 ? {rows} : SMS * 16)", 1, 1)
    return Launch("attend_rows", grid, (128, 1, 1), code.parameters(problem))
