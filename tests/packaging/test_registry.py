"""The registry's data: it parses, and what it says is true of the contracts and of the template."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import tlhub.catalog
import tlhub_registry
from tlhub import problem, scaffold

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.light

WORKLOADS = sorted(p.stem for p in Path(tlhub_registry.__file__).with_name("workloads").glob("*.toml"))
PREBUILT = sorted(p.stem for p in Path(tlhub_registry.__file__).with_name("workloads").glob("prebuilt/*.toml"))


def test_known_plugins_are_complete() -> None:
    plugins = tlhub_registry.load("plugins")
    names = [name for plugin in plugins for name in plugin["kernels"]]
    assert names and len(names) == len(set(names))
    for plugin in plugins:
        assert set(plugin) == {"distribution", "kernels", "install", "summary"}
        assert plugin["install"].startswith("pip install ")
    assert not set(names) & {k.name for p in tlhub.catalog.load().plugins if p.core for k in p.kernels}


def test_template_is_a_known_plugin() -> None:
    (entry,) = [p for p in tlhub_registry.load("plugins") if p["distribution"] == "tlhub-plugin-xyz"]
    source = (scaffold._template() / "tlhub_plugin_xyz.py").read_text("utf-8")
    assert entry["kernels"] == re.findall(r'name="(\w+)",\n +revision', source)


def test_device_facts() -> None:
    devices: dict[str, Any] = tlhub_registry.load("devices")
    assert {"t4", "a100", "a10", "l4", "l40s", "rtx3090", "rtx4090", "h100", "h200", "b200", "rtx5090"} <= set(devices)
    for name, facts in devices.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert set(facts) == {"model", "arch", "cores", "shared_memory", "l2", "bandwidth"}
        assert re.fullmatch(r"cuda:sm_(75|8[069]|90a|100a|120a)", facts["arch"])
        assert 40 <= facts["cores"] <= 200
        assert 64 << 10 <= facts["shared_memory"] <= 227 << 10
        assert 4 << 20 <= facts["l2"] <= 128 << 20
        assert 2e11 < facts["bandwidth"] <= 8e12
    assert len({facts["model"] for facts in devices.values()}) == len(devices)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_holds_valid_problems(name: str) -> None:
    catalog = tlhub.catalog.load()
    rows = tomllib.loads(tlhub_registry.workload(name))["problem"]
    problems = [
        problem.make(catalog.kernel(row["kernel"]), row["shape"], row["dtype"], row.get("options", {})) for row in rows
    ]
    assert len(set(problems)) == len(problems) > 0
    assert {p.kernel for p in problems} == {"gemm", "attention"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_is_served_on_its_target(name: str) -> None:
    """Each problem has a schedule for the target that the workload is named after."""
    from tlhub.resolve import resolve

    catalog = tlhub.catalog.load()
    target = catalog.target(name)
    for row in tomllib.loads(tlhub_registry.workload(name))["problem"]:
        kernel = catalog.kernel(row["kernel"])
        wanted = problem.make(kernel, row["shape"], row["dtype"], row.get("options", {}))
        for arch in target.archs:
            found = resolve(catalog.schedules.get(kernel.name, ()), wanted, target.facts(arch))
            assert found.candidates, (row, arch, found.rejected)


@pytest.mark.parametrize("name", PREBUILT)
def test_what_is_prebuilt_is_served_on_its_arch(name: str) -> None:
    """By the schedules that it names, and for every size: no dim is a number."""
    from tlhub import workload
    from tlhub.resolve import resolve

    catalog = tlhub.catalog.load()
    items = workload.parse(tlhub_registry.workload(f"prebuilt/{name}"), name, catalog)
    for item in items:
        assert isinstance(item, workload.Item), item
        assert item.arch and item.arch.partition(":")[2].replace("_", "") == name
        assert all(isinstance(extent, str) for extent in item.shape)
        wanted = problem.make(catalog.kernel(item.kernel), item.shape, item.dtype, item.options)
        facts = catalog.target(item.arch.partition(":")[0]).facts(item.arch)
        assert resolve(catalog.schedules[item.kernel], wanted, facts, asked=item.schedule).candidates, item
    assert len(items) == len(set(map(repr, items))) > 0
