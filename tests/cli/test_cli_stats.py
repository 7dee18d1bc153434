"""``cache stats``: what real look-ups of other processes came to."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

USE = """
import sys; sys.modules["torch"] = None
import tlhub, tlhub.errors
for _ in range(4):
    tlhub.get("gemm", (8, 8, 8), "float32")
tlhub.get("gemm", (8, 9, 8), "float32")
try:
    tlhub.get("gemm", (8, 8, 8), "float64", epilogue="gelu")
except tlhub.errors.NotPrebuilt:
    pass
"""


@pytest.fixture
def used(store):
    """A cache from which two processes were served."""
    for _ in range(2):
        subprocess.run([sys.executable, "-c", USE], env={**os.environ, "TLHUB_COMPILE": "never"}, check=True)
    return store


def test_stats_of_other_processes(tlhub, used):
    found = tlhub("cache", "stats", "--json").json
    built = found["builds"]  # by the fixture that filled it, where that counted
    assert found["hits"] == {"cache": 4, "memory": 6} and found["errors"] == {"NotPrebuilt": 2}
    assert found["misses"] == 2 + built and found["saved_seconds"] > 0
    assert found["entries"] == 2 and sum(h["size"] for h in found["holds"]) == found["size"]
    assert {h["plugin"] for h in found["holds"]} == {"tlhub-core"}
    text = tlhub("cache", "stats").stdout
    assert re.search(r"^hits +10 \(cache 4, memory 6\)$", text, re.MULTILINE) and "tlhub-core" in text


def test_stats_for_prometheus(tlhub, used):
    text = tlhub("cache", "stats", "--prometheus").stdout
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples['tlhub_cache_hits_total{tier="cache"}'] == "4"
    assert samples['tlhub_cache_errors_total{class="NotPrebuilt"}'] == "2"
    families = re.findall(r"^# TYPE (\w+) (counter|gauge)$", text, re.MULTILINE)
    assert all(kind == ("counter" if name.endswith("_total") else "gauge") for name, kind in families)
    assert {re.match(r"\w+", s)[0] for s in samples} <= {name for name, _ in families}


def test_labels_are_escaped():
    from tlhub.cli.stats import metrics, summary

    found = summary({'hits.a"b\\c\nd': 1.0}, [])
    assert 'tlhub_cache_hits_total{tier="a\\"b\\\\c\\nd"} 1' in metrics(found)


def test_zero_starts_again(tlhub, used, wrong):
    assert tlhub("cache", "stats", "--zero", "--json").json["hits"]
    again = tlhub("cache", "stats", "--json").json
    assert again["hits"] == {} and again["misses"] == 0 and again["entries"] == 2
    assert "two forms" in wrong("cache", "stats", "--json", "--prometheus")


def test_stats_of_nothing(tlhub, cold_cache):
    found = tlhub("cache", "stats", "--json").json
    assert found["entries"] == 0 and found["since"] is None and not os.path.exists(cold_cache)
    assert "nothing yet" in tlhub("cache", "stats").stdout
