"""The schedule of the gradients of attention over sequences of various lengths on Hopper's tensor cores."""

from __future__ import annotations

from tlhub.specs import Schedule
from tlhub_attention.hopper import backward

HOPPER_VARLEN_BWD = Schedule(
    name="hopper",
    kernel="attention_varlen_bwd",
    kernel_revision=2,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_attention.hopper.backward_program:program",
    supports=backward.supports,
    configs=backward.configs,
    symbolic=("T", "H", "N1", "H_kv", "T_kv"),
    sources=("tlhub_attention.hopper.varlen_backward", *backward.HOPPER_BWD.sources),
    priority=20,
    doc="as attention_bwd's; tiles of all sequences side by side, and nothing beyond a sequence is loaded",
)
