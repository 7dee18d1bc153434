"""The program of attention by mma.sync: a kernel for plain logits, one for others, and one for rows. Of sequences that
lie end to end, too."""

from __future__ import annotations

from typing import NamedTuple

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.cuda import tensor_cores, warp_mma
from tlhub.specs import DTYPES, Config, Problem
from tlhub_attention.cuda import code
from tlhub_attention.mma.forward_plan import ITEM, Plan

_SERVED = f"H_kv > 0 && H % H_kv == 0 && S < {code.MOST} && S_kv < {code.MOST}"
_PLAIN = "softcap == 0 && scale > 1e-30"
"""The condition that the scale can be part of the exponent: a hidden key's -inf stays that by a factor above 0."""


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plan in *config*; arrays that are not aligned are computed row by row."""
    plan = Plan.parse(str(config["plan"]))
    text = code.source(problem, "rows.cuh", tensor_cores.FILE, warp_mma.FILE, "softmax.cuh", "forward_mma.cuh")
    kernels = [_Kernel(problem, plan.finished(int(problem.dim["D_v"])), True)]
    if not problem.option["alibi"]:
        kernels.insert(0, _Kernel(problem, plan, False))
    source = "\n".join([text, *(kernel.instance() for kernel in kernels), ""])
    values = {**code.values(problem), "tiles": _tiles(problem, plan)}
    branches = [*(kernel.branch() for kernel in kernels), Branch((_rows(problem),), _SERVED)]
    return CudaProgram(source, tuple(branches), values=values)


class _Kernel(NamedTuple):
    """A kernel of *plan*; ``finished``: for logits of any scale, with and without a soft cap and a bias."""

    problem: Problem
    plan: Plan
    finished: bool

    @property
    def name(self) -> str:
        return f"mma_{self.plan}" + ("_finished" if self.finished else "")

    @property
    def shared(self) -> int:
        return self.plan.shared(*(int(self.problem.dim[name]) for name in ("D", "D_v")))

    def instance(self) -> str:
        """Return the kernel's source, to follow forward_mma.cuh."""
        plan = self.plan
        numbers = (self.shared, plan.blocks, str(self.finished).lower(), plan.queries, plan.keys, plan.warps)
        return f"FORWARD_MMA({self.name}, {', '.join(map(str, numbers))})"

    def branch(self) -> Branch:
        """Return the branch of what the kernel serves, a block a tile."""
        problem = self.problem
        whole = _aligned(problem, "o", DTYPES[dict(problem.dtypes)["o"]][1] // 8)
        launch = Launch(
            kernel=self.name,
            grid=("tiles", 1, 1),
            block=(self.plan.threads, 1, 1),
            parameters=(Parameter("int", f"({whole})"), *code.parameters(problem)),
            shared=self.shared,
        )
        when = [_SERVED, f"tiles < {code.MOST}", *(_aligned(problem, name, ITEM) for name in "qkv")]
        return Branch((launch,), " && ".join(when if self.finished else [*when, _PLAIN]))


def _tiles(problem: Problem, plan: Plan) -> str:
    """Return how many tiles there may be, as a C expression. Of sequences end to end it is what forward_mma.cuh's find
    numbers: as many as all queries have as one, and one more of each, and of the queries before and after them."""
    if code.varlen(problem):
        return f"H * (T == 0 ? 0 : T / {plan.queries} + N1 + 1)"
    return f"B * H * CEIL_DIV(S, {plan.queries})"


def _aligned(problem: Problem, name: str, item: int) -> str:
    """Return the condition that 16 bytes of array *name*, of *item* bytes an element, can be accessed at once: channels
    lie side by side, and all else is aligned. Strides of dims of extent 1 do not count."""
    last = code.rank(problem) - 1
    steps = (f"(EXTENT({name}, {dim}) == 1 || ALIGNED(STRIDE({name}, {dim}) * {item}, 16))" for dim in range(last))
    return " && ".join([f"STRIDE({name}, {last}) == 1", f"ALIGNED(DATA({name}), 16)", *steps])


def _rows(problem: Problem) -> Launch:
    rows = "CEIL_DIV(B * H * S, 4)"
    grid = (f"({rows} < SMS * 16 ? {rows} : SMS * 16)", 1, 1)
    return Launch("attend_rows", grid, (128, 1, 1), code.parameters(problem))
