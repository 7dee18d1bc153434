"""The program of attention on Hopper's tensor cores: kernels for plain logits, one for others, and one for rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.cuda import tensor_cores
from tlhub.specs import DTYPES, Config, Problem
from tlhub_attention.cuda import code
from tlhub_attention.hopper.forward_plan import ITEM, Plan, box, chunk, round_up

_SERVED = f"H_kv > 0 && H % H_kv == 0 && S < {code.MOST} && S_kv < {code.MOST}"
_PLAIN = "softcap == 0 && scale > 1e-30"
"""The condition that the scale can be part of the exponent: a hidden key's -inf stays that by a factor above 0."""


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*; what tensor maps cannot take is computed row by row."""
    chosen = [Plan.parse(text) for text in str(config["plans"]).split()]
    kernels = [_Kernel(problem, plan, False) for plan in chosen] + [_Kernel(problem, chosen[-1].capped, True)]
    text = code.source(problem, "rows.cuh", tensor_cores.FILE, "softmax.cuh", "forward_hopper.cuh")
    dtype = dict(problem.dtypes)["q"]
    products = [
        tensor_cores.from_shared(dtype, {plan.keys for plan in chosen}),
        tensor_cores.from_registers(dtype, [round_up(_channels(problem)[1], 32)]),
    ]
    source = "\n".join([text, *products, *(kernel.instance() for kernel in kernels), ""])
    return CudaProgram(source, (*_branches(problem, kernels), Branch((_rows(problem),), _SERVED)))


def _branches(problem: Problem, kernels: Sequence[_Kernel]) -> Iterator[Branch]:
    """Yield the branches of *kernels*: plain logits by the cheapest plan, others by the last kernel; o by bulk copies,
    or element by element where no tensor map can be made of it."""
    fits = " && ".join([_SERVED, *(code.mappable(name, ITEM) for name in "qkv")])
    *plain, _ = kernels
    for i, kernel in enumerate(kernels):
        cheapest = [f"{kernel.price} <= {other.price}" for other in plain[i + 1 :]]
        when = [fits, f"{kernel.tiles} < {code.MOST}", *([] if kernel.capped else [_PLAIN, *cheapest])]
        yield Branch((kernel.launch(direct=False),), " && ".join([*when, code.mappable("o", _item(problem))]))
        yield Branch((kernel.launch(direct=True),), " && ".join(when))


class _Kernel(NamedTuple):
    """A kernel of *plan*; ``capped``: for logits of any scale, with and without a soft cap."""

    problem: Problem
    plan: Plan
    capped: bool

    @property
    def name(self) -> str:
        return f"hopper_{self.plan}" + ("_capped" if self.capped else "")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The channels of q and of v, and the bytes of an element of o."""
        return (*_channels(self.problem), _item(self.problem))

    @property
    def tiles(self) -> str:
        return f"B * H * CEIL_DIV(S, {self.plan.queries})"

    @property
    def price(self) -> str:
        return self.plan.price(*self.sizes)

    def instance(self) -> str:
        """Return the kernel's source, to follow forward_hopper.cuh."""
        plan, sizes = self.plan, self.sizes
        numbers = (plan.groups, plan.keys, plan.tiles(*sizes), plan.buffers(*sizes))
        return f"HOPPER({self.name}, {plan.shared(*sizes)}, {str(self.capped).lower()}, {', '.join(map(str, numbers))})"

    def launch(self, direct: bool) -> Launch:
        """Return the launch of as many blocks as fit; *direct*: o is stored element by element."""
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
                *code.parameters(self.problem),
            ),
            shared=self.plan.shared(*self.sizes),
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
