"""The program of attention on Hopper's tensor cores: a kernel for plain logits, one for others, and one for rows."""

from __future__ import annotations

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.specs import DTYPES, Config, Problem
from tlhub_attention import cuda_code, tensor_cores
from tlhub_attention.hopper_plan import ITEM, Plan, box, chunk, round_up


_SERVED = f"H_kv > 0 && H % H_kv == 0 && S < {cuda_code.MOST} && S_kv < {cuda_code.MOST}"
_PLAIN = "softcap == 0 && scale > 0"
"""The condition that the scale can be part of the exponent."""


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plan in *config*; what tensor maps cannot take is computed row by row."""
    plan = Plan.parse(str(config["plan"]))
    dim = {name: int(problem.dim[name]) for name in ("D", "D_v")}
    products = tensor_cores.from_shared(plan.keys) + tensor_cores.from_registers(round_up(dim["D_v"], 32))
    text = cuda_code.source(problem, "rows.cuh", tensor_cores.FILE, "hopper.cuh")
    kernels = (_instance(problem, plan, capped) for capped in (False, True))
    return CudaProgram("\n".join([text + products, *kernels, ""]), _branches(problem, plan))


def _branches(problem: Problem, plan: Plan) -> tuple[Branch, ...]:
    mapped = [f"{cuda_code.mappable(name, ITEM)}" for name in "qkv"]
    tiles = _tiles(plan)
    fits = " && ".join([_SERVED, *mapped, f"{tiles} < {cuda_code.MOST}"])
    to_o = cuda_code.mappable("o", _item(problem))
    return (
        *(
            Branch((_launch(problem, plan, capped, direct),), " && ".join(filter(None, conditions)))
            for capped in (False, True)
            for direct in (False, True)
            for conditions in [(fits, "" if capped else _PLAIN, "" if direct else to_o)]
        ),
        Branch((_rows(problem),), _SERVED),
    )


def _tiles(plan: Plan) -> str:
    return f"B * H * CEIL_DIV(S, {plan.queries})"


def _item(problem: Problem) -> int:
    """Return the bytes of an element of o."""
    return DTYPES[dict(problem.dtypes)["o"]][1] // 8


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Return the channels of q and of v, and the bytes of an element of o."""
    return int(problem.dim["D"]), int(problem.dim["D_v"]), _item(problem)


def _name(capped: bool) -> str:
    return "hopper_capped" if capped else "hopper_plain"


def _instance(problem: Problem, plan: Plan, capped: bool) -> str:
    sizes = _sizes(problem)
    fitted = (plan.tiles(*sizes), plan.buffers(*sizes))
    numbers = (plan.shared(*sizes), str(capped).lower(), plan.groups, plan.keys, *fitted)
    return f"HOPPER({_name(capped)}, {', '.join(map(str, numbers))})"


def _launch(problem: Problem, plan: Plan, capped: bool, direct: bool) -> Launch:
    """Return the launch of as many blocks as fit; *direct*: o is stored element by element."""
    _, d_v, item = sizes = _sizes(problem)
    tiles = _tiles(plan)
    return Launch(
        kernel=_name(capped),
        grid=(f"({tiles} < SMS ? {tiles} : SMS)", 1, 1),
        block=(plan.threads, 1, 1),
        parameters=(
            cuda_code.tensor_map(problem, "q", (64, plan.queries)),
            cuda_code.tensor_map(problem, "k", (64, plan.keys)),
            cuda_code.tensor_map(problem, "v", (box(d_v), plan.keys)),
            cuda_code.tensor_map(problem, "q" if direct else "o", (chunk(d_v, item), 16)),
            Parameter("int", int(direct)),
            *cuda_code.parameters(problem),
        ),
        shared=plan.shared(*sizes),
        programmatic=True,
    )


def _rows(problem: Problem) -> Launch:
    rows = "CEIL_DIV(B * H * S, 4)"
    grid = (f"({rows} < SMS * 16 ? {rows} : SMS * 16)", 1, 1)
    return Launch("attend_rows", grid, (128, 1, 1), cuda_code.parameters(problem))
