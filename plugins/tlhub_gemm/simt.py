"""The schedule of gemm on the CUDA cores: every type, stride and size, on every GPU."""

from __future__ import annotations

from tlhub.specs import DeviceFacts, Problem, Schedule


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    option = problem.option
    if option["tensor_core"]:
        return "tensor_core=True, and this schedule uses none"
    if option["compute"] != "ieee":
        return f"compute={option['compute']!r} is what tensor cores do; the CUDA cores multiply float32 as 'ieee'"
    if option["fast_accum"]:
        return "fast_accum is what tensor cores do; the CUDA cores add up in full float32"
    if option["accum"] == "float16":
        return "accum='float16' is what tensor cores do; the CUDA cores add up in 'float32' or 'float64'"
    return None


SIMT = Schedule(
    name="simt",
    kernel="gemm",
    kernel_revision=2,
    revision=2,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_gemm.simt_program:program",
    supports=supports,
    symbolic=("B", "M", "N", "K", "N_2"),
    sources=(
        *(f"tlhub_gemm.{name}" for name in ("simt", "simt_program", "cuda_code")),
        "tlhub.cuda.tensor_cores",
        "tlhub/cuda/elements.cuh",
        *(f"tlhub_gemm/cuda/{name}.cuh" for name in ("epilogue", "call", "simt")),
    ),
    doc="register tiles on the CUDA cores; any strides and sizes",
)
