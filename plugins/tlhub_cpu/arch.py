"""Architectures of CPUs: their names, what each needs of a machine, and what a compiler is told.

Feature names are those of /proc/cpuinfo. Levels of x86-64: the x86-64 psABI supplement, section 3.1.1.
Features of named CPUs: the vendors' manuals, as LLVM and GCC list them.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tlhub.specs import DeviceFacts

_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_ZEN = frozenset({"adx", "aes", "clflushopt", "clzero", "fsgsbase", "pclmulqdq", "rdrand", "rdseed", "sha_ni", "sse4a"})
_ICE = frozenset({"avx512_bitalg", "avx512_vbmi2", "avx512_vnni", "avx512_vpopcntdq", "avx512ifma", "avx512vbmi"})
_CRYPTO = frozenset({"gfni", "sha_ni", "vaes", "vpclmulqdq"})
_AMX = frozenset({"amx_bf16", "amx_int8", "amx_tile"})
_A64 = frozenset({"asimd", "fp"})
_A82 = _A64 | {"asimddp", "asimdhp", "asimdrdm", "atomics", "crc32", "fphp", "lrcpc"}


@dataclass(frozen=True)
class Arch:
    """``mcpu``: its name to LLVM; ``machine``: as ``uname -m`` says; ``needs``: the features it takes for granted;
    ``vectors``: as ``DeviceFacts`` has them."""

    machine: str
    mcpu: str
    needs: frozenset[str]
    vectors: str


def _x86(mcpu: str, needs: frozenset[str], vectors: str) -> Arch:
    return Arch("x86_64", mcpu, needs, vectors)


def _arm(mcpu: str, needs: frozenset[str]) -> Arch:
    return Arch("aarch64", mcpu, needs, "neon")


ARCHS: Mapping[str, Arch] = {
    "x86-64-v2": _x86("x86-64-v2", _V2, "sse"),
    "x86-64-v3": _x86("x86-64-v3", _V3, "avx2"),
    "x86-64-v4": _x86("x86-64-v4", _V4, "avx512"),
    "haswell": _x86("haswell", _V3 | {"aes", "fsgsbase", "pclmulqdq", "rdrand"}, "avx2"),
    "skylake": _x86("skylake", _V3 | {"adx", "aes", "clflushopt", "fsgsbase", "pclmulqdq", "rdrand", "rdseed"}, "avx2"),
    "skylake-avx512": _x86("skylake-avx512", _V4 | {"adx", "aes", "clflushopt", "clwb", "rdseed"}, "avx512"),
    "cascadelake": _x86("cascadelake", _V4 | {"adx", "aes", "avx512_vnni", "clwb", "rdseed"}, "avx512"),
    "icelake-server": _x86("icelake-server", _V4 | _ICE | _CRYPTO | {"adx", "aes", "clwb", "rdseed"}, "avx512"),
    "sapphirerapids": _x86(
        "sapphirerapids", _V4 | _ICE | _CRYPTO | _AMX | {"avx512_bf16", "avx512_fp16", "avx_vnni", "clwb"}, "avx512"
    ),
    "znver2": _x86("znver2", _V3 | _ZEN | {"clwb", "rdpid"}, "avx2"),
    "znver3": _x86("znver3", _V3 | _ZEN | {"clwb", "pku", "rdpid", "vaes", "vpclmulqdq"}, "avx2"),
    "znver4": _x86("znver4", _V4 | _ICE | _ZEN | _CRYPTO | {"avx512_bf16", "clwb", "pku", "rdpid"}, "avx512"),
    "aarch64": _arm("generic", _A64),
    "neoverse-n1": _arm("neoverse-n1", _A82),
    "neoverse-v1": _arm("neoverse-v1", _A82 | {"bf16", "i8mm", "sve"}),
    "apple-m1": _arm("apple-m1", _A82 | {"asimdfhm", "flagm", "jscvt", "sha3", "sha512"}),
}

_ALIASES = {"x86_64": "x86-64-v2", "arm64": "aarch64", "armv8-a": "aarch64"}
_LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2")


def canonical(name: str) -> str | None:
    """Return the one name of an arch, ``native`` resolved to this machine's, or None if there is none."""
    if name == "native":
        return native(platform.machine(), features())
    name = _ALIASES.get(name, name)
    return name if name in ARCHS else None


def native(machine: str, present: frozenset[str]) -> str | None:
    """Return the highest portable arch that a machine with the features *present* runs, or None. Pure.

    A level, not the CPU's own name: what is built is then served to every machine of the level.
    """
    if machine in ("aarch64", "arm64"):
        return "aarch64"
    if machine not in ("x86_64", "AMD64"):
        return None
    return next((level for level in _LEVELS if ARCHS[level].needs <= present), None)


def spec(arch: str) -> Arch:
    """Return the arch of a full name, ``cpu:x86-64-v3``."""
    return ARCHS[arch.removeprefix("cpu:")]


def runs(arch: str, facts: DeviceFacts) -> str | None:
    """Return None if the device of *facts* runs code for *arch*, else the reason."""
    if facts.arch == arch:
        return None
    wanted, present = ARCHS.get(arch.removeprefix("cpu:")), ARCHS.get(facts.arch.removeprefix("cpu:"))
    if wanted is None or present is None or wanted.machine != present.machine:
        return f"{facts.model} is {facts.arch}, which does not run {arch}"
    have = present.needs if facts.index is None else present.needs | features()
    missing = sorted(wanted.needs - have)
    return f"{facts.model} lacks {', '.join(missing)}" if missing else None


def options(arch: str) -> Mapping[str, str]:
    """Return the fields of a compiler's target: triple, CPU and features."""
    found = spec(arch)
    return {"mtriple": f"{found.machine}-linux-gnu", "mcpu": found.mcpu}


@functools.cache
def features() -> frozenset[str]:
    """Return the features of this machine's CPU by their names in /proc/cpuinfo (x86 flags, Arm hwcaps)."""
    if sys.platform != "linux":
        return frozenset()
    return parse_features(_cpuinfo())


def parse_features(cpuinfo: str) -> frozenset[str]:
    """Return the features that the text of a /proc/cpuinfo lists for its first CPU."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def parse_model(cpuinfo: str) -> str:
    """Return the model name that the text of a /proc/cpuinfo gives, or an empty string."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return " ".join(value.split())
    return ""


@functools.cache
def model() -> str:
    """Return the name of this machine's CPU."""
    name = parse_model(_cpuinfo()) if sys.platform == "linux" else platform.processor()
    return name or platform.machine()


@functools.cache
def _cpuinfo() -> str:
    try:
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            return os.read(file.fileno(), 1 << 14).decode(errors="replace")  # the first CPU is enough
    except OSError:
        return ""
