"""The schedule of attention's gradients over sequences end to end, by mma.sync: it serves what that of one does."""

from __future__ import annotations

from dataclasses import replace

from tlhub_attention.mma.backward import MMA_BWD

MMA_VARLEN_BWD = replace(
    MMA_BWD,
    kernel="attention_varlen_bwd",
    symbolic=("T", "H", "N1", "H_kv", "T_kv"),
    sources=("tlhub_attention.mma.varlen_backward", *MMA_BWD.sources),
    doc=f"{MMA_BWD.doc}; each sequence in tiles of its own",
)
