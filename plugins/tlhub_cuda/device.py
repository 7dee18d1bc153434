"""The GPUs of this machine as this process may use them, and those that the registry knows.

They are found through NVML: the CUDA driver is not initialised, so that a fork afterwards works. It is asked once a
process, and a child that was forked knows what its parent did: GPUs come and go no more than ``CUDA_VISIBLE_DEVICES``
has a meaning after CUDA has read it.

A device's index is the one that CUDA gives it under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. CUDA's own default,
``FASTEST_FIRST``, is the same order where all GPUs are of one model; where they are not, ``tlhub doctor`` says so.
MIG instances are not told apart: one that ``CUDA_VISIBLE_DEVICES`` names is not found, and a GPU that is split has the
facts of the whole.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tlhub.errors import BuildError
from tlhub.specs import DeviceFacts, Finding
from tlhub_cuda import arch

if TYPE_CHECKING:
    from tlhub_cuda.nvml import Gpu, System

_LEAST_SHARED_MEMORY = 101376
"""What a block may have on every device of capability 8.0 and later."""


class _Models(Mapping[str, DeviceFacts]):
    """The GPUs of the registry by their short names, read when first asked for: few processes ask."""

    @functools.cached_property
    def _facts(self) -> dict[str, DeviceFacts]:
        from tlhub_registry import load

        devices: dict[str, dict[str, Any]] = load("devices")
        return {name: DeviceFacts(**facts) for name, facts in devices.items() if facts["arch"].startswith("cuda:")}

    def __getitem__(self, name: str) -> DeviceFacts:
        return self._facts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)


MODELS: Mapping[str, DeviceFacts] = _Models()
"""Facts of GPUs by model name."""


@functools.cache
def devices() -> tuple[DeviceFacts, ...]:
    """Return the GPUs that are here and served, by the index that CUDA gives them."""
    system = _system()
    found = (_facts(gpu, index, _major(system.driver)) for index, gpu in enumerate(_visible_here()))
    return tuple(facts for facts in found if facts)


def canonical(name: str) -> str | None:
    """Return the one name of an arch, ``native`` resolved to the first device's, or None if there is none."""
    if name == "native":
        here = devices()
        return here[0].arch.removeprefix("cuda:") if here else None
    return arch.canonical(name)


def unsupported(name: str) -> str | None:
    """Return why *name* is no arch of the target's, ``native`` among them, or None where there is nothing to say."""
    if name == "native":
        why = absent()
        return "it is the first GPU's, and none is here" + (f": {why}" if why else "")
    return arch.unsupported(name)


def typical(name: str) -> DeviceFacts:
    """Return the facts of a typical device of an arch, ``cuda:sm_90a``. Of PTX it is one that is short of nothing."""
    full = f"cuda:{name.removeprefix('cuda:')}"
    if full == f"cuda:{arch.PTX}":
        return replace(typical("cuda:sm_80"), arch=full, shared_memory=_LEAST_SHARED_MEMORY)
    return next(facts for facts in MODELS.values() if facts.arch == full)


def absent() -> str | None:
    """Return why GPUs that one may expect are not among the devices, or None where all are."""
    system, here = _system(), _visible_here()
    if system.fault or not system.gpus:
        return system.fault or "the NVIDIA driver lists no GPU"
    reasons = []
    if len(here) < len(system.gpus):
        hidden = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}"
        reasons.append(f"{hidden} shows {len(here)} of {len(system.gpus)} GPUs")
    for gpu in here:
        if arch.of(gpu.capability) is None:
            name = "sm_{}{}".format(*gpu.capability)
            reasons.append(f"{gpu.model} is {name}: {arch.unsupported(name)}")
    return "; ".join(reasons) or None


def ready(name: str) -> None:
    """Raise BuildError where no nvcc compiles for the arch *name*, ``cuda:sm_90a``, or there is no C compiler."""
    from tlhub.build import compiler
    from tlhub_cuda import nvcc

    nvcc.find().serve(name.partition(":")[2])
    compiler.find(compiler.here())


def checks() -> Sequence[Finding]:
    """Return what is found of the driver and of nvcc."""
    from tlhub_cuda import nvcc

    found = []
    system, models = _system(), {gpu.model for gpu in _visible_here()}
    if len(models) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        text = f"{system.driver}; GPUs of several models: CUDA may number them in another order"
        found.append(Finding("cuda driver", False, text, "export CUDA_DEVICE_ORDER=PCI_BUS_ID"))
    elif system.driver:
        found.append(Finding("cuda driver", True, system.driver))
    try:
        compiler = nvcc.find()
    except BuildError as error:
        return [*found, Finding("nvcc", False, f"{error.message}: nothing can be built for cuda", error.hint)]
    text, major = f"{compiler.version} ({compiler.command})", compiler.release[0]
    if system.cuda and system.cuda < major:
        text += f": the driver runs code of CUDA {system.cuda} and older"
        least = nvcc.least_driver(compiler.release, "sm_80")
        hint = nvcc.another(lambda release: release[0] <= system.cuda) or f"update the driver to {least} or later"
        return [*found, Finding("nvcc", False, text, hint)]
    return [*found, Finding("nvcc", True, text)]


def visible(text: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Return which GPUs ``CUDA_VISIBLE_DEVICES`` shows, in its order. Pure.

    It holds positions or beginnings of UUIDs; the first that names no GPU, or several, ends the list, and one that is
    named twice leaves none. Unset (None) shows all, empty none.
    """
    if text is None:
        return tuple(range(len(uuids)))
    shown: list[int] = []
    for token in map(str.strip, text.split(",")):
        by_uuid = token.startswith("GPU-")
        found = [i for i, uuid in enumerate(uuids) if (uuid.startswith(token) if by_uuid else token == str(i))]
        if len(found) != 1:
            break
        shown += found
    return tuple(shown) if len(set(shown)) == len(shown) else ()


@functools.cache
def _system() -> System:
    from tlhub_cuda import nvml

    return nvml.query()


@functools.cache
def _visible_here() -> tuple[Gpu, ...]:
    gpus = _system().gpus
    return tuple(gpus[i] for i in visible(os.environ.get("CUDA_VISIBLE_DEVICES"), [gpu.uuid for gpu in gpus]))


def _facts(gpu: Gpu, index: int, driver: int) -> DeviceFacts | None:
    """Return what is known of a model, else what NVML says and what is typical; None of a GPU that is not served."""
    name = arch.of(gpu.capability)
    if name is None:
        return None
    for known in MODELS.values():
        if (known.model, known.arch) == (gpu.model, f"cuda:{name}"):
            return replace(known, index=index, driver=driver)
    like = typical(name)
    return replace(
        like,
        model=gpu.model,
        index=index,
        cores=gpu.lanes // _lanes(gpu.capability) or like.cores,
        bandwidth=gpu.bandwidth or like.bandwidth,
        driver=driver,
    )


def _lanes(capability: tuple[int, int]) -> int:
    """Return the CUDA cores of a multiprocessor."""
    return 64 if capability <= (8, 0) else 128


def _major(version: str) -> int:
    """Return the major version of a driver, 580 of ``580.65.06``, or 0 where it is not told."""
    major = version.partition(".")[0]
    return int(major) if major.isdecimal() else 0
