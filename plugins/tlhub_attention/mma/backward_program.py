"""The program of attention's gradients by mma.sync: the products, what is before and after, and all by rows."""

from __future__ import annotations

from pathlib import Path

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.cuda import tensor_cores, warp_mma
from tlhub.specs import Config, Problem
from tlhub_attention.cuda import backward_code, code
from tlhub_attention.mma.backward_plan import ITEM, Plan

FILES: tuple[str | Path, ...] = (
    *("rows.cuh", tensor_cores.FILE, warp_mma.FILE),
    *(f"backward_{part}.cuh" for part in ("call", "rows", "tiles", "begin", "operands", "mma")),
)
"""What follows call.cuh."""

_SERVED = f"H_kv > 0 && H % H_kv == 0 && S < {code.MOST} && S_kv < {code.MOST}"
_BEGIN = 256  # threads of a block of the kernel before


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program, by the config's ``plan``; arrays that asynchronous copies cannot take are computed row
    by row."""
    plan = Plan(*map(int, str(config["plan"]).split("x")))
    d, d_v = int(problem.dim["D"]), int(problem.dim["D_v"])
    programmatic = int(arch.rpartition("_")[2].rstrip("af")) >= 90
    scratch = [
        Parameter("void *", f"((char *)WORKSPACE + tiles * {offset})")
        for offset in (0, plan.sums(d, d_v), plan.sums(d, d_v) + plan.stats)
    ]
    call = backward_code.parameters(problem)

    def launch(kernel: str, blocks: str, threads: int, whole: str, shared: int = 0) -> Launch:
        parameters = (Parameter("int", whole), *scratch, *call)
        return Launch(kernel, (blocks, 1, 1), (threads, 1, 1), parameters, shared, programmatic=programmatic)

    def whole(name: str) -> str:
        return f"({code.mappable(name, ITEM, code.rank(problem))})"

    launches = (
        launch("begin_mma", "tiles", _BEGIN, whole("o")),
        launch("backward_mma", "blocks", plan.threads, f"({whole('dk')} | {whole('dv')} << 1)", plan.shared(d, d_v)),
        launch("end_mma", "tiles", plan.threads, whole("dq")),
        backward_code.rows(problem, scratch[2], programmatic),
    )
    fits = [_SERVED, *(whole(name) for name in ("q", "k", "v", "dout"))]
    small = [f"tiles < {code.MOST}", f"blocks < {code.MOST}"]
    return CudaProgram(
        source="\n".join(
            [
                f"constexpr bool DETERMINISTIC = {str(problem.option['deterministic']).lower()};",
                code.source(problem, *FILES),
                f"BACKWARD({', '.join(map(str, (plan.shared(d, d_v), *plan)))})\n",
            ]
        ),
        branches=(
            Branch(launches, " && ".join([*fits, *small]), f"tiles * {plan.sums(d, d_v) + plan.stats + 4} + 8"),
            Branch((backward_code.rows(problem, Parameter("void *", 0), programmatic),), _SERVED),
        ),
        values={
            **code.values(problem),
            "tiles": f"B * H * {backward_code.tiles(problem, 'S', plan.queries)}",
            "blocks": f"B * H_kv * {backward_code.tiles(problem, 'S_kv', plan.keys)}",
        },
    )
