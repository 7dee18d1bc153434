"""What names of CUDA archs say."""

from __future__ import annotations


def capability(arch: str) -> int:
    """Return the compute capability that code for *arch* is for, as one number: 90 of ``cuda:sm_90a``."""
    return int(arch.rpartition("_")[2].rstrip("af"))


def is_hopper(arch: str) -> bool:
    """Tell whether *arch* has the instructions of sm_90a, which no later one has."""
    return arch.endswith("sm_90a")
