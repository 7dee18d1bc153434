"""A stand-in for compilers: it leaves a library of a few bytes at once, and remembers what it was asked for."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tlhub.build import pool
from tlhub.build.pool import Built
from tlhub.cache.chain import this_host
from tlhub.errors import BuildError
from tlhub.specs import ABI

ARCHS = {"cpu": "cpu:x86-64-v3", "cuda": "cuda:sm_90a"}


class Compiler:
    """What it built: ``made`` has (schedule, arch, problem) of each. ``broken``: schedules that fail.

    ``least_driver`` and ``resources`` are what it says of the next library.
    """

    def __init__(self) -> None:
        self.made: list[tuple[str, str, Any]] = []
        self.broken: set[str] = set()
        self.least_driver = 0
        self.resources: dict[str, int] = {}
        self.host = this_host()._replace(glibc="")

    def build(self, _: Any, kernel: Any, problem: Any, schedule: Any, config: Any, arch: str, target: Any, folder: str):
        if schedule.name in self.broken:
            raise BuildError(f"{schedule.name} does not compile")
        self.made.append((schedule.name, arch, problem))
        with open(os.path.join(folder, "kernel.so"), "wb") as file:
            file.write(f"{schedule.name} {arch} {len(self.made)}".encode())
        versions = {"fake": "1"}
        return Built(
            versions,
            ABI,
            self.host.machine,
            self.host.glibc,
            self.resources,
            self.least_driver,
            (),
            ("kernel.so",),
            0.01,
        )


def install(patch: pytest.MonkeyPatch) -> Compiler:
    """Put the stand-in in the place of the workers."""
    made = Compiler()
    patch.setattr(pool.Pool, "build", lambda self, *arguments: made.build(self, *arguments))
    patch.setattr(pool.Pool, "identity", lambda self, *arguments: {"fake": "1"})
    return made
