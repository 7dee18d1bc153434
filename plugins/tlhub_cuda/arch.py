"""Architectures of NVIDIA GPUs: their names, what runs where, and what a compiler is told. All pure.

A compute capability that is served has one arch: code for exactly it where such code can use more of the device
(``sm_90a``), else the code that later devices of its major run too (``sm_80``). ``compute_80`` is PTX, which the
driver compiles for whatever device there is. Rules of compatibility: CUDA C++ programming guide, "Compute
capabilities", and NVIDIA's guides to compatibility of each generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tlhub.specs import DeviceFacts

PTX = "compute_80"
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", PTX)

Capability = tuple[int, int]

_OLDEST: Capability = (7, 5)
"""What the compilers of CUDA 13 start with."""


class Code(NamedTuple):
    """What an arch names. ``ptx``: not for one device yet; ``exact``: for that capability alone."""

    capability: Capability
    ptx: bool
    exact: bool


def parse(name: str) -> Code | None:
    """Return what a name of the form of an arch's, full or short, stands for: ``cuda:sm_90a``, ``sm_70``."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name.removeprefix("cuda:"))
    return Code((int(match[2]), int(match[3])), match[1] == "compute", bool(match[4])) if match else None


def canonical(name: str) -> str | None:
    """Return the one name of an arch, or None if there is none. ``sm_90`` is ``sm_90a``."""
    return next((known for known in (name, f"{name}a") if known in ARCHS), None)


def of(capability: Capability) -> str | None:
    """Return the arch of a device of *capability*: PTX where there is no exact one, None where that does not run."""
    exact = canonical(f"sm_{capability[0]}{capability[1]}")
    return exact or (PTX if capability >= (8, 0) else None)


def runs(arch: str, facts: DeviceFacts) -> str | None:
    """Return None if the device of *facts* runs code for *arch*, else the reason."""
    if facts.arch == arch:
        return None
    code, device = parse(arch), parse(facts.arch)
    if code is None or device is None or device.ptx:
        return f"{facts.model} is {facts.arch}, which does not run {arch}"
    if code.ptx:
        fits, which = device.capability >= code.capability, f"{_dotted(code.capability)} and later"
    elif code.exact:
        fits, which = device.capability == code.capability, f"{_dotted(code.capability)} alone"
    else:
        major, minor = code.capability
        fits = device.capability[0] == major and device.capability[1] >= minor
        which = f"{major}.x from {_dotted(code.capability)}"
    if fits:
        return None
    return f"{arch} is for compute capability {which}, and {facts.model} has {_dotted(device.capability)}"


def portable(arch: str) -> str | None:
    """Return PTX for an arch of devices that run it, and None for itself."""
    code = parse(arch)
    return f"cuda:{PTX}" if code and not code.ptx and code.capability >= (8, 0) else None


def unsupported(name: str) -> str | None:
    """Return why an arch that exists is none of the target's, or None where there is nothing to say of *name*."""
    code = parse(name)
    if code is None or canonical(name):
        return None
    if code.capability < _OLDEST:
        return (
            f"CUDA 13 dropped compute capability {_dotted(code.capability)}: a CUDA 12 toolkit is needed, "
            f"and tlhub builds for {_dotted(_OLDEST)} and later"
        )
    near = of(code.capability)
    return f"what tlhub has for compute capability {_dotted(code.capability)} is cuda:{near}" if near else None


def options(arch: str) -> Mapping[str, str]:
    """Return the fields of a compiler's target. It has no name for PTX: that is made from the source."""
    return {"kind": "cuda", "arch": arch.removeprefix("cuda:").replace("compute", "sm")}


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
