"""The CPU schedule of gemm: what it serves, and its tiles by arch."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule

_TILES = {
    # vector unit: float32 lanes, register tile (mr x nr; 12, 12 and 28 registers of sums, 24 of Arm's),
    # and blocks: kc of K, mc panels of rows of A (half of the second-level cache), nc panels of columns of B
    "sse": {"lanes": 4, "mr": 6, "nr": 8, "kc": 384, "mc": 20, "nc": 256},
    "avx2": {"lanes": 8, "mr": 6, "nr": 16, "kc": 512, "mc": 14, "nc": 128},
    "avx512": {"lanes": 16, "mr": 14, "nr": 32, "kc": 512, "mc": 12, "nc": 64},
    "neon": {"lanes": 4, "mr": 8, "nr": 12, "kc": 256, "mc": 16, "nc": 192},
}

_ALONE = 1_000_000
"""Products below which a thread computes alone: it is done before another would have woken up."""


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    option = problem.option
    if option["tensor_core"]:
        return "tensor_core=True, and a CPU has no tensor cores"
    if option["compute"] != "ieee":
        return f"compute={option['compute']!r} is what tensor cores do; a CPU multiplies float32 as 'ieee'"
    if option["fast_accum"]:
        return "fast_accum is what tensor cores do; a CPU adds up in full float32"
    if option["accum"] == "float16":
        return "accum='float16' is what tensor cores do; a CPU adds up in 'float32' or 'float64'"
    return None


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the one config for the arch of *facts*.

    ``lanes``: of the accumulator in a vector; ``mr``, ``nr``: the register tile; ``kc``: the longest block of K;
    ``mc``, ``nc``: panels of A and B in a block; ``half``: the machine converts float16; ``alone``: products
    below which one thread does it all.
    """
    tiles = dict(_TILES[facts.vectors])
    if problem.option["accum"] == "float64":
        tiles["lanes"], tiles["nr"] = tiles["lanes"] // 2, tiles["nr"] // 2
    if problem.option["glu"]:
        tiles["nr"] -= tiles["nr"] % (2 * tiles["lanes"])  # whole vectors of gates, and of values
    return ({**tiles, "half": facts.vectors != "sse", "alone": _ALONE},)


BLOCKED = Schedule(
    name="cpu_blocked",
    kernel="gemm",
    kernel_revision=2,
    revision=2,
    targets=("cpu",),
    toolchain="tvm",
    program="tlhub_gemm.cpu_program:program",
    supports=supports,
    configs=configs,
    symbolic=("B", "M", "N", "K", "N_2"),
    sources=(
        *(f"tlhub_gemm.cpu_{part}" for part in ("program", "blocks", "call", "thin", "tiles")),
        *("tlhub.cpu.elements", "tlhub.cpu.ir"),
    ),
    doc="packed panels and register tiles; small and thin products are streamed",
)
