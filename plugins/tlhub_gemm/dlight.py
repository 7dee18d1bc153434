"""The schedule of gemm that TVM makes: no tensor cores and no TileLang, for every GPU."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_gemm.arch import capability

_INPUTS = ("float32", "float16", "bfloat16")


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    option, dtypes = problem.option, dict(problem.dtypes)
    for what, dtype in (("inputs", dtypes["a"]), ("output", dtypes["c"])):
        if dtype not in _INPUTS:
            return f"{dtype} {what}; it has {', '.join(_INPUTS)}"
    if "bfloat16" in dtypes.values() and capability(facts.arch) < 80:
        return "bfloat16, which TVM has no code for before compute capability 8.0"
    if option["glu"]:
        return "glu; it writes a product of all columns"
    if option["accum"] != "float32":
        return f"accum={option['accum']!r}; it adds up in 'float32'"
    if option["tensor_core"] or option["compute"] != "ieee":
        return "tensor cores, and this schedule uses none"
    return None


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the configs worth trying.

    ``block_size_x``, ``block_size_y``: threads of a block along M and N; ``micro_size_x``, ``micro_size_y``: results
    of each; ``micro_size_k``: the step along K.
    """
    return [
        {"block_size_x": x, "block_size_y": y, "micro_size_x": 4, "micro_size_y": 4, "micro_size_k": 16}
        for x, y in ((16, 16), (8, 16))
    ]


DLIGHT = Schedule(
    name="dlight",
    kernel="gemm",
    kernel_revision=2,
    revision=2,
    targets=("cuda",),
    toolchain="tvm",
    program="tlhub_gemm.dlight_program:program",
    supports=supports,
    configs=configs,
    symbolic=("B", "M", "N", "K"),
    sources=tuple(f"tlhub_gemm.{name}" for name in ("dlight", "dlight_program", "arch")),
    priority=-1,
    doc="register tiles by TVM's dlight, where nothing else serves; up to 65535 tiles of 64 columns in all batches",
)
