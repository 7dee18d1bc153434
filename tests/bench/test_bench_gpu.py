"""Measuring on a GPU: the order of things and the arithmetic, with a clock and arrays of the test's own."""

from __future__ import annotations

import numpy as np
import pytest

from tlhub.bench import gpu
from tlhub.bench.measure import peers_of
from tlhub.bench.report import Peer, Report, Timing
from tlhub.catalog import load
from tlhub.problem import make, signature

pytestmark = pytest.mark.light


class Gpu:
    """A device that takes as long as each call says; a caller waits for it."""

    graphs = True

    def __init__(self, monkeypatch):
        self.now = self.busy_until = 0.0
        self.log: list[str] = []
        monkeypatch.setattr(gpu.time, "perf_counter", lambda: self.now)

    def call(self, name, host, device):
        def run():
            self.log.append(name)
            self.now += host
            self.busy_until = max(self.now, self.busy_until) + device

        run.device = device
        return run

    def wait(self):
        self.now = max(self.now, self.busy_until)

    def recorded(self, calls):
        return sum(c.device for c in calls), len(calls)

    def elapsed(self, graph, times):
        seconds, self.launches = graph
        return seconds * times


def test_a_call_counts_the_host_and_the_gpu_alone_does_not(monkeypatch):
    device = Gpu(monkeypatch)
    sides = {"tlhub": [device.call("tlhub", 5e-6, 1e-6)] * 3, "torch": [device.call("torch", 1e-6, 2e-6)]}
    taken = gpu.in_turn(sides, device, rounds=2, seconds=1e-3)
    assert taken["tlhub"]["call"] == pytest.approx([5e-6] * 2, rel=0.02)  # the host is the slower
    assert taken["torch"]["call"] == pytest.approx([2e-6] * 2, rel=0.02)
    assert taken["tlhub"]["device"] == pytest.approx([1e-6] * 2)
    assert taken["torch"]["device"] == pytest.approx([2e-6] * 2)
    order = [name for i, name in enumerate(device.log) if i == 0 or device.log[i - 1] != name]
    assert order[-3:] == ["tlhub", "torch", "tlhub"]  # who begins changes with each round


def test_without_graphs_there_are_the_callers_times_alone(monkeypatch):
    device = Gpu(monkeypatch)
    device.graphs = False
    taken = gpu.in_turn({"tlhub": [device.call("tlhub", 5e-6, 1e-6)]}, device, rounds=2, seconds=1e-3)
    assert taken["tlhub"]["call"] == pytest.approx([5e-6] * 2, rel=0.02) and taken["tlhub"]["device"] == []


def test_a_graph_goes_round_the_operands_as_often_as_each_other():
    assert gpu._launches([len]) == 20 and gpu._launches([len] * 3) == 21 and gpu._launches([len] * 20) == 20


def test_operands_are_more_than_the_cache_holds():
    gemm = load().kernel("gemm")
    small, large = (signature(gemm, make(gemm, (n, n, n), "float16", {})) for n in (1024, 16384))
    assert gpu._sets(small, 50 << 20) == 17  # of 6 MiB each
    assert gpu._sets(large, 50 << 20) == 1
    assert gpu._sets(signature(gemm, make(gemm, (1, 1, 1), "float16", {})), 50 << 20) == 20


def test_the_worst_error_and_the_element_that_is_out():
    want = np.array([[1.0, 2.0], [np.nan, np.inf]])
    bound = np.full((2, 2), 0.5)
    assert gpu._worst("c", np.array([[1.25, 2.0], [np.nan, np.inf]]), want, bound) == 0.5
    for bad in ([[1.0, 2.75], [np.nan, np.inf]], [[1.0, 2.0], [0.0, np.inf]], [[1.0, np.nan], [np.nan, np.inf]]):
        with pytest.raises(AssertionError, match=r"c\[\d, \d\] is .* 1 of 4 elements"):
            gpu._worst("c", np.array(bad), want, bound)


def test_peers_are_those_of_the_device():
    gemm = load().kernel("gemm")
    assert list(peers_of(gemm, "cpu")) == ["numpy"] and set(peers_of(gemm, "cuda")) == {"torch", "cupy"}


def test_text_and_json_tell_both_times():
    ours, theirs = Timing((2e-6,), None, (1e-6,)), Timing((4e-6,), "torch 2", (3e-6,))
    report = Report(
        problem={}, title="gemm", arch="cuda:sm_90a", model="a GPU", threads=0, schedule="s", config={},
        origin="cache", key="k", flops=6e3, worst=0.5, fault=None, ours=ours, peers=(Peer("torch", theirs),),
    )  # fmt: skip
    lines = str(report).splitlines()
    assert lines[0] == "gemm on cuda:sm_90a (a GPU)"
    assert lines[3].split() == ["a", "call", "GFLOP/s", "ratio", "on", "the", "GPU", "GFLOP/s", "ratio"]
    assert lines[4].split() == ["tlhub", "2", "us", "3.0", "1", "us", "6.0"]
    assert lines[5].split() == ["torch", "4", "us", "1.5", "2.00", "3", "us", "2.0", "3.00", "torch", "2"]
    peer = report.to_json()["peers"]["torch"]
    assert peer["ratio"] == 2.0 and peer["device_ratio"] == pytest.approx(3.0)
    assert peer["device"] == {"seconds": 3e-6, "rounds": [3e-6]}
