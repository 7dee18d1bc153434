"""Clashes of names: who keeps one, who is refused, and that the order of plugins means nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from tlhub.catalog import assemble
from tlhub.errors import UnknownName
from tlhub.plugins import Plugin
from tlhub.specs import Arg, Dim, Kernel, Schedule

pytestmark = pytest.mark.light


def kernel(name: str, doc: str = "") -> Kernel:
    return Kernel(
        name,
        1,
        (Dim("M"),),
        (Arg("a", ("M",)),),
        (Arg("c", ("M",)),),
        ("float32",),
        "n:n",
        "n:n",
        lambda d: 0.0,
        doc=doc,
    )


def schedule(name: str, of: str) -> Schedule:
    return Schedule(name, of, 1, 1, ("cpu",), "tvm", "n:n")


def plugin(distribution: str, *kernels: Kernel, schedules: tuple[Schedule, ...] = ()) -> Plugin:
    return Plugin(distribution, distribution, distribution, "1", kernels=kernels, schedules=schedules)


def test_the_cores_kernel_stays_and_the_other_is_refused() -> None:
    for order in permutations([0, 1]):
        plugins = [plugin("tlhub-core", kernel("gemm", "ours")), plugin("theirs", kernel("gemm"), kernel("other"))]
        catalog = assemble([plugins[i] for i in order])
        assert catalog.kernel("gemm").doc == "ours" and "other" in catalog.kernels
        assert "tlhub-core has it already" in plugins[1].refused[0] and not plugins[0].refused


def test_between_third_parties_neither_has_the_bare_name() -> None:
    for order in permutations([0, 1]):
        plugins = [
            plugin("east", kernel("scan"), schedules=(schedule("fast", "scan"),)),
            plugin("west", kernel("scan"), schedules=(schedule("fast", "scan"),)),
        ]
        catalog = assemble([plugins[i] for i in order])
        assert set(catalog.kernels) == {"east:scan", "west:scan"}
        assert [s.kernel for s in catalog.schedules["east:scan"]] == ["east:scan"]
        assert catalog.owner(catalog.schedules["west:scan"][0]).distribution == "west"
        with pytest.raises(UnknownName, match="east:scan, west:scan"):
            catalog.kernel("scan")


def test_one_schedule_name_twice() -> None:
    core = plugin("tlhub-core", kernel("gemm"), schedules=(schedule("tiled", "gemm"),))
    theirs = plugin("theirs", schedules=(schedule("tiled", "gemm"), schedule("fine", "gemm")))
    catalog = assemble([theirs, core])
    assert [s.name for s in catalog.schedules["gemm"]] == ["fine", "tiled"]
    assert catalog.owner(catalog.schedules["gemm"][1]) is core
    assert theirs.refused == ["schedule 'gemm/tiled': tlhub-core declares it too"]


def test_a_schedule_for_somebody_elses_kernel() -> None:
    catalog = assemble([plugin("theirs", schedules=(schedule("fp8", "gemm"),)), plugin("tlhub-core", kernel("gemm"))])
    assert catalog.owner(catalog.schedules["gemm"][0]).distribution == "theirs"


def test_a_failed_plugin_adds_nothing_and_is_pointed_at() -> None:
    failed = replace(plugin("theirs", kernel("scan")), error="ImportError: no")
    catalog = assemble([failed, plugin("tlhub-core", kernel("gemm"))])
    with pytest.raises(UnknownName, match="theirs failed to load") as caught:
        catalog.kernel("scan")
    assert caught.value.hint == "tlhub plugins"
    with pytest.raises(UnknownName) as caught:
        catalog.kernel("gem")
    assert caught.value.hint == "did you mean 'gemm'? Or: tlhub plugins"
    for name in (None, np.zeros(2)):
        with pytest.raises(UnknownName, match="a kernel is named by a string"):
            catalog.kernel(name)  # type: ignore[arg-type]
