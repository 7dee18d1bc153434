"""Products of a warp, mma.sync: warp_mma.cuh, for sm_80 and newer.

A schedule that uses it has ``tlhub.cuda.warp_mma`` and ``tlhub/cuda/warp_mma.cuh`` among its ``sources``, besides
those of ``tensor_cores``, which it follows.
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_suffix(".cuh")
"""The text that comes after ``tensor_cores.FILE`` and before those of the kernels."""
