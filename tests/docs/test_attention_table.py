"""The table of who serves attention is what the schedules say of problems of every arch, dtype, size and option."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tlhub import catalog, problem
from tlhub.specs import Kernel, Schedule, Target

pytestmark = pytest.mark.light

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
HEADER = "| kernel | schedule | archs | dtypes | channels | of the options, not |\n"
CHANNELS = range(1, 321)


def rows() -> list[str]:
    """Return the rows for all schedules, as the document has them."""
    known = catalog.load()
    kernels = [k for k in known.kernels.values() if k.name.startswith("attention")]
    return [row(k, s, known.targets[s.targets[0]]) for k in kernels for s in known.schedules[k.name]]


def row(kernel: Kernel, schedule: Schedule, target: Target) -> str:
    """Return what *schedule* says of archs, of dtypes and channels on the first of them, and of options."""

    def serves(arch: str, dtype: str, channels: int = 64, **options: Any) -> bool:
        there = [d for d in kernel.dims if d.default is None and d.when in ({}, {"paged": False})]
        shape = {d.name: channels if d.name == "D" else 16 for d in there}
        return schedule.supports(problem.make(kernel, shape, dtype, options), target.facts(arch)) is None

    every = [f"{target.name}:{arch}" for arch in target.archs]
    archs = [arch for arch in every if any(serves(arch, dtype) for dtype in kernel.dtypes)]
    dtypes = [dtype for dtype in kernel.dtypes if serves(archs[0], dtype)]
    sizes = [d for d in CHANNELS if serves(archs[0], dtypes[0], d)]
    choices = [(o.name, c) for o in kernel.options for c in o.choices if o.name not in ("paged", "scaled")]
    refused = [
        f"`{n}={str(c).lower()}`" for n, c in choices if not any(serves(archs[0], d, 64, **{n: c}) for d in dtypes)
    ]
    narrow = [dtype for dtype in dtypes if dtype.startswith("float8")]
    if any(o.name == "scaled" for o in kernel.options) and not any(serves(archs[0], d, scaled=True) for d in narrow):
        refused.append("`scaled=true`")
    cells = [
        f"`{kernel.name}`",
        f"`{schedule.name}`" + (", by name" if schedule.experimental else ""),
        f"every one of `{target.name}`" if archs == every else ", ".join(f"`{a}`" for a in archs),
        "all" if dtypes == list(kernel.dtypes) else ", ".join(f"`{d}`" for d in dtypes),
        "any" if sizes == [*CHANNELS] else f"multiples of {math.gcd(*sizes)} to {sizes[-1]}",
        ", ".join(refused),
    ]
    return "| " + " | ".join(cells).rstrip() + " |\n"


def test_the_table_is_what_schedules_say() -> None:
    expected = "".join(rows())
    found = PAGE.read_text("utf-8").partition(HEADER)[2].partition("\n")[2].partition("\n\n")[0] + "\n"
    assert found == expected, f"the rows are\n{expected}"
