"""The CPU schedules of attention, in all its forms: what they serve, and their tiles by arch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.contracts.decode import DECODE
from tlhub_attention.contracts.varlen import VARLEN

# lanes: float32 numbers of a vector; a register tile is ``tile`` keys or channels by ``vectors`` vectors, in 16
# registers, or 32 with AVX-512 and on Arm. block_q: query rows of a task; block_k: keys packed at a time.
_TILES = {
    "sse": {"lanes": 4, "vectors": 3, "tile": 4, "block_q": 192, "block_k": 96},
    "avx2": {"lanes": 8, "vectors": 3, "tile": 4, "block_q": 192, "block_k": 96},
    "avx512": {"lanes": 16, "vectors": 2, "tile": 8, "block_q": 192, "block_k": 96},
    "neon": {"lanes": 4, "vectors": 3, "tile": 8, "block_q": 192, "block_k": 96},
}


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the tiles for the arch of *facts*."""
    return (_TILES[facts.vectors],)


_SHARED = tuple(f"tlhub_attention.cpu.{m}" for m in ("blocks", "entry", "ir", "math", "tiles"))

FLASH = Schedule(
    name="cpu_flash",
    kernel="attention",
    kernel_revision=2,
    revision=2,
    targets=("cpu",),
    toolchain="tvm",
    program="tlhub_attention.cpu.program:program",
    configs=configs,
    symbolic=("B", "S", "H", "D", "H_kv", "S_kv", "D_v"),
    sources=("tlhub_attention.cpu.program", *_SHARED),
    doc="online softmax over packed blocks of keys, queries in the lanes of vectors; scratch does not grow with S_kv",
)

FLASH_BWD = Schedule(
    name="cpu_flash_bwd",
    kernel="attention_bwd",
    kernel_revision=2,
    revision=2,
    targets=("cpu",),
    toolchain="tvm",
    program="tlhub_attention.cpu.backward:program",
    configs=configs,
    symbolic=FLASH.symbolic,
    sources=(*(f"tlhub_attention.cpu.{m}" for m in ("backward", "backward_task", "gradients")), *_SHARED),
    doc="a pass for dq and one for dk and dv, over packed blocks; the same bits whatever the number of threads",
)

FLASH_DECODE = replace(
    FLASH,
    name="cpu_decode",
    kernel="attention_decode",
    program="tlhub_attention.cpu.sequences:decode",
    symbolic=tuple(d.name for d in DECODE.dims),
    sources=("tlhub_attention.cpu.sequences", "tlhub_attention.cpu.frames", *FLASH.sources),
    doc="as cpu_flash: a task takes the queries of a sequence that share a head of keys, and reads lengths and pages",
)

FLASH_VARLEN = replace(
    FLASH_DECODE,
    name="cpu_varlen",
    kernel="attention_varlen",
    program="tlhub_attention.cpu.sequences:varlen",
    symbolic=tuple(d.name for d in VARLEN.dims),
    doc="as cpu_flash: a task takes a block of queries of one sequence",
)

FLASH_VARLEN_BWD = replace(
    FLASH_BWD,
    name="cpu_varlen_bwd",
    kernel="attention_varlen_bwd",
    program="tlhub_attention.cpu.sequences_backward:program",
    symbolic=FLASH_VARLEN.symbolic,
    sources=(*(f"tlhub_attention.cpu.{m}" for m in ("sequences_backward", "frames")), *FLASH_BWD.sources),
    doc="as cpu_flash_bwd: a task takes a block of queries, or of keys, of one sequence",
)
