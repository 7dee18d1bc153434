"""Data that every install can read: known plugins, device facts, workloads worth prebuilding, certificates."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def load(name: str) -> Any:
    """Return the JSON document *name* of this package.

    ``"plugins"``: known plugins, a list of distribution, kernels, the command that installs it, and a summary.
    ``"devices"``: public facts of GPUs by short name, as ``DeviceFacts`` has them: the model's name, its arch, cores
    (SMs), the largest shared memory of a block, L2 in bytes, and bandwidth in bytes a second.
    """
    return json.loads(files(__name__).joinpath(f"{name}.json").read_text("utf-8"))


def workload(name: str) -> str:
    """Return the text of the workload *name*, TOML as ``tlhub cache prewarm --from`` reads it."""
    return files(__name__).joinpath("workloads").joinpath(f"{name}.toml").read_text("utf-8")


def certificate(kernel: str, schedule: str) -> Any:
    """Return the certificate of a schedule, as ``tlhub.certificates`` has it, or None if there is none."""
    file = files(__name__).joinpath("certificates").joinpath(f"{kernel}-{schedule}.json")
    return json.loads(file.read_text("utf-8")) if file.is_file() else None
