"""Which versions a prebuilt store serves beside."""

from __future__ import annotations

import pytest

from tlhub.catalog import assemble
from tlhub.needs import misfit, need, requirement
from tlhub.plugins import Plugin
from tlhub.specs import Need, PrebuiltStore
from tlhub.stores import chain

pytestmark = pytest.mark.light


@pytest.mark.parametrize(
    ("version", "requires"),
    [
        ("0.1.0", "x>=0.1.0,<0.2"),
        ("0.9", "x>=0.9,<0.10"),
        ("1.4.2", "x>=1.4.2,<2"),
        ("12.0.1rc2", "x>=12.0.1rc2,<13"),
        ("0.1.0.dev3+g12ab", "x>=0.1.0.dev3,<0.2"),
        ("3", "x>=3,<4"),
    ],
)
def test_what_is_needed_ends_before_the_next_version_that_may_break(version: str, requires: str) -> None:
    assert requirement(need("x", version)) == requires


def store(least: str = "0.1.0", below: str = "0.2") -> PrebuiltStore:
    return PrebuiltStore("prebuilt-x", "/nowhere", (Need("x", least, below),))


@pytest.mark.parametrize("version", ["0.1.0", "0.1", "0.1.9", "0.1.0rc1", "0.1.7.post2", "0.1.99+local"])
def test_versions_that_fit(version: str) -> None:
    assert misfit(store(), {"x": version, "y": "9"}) is None


@pytest.mark.parametrize("version", ["0.0.9", "0.2", "0.2.0rc1", "0.10", "1.0", "1!0.2.1", "unknown"])
def test_versions_that_do_not_are_named_with_the_range(version: str) -> None:
    assert misfit(store(), {"x": version}) == f"it needs x>=0.1.0,<0.2, here is {version}"


def test_what_is_not_installed() -> None:
    assert misfit(store(), {}) == "it needs x>=0.1.0,<0.2, here is none"
    assert misfit(PrebuiltStore("any", "/nowhere"), {}) is None


def test_a_misfit_is_listed_and_every_lookup_is_told() -> None:
    plugin = Plugin("prebuilt", "m", "tlhub-prebuilt-x", "1", stores=(store(), PrebuiltStore("fits", "/nowhere")))
    catalog = assemble([plugin, Plugin("x", "m", "x", "0.3.1")])
    reason = "it needs x>=0.1.0,<0.2, here is 0.3.1"
    assert plugin.refused == [f"store 'prebuilt-x': {reason}"] and plugin.status == "partly refused"
    (found,) = [s for s in chain(catalog).stores if s.name == "prebuilt-x"]
    assert [skipped.reason for skipped in found.lookup("cpu:x86-64-v3", "gemm", "0" * 64).skipped] == [reason]
    assert list(found.entries()) == [] and not found.writable
