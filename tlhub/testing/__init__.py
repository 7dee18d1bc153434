"""The conformance kit: what a plugin's tests call.

from tlhub import testing

def test_plugin():
    testing.conformance("tlhub_plugin_xyz")

def test_numbers():
    worst = testing.check(tlhub.get("xyz", (1000, 17), "float32"))
    assert worst <= 1
"""

from __future__ import annotations

from tlhub.testing.conformance import Finding, Report, conformance
from tlhub.testing.data import default_scalars, inputs, poisoned
from tlhub.testing.numbers import check, compare

__all__ = ["Finding", "Report", "check", "compare", "conformance", "default_scalars", "inputs", "poisoned"]
