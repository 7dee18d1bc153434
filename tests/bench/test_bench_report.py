"""What is made of measurements, and how rounds alternate: without a clock."""

from __future__ import annotations

import json

import pytest

from tlhub.bench import measure
from tlhub.bench.report import Peer, Report, Timing, gflops, ratio, span

pytestmark = pytest.mark.light


def report(**changes):
    facts = {
        "problem": {"kernel": "gemm", "dims": {"M": 64}, "dtype": "float32", "options": {}},
        "title": "gemm(M=64) float32",
        "arch": "cpu:x86-64-v3",
        "model": "a machine",
        "threads": 2,
        "schedule": "blocked",
        "config": {"mr": 6},
        "origin": "cache",
        "key": "ab" * 32,
        "flops": 2e6,
        "worst": 0.25,
        "fault": None,
        "ours": Timing((1e-3, 2e-3, 1e-3)),
        "peers": (
            Peer("numpy", Timing((2e-3, 4e-3, 1e-3), "OpenBLAS")),
            Peer("torch", missing="torch is not installed"),
        ),
    }
    return Report(**{**facts, **changes})


def test_a_slow_phase_of_the_machine_cancels():
    assert ratio((1.0, 10.0, 1.0), (2.0, 20.0, 2.0)) == 2.0
    assert Timing((1.0, 10.0, 1.5)).seconds == 1.5
    assert gflops(2e9, 0.5) == 4.0


def test_json():
    document = json.loads(json.dumps(report().to_json(), allow_nan=False))
    assert document["check"] == {"passed": True, "worst": 0.25, "fault": None}
    assert document["tlhub"]["gflops"] == 2.0 and document["tlhub"]["best"] == 1e-3
    assert document["peers"]["numpy"]["ratio"] == 2.0 and document["peers"]["numpy"]["library"] == "OpenBLAS"
    assert document["peers"]["torch"] == {"missing": "torch is not installed"}


def test_text():
    lines = str(report()).splitlines()
    assert lines[0] == "gemm(M=64) float32 on cpu:x86-64-v3 (a machine), 2 threads"
    assert "0.25 of the tolerance" in lines[2]
    numpy = next(line for line in lines if line.startswith("numpy"))
    assert numpy.split() == ["numpy", "2", "ms", "1.0", "2.00", "OpenBLAS"]
    assert lines[-1] == "left out: torch (torch is not installed)"


def test_a_wrong_kernel_has_no_figures():
    wrong = report(fault="c[0, 0] is 1.0, expected 2.0", worst=None, ours=None, peers=())
    assert wrong.to_json()["check"]["passed"] is False and wrong.to_json()["tlhub"] is None
    assert "FAILED" in str(wrong) and "GFLOP" not in str(wrong)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.5 s"), (9.414e-3, "9.41 ms"), (4.2e-6, "4.2 us"), (3e-8, "0.03 us"), (1234, "1234 s")],
)
def test_spans(seconds, text):
    assert span(seconds) == text


def test_doubts():
    steady, shaky = (1.0, 1.1, 1.0), (1.0, 1.6, 1.6)
    assert measure.doubts({"tlhub": steady, "numpy": steady}, 1.9, 2) == []
    assert measure.doubts({"tlhub": steady}, 4.7, 2) == ["the machine is busy: load average 4.7 on 2 cores"]
    (doubt,) = measure.doubts({"tlhub": steady, "numpy": shaky}, 0.0, 2)
    assert doubt == "numpy was disturbed: its median round takes 1.6 times its best"


def test_sides_take_turns_and_rest_between(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: told.append("rest" if seconds > 0.026 else "too short"))

    class Fake:
        def __init__(self, name):
            self.name = name

        def ask(self, what, seconds):
            told.append(self.name)
            return float(len(told))

    taken = measure.alternate({"a": Fake("a"), "b": Fake("b")}, 2, 0.1)
    assert told == ["rest", "a", "rest", "b", "rest", "b", "rest", "a"]
    assert taken == {"a": [2.0, 8.0], "b": [4.0, 6.0]}
