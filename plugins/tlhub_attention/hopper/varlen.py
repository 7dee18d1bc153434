"""The schedule of attention over sequences of various lengths on Hopper's tensor cores: what it serves."""

from __future__ import annotations

from tlhub.specs import Schedule
from tlhub_attention.hopper import forward

HOPPER_VARLEN = Schedule(
    name="hopper",
    kernel="attention_varlen",
    kernel_revision=2,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_attention.hopper.varlen_program:program",
    supports=forward.supports,
    configs=forward.configs,
    symbolic=("T", "H", "N1", "H_kv", "T_kv"),
    sources=(
        *(f"tlhub_attention.hopper.varlen{part}" for part in ("", "_program")),
        *forward.HOPPER.sources,
        "tlhub_attention/cuda/forward_sequences.cuh",
    ),
    priority=20,
    doc="as attention's; tiles of all sequences are drawn as blocks are free, those of the longest first",
)
