"""Measuring on a GPU: the order of things and the arithmetic, with a clock and arrays of the test's own."""

from __future__ import annotations

from functools import partial

import pytest

from tlhub.bench import gpu
from tlhub.bench.measure import peers_of
from tlhub.bench.report import Peer, Report, Timing
from tlhub.bench.side import LeftOut
from tlhub.catalog import load
from tlhub.problem import make, signature
from tlhub.testing import devices
from tlhub.testing.data import function


class Gpu:
    """A device that takes as long as each call says; a caller waits for it."""

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
    taken = gpu.in_turn(sides, device.wait, device, rounds=2, seconds=1e-3)
    assert taken["tlhub"]["call"] == pytest.approx([5e-6] * 2, rel=0.02)  # the host is the slower
    assert taken["torch"]["call"] == pytest.approx([2e-6] * 2, rel=0.02)
    assert taken["tlhub"]["device"] == pytest.approx([1e-6] * 2)
    assert taken["torch"]["device"] == pytest.approx([2e-6] * 2)
    order = [name for i, name in enumerate(device.log) if i == 0 or device.log[i - 1] != name]
    assert order[-3:] == ["tlhub", "torch", "tlhub"]  # who begins changes with each round


def test_without_graphs_there_are_the_callers_times_alone(monkeypatch):
    device = Gpu(monkeypatch)
    taken = gpu.in_turn({"tlhub": [device.call("tlhub", 5e-6, 1e-6)]}, device.wait, None, rounds=2, seconds=1e-3)
    assert taken["tlhub"]["call"] == pytest.approx([5e-6] * 2, rel=0.02) and taken["tlhub"]["device"] == []


def test_a_graph_goes_round_the_operands_as_often_as_each_other():
    assert gpu._launches([len]) == 20 and gpu._launches([len] * 3) == 21 and gpu._launches([len] * 20) == 20


def test_operands_are_more_than_the_cache_holds():
    gemm = load().kernel("gemm")
    small, large = (signature(gemm, make(gemm, (n, n, n), "float16", {})) for n in (1024, 16384))
    assert gpu._sets(small, 50 << 20) == 17  # of 6 MiB each
    assert gpu._sets(large, 50 << 20) == 1
    assert gpu._sets(signature(gemm, make(gemm, (1, 1, 1), "float16", {})), 50 << 20) == 20


@pytest.fixture
def on_the_cpu(monkeypatch):
    """PyTorch's own CPU stands for a GPU, without graphs; returns the kernel, its problem and what was timed."""
    pytest.importorskip("torch")
    timed: list[str] = []

    def in_turn(sides, wait, graphs, rounds, seconds):
        for name, calls in sides.items():
            for call in calls:
                call()
            timed.append(name)
        return {}

    monkeypatch.setattr(devices, "pick", lambda device, peers: devices.TorchArrays("cpu"))
    monkeypatch.setattr(gpu, "TorchGraphs", lambda wait: None)
    monkeypatch.setattr(gpu, "in_turn", in_turn)
    gemm = load().kernel("gemm")
    return gemm, make(gemm, (33, 7, 65), "bfloat16", {}), timed


@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_wrong_is_not_timed(on_the_cpu, wrong):
    import torch

    gemm, problem, timed = on_the_cpu

    def compiled(a, b, *, out, **scalars):
        torch.matmul(a, b, out=out)
        if wrong:
            out[0, 3, 4] += 9

    found = gpu.compare(gemm, problem, compiled, 0, peers_of(gemm, "cuda"), rounds=1, seconds=1e-3, seed=0, l2=1)
    if wrong:
        assert timed == [] and found["worst"] is None and found["fault"].startswith("c[0, 3, 4] is ")
        assert "1 of 231 elements" in found["fault"]
    else:
        assert timed == ["tlhub", "torch"] and found["fault"] is None and 0 < found["worst"] <= 1
        assert found["bytes"] == 2 * (33 * 65 + 65 * 7 + 33 * 7) and found["bandwidth"] is None  # without graphs
        assert found["left_out"] == {"cupy": "the arrays are those of torch"} and "torch" in found["libraries"]


def test_inputs_that_the_others_determine_are_what_they_say(on_the_cpu):
    import torch

    _, _, timed = on_the_cpu
    backward = load().kernel("attention_bwd")

    def compiled(dout, q, k, v, o, lse, *, out, **scalars):
        wide = [x.float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        logits = wide[0] @ wide[1].mT / 8**0.5
        assert torch.allclose(lse, logits.logsumexp(-1), atol=1e-5) and o.dtype == torch.bfloat16
        result = logits.softmax(-1) @ wide[2]
        assert torch.allclose(o.float(), result.transpose(1, 2), rtol=1e-2)
        for target, x in zip(out, torch.autograd.grad(result, wide, dout.float().transpose(1, 2)), strict=True):
            target.copy_(x.transpose(1, 2))

    problem = make(backward, (1, 9, 2, 8), "bfloat16", {})
    gpu.compare(backward, problem, compiled, 0, {}, rounds=1, seconds=1e-3, seed=0, l2=1)
    assert timed == ["tlhub"]


def test_a_peer_that_refuses_only_when_it_is_called_is_left_out(on_the_cpu, monkeypatch):
    import torch

    gemm, problem, timed = on_the_cpu

    def late(problem, arrays, scalars):
        return lambda: torch.matmul(torch.ones(1, 1, dtype=torch.uint16), torch.ones(1, 1, dtype=torch.uint16))

    monkeypatch.setattr("tlhub.testing.data.function", lambda path: late if path == "late" else function(path))
    found = gpu.compare(
        gemm, problem, lambda a, b, *, out, **scalars: torch.matmul(a, b, out=out), 0, {"torch": "late"},
        rounds=1, seconds=1e-3, seed=0, l2=1,
    )  # fmt: skip
    assert timed == ["tlhub"] and "not implemented" in found["left_out"]["torch"]


def test_without_a_library_of_a_gpus_nothing_is_timed(monkeypatch):
    def missing(device):
        raise ImportError

    monkeypatch.setattr(devices, "TorchArrays", missing)
    monkeypatch.setattr(devices, "CupyArrays", missing)
    gemm = load().kernel("gemm")
    with pytest.raises(LeftOut, match="neither torch nor cupy is installed"):
        gpu.compare(gemm, None, None, 0, {"cupy": ""}, rounds=1, seconds=1e-3, seed=0, l2=1)


def test_peers_of_one_library_are_timed_beside_each_other(on_the_cpu, monkeypatch):
    import torch

    gemm, problem, timed = on_the_cpu
    theirs = peers_of(gemm, "cuda")["torch"]
    missing = {"torch-flash4": "no_such_package.peers:call", "torch-old": "old"}
    peers = {"cupy": "", "torch-flash": "named", "torch": theirs, **missing}

    def old(*args):
        raise ImportError("cannot import name 'call' from 'package'", name="package")

    def named(*args):
        call = partial(function(theirs)(*args))
        call.package = "another 1.0"
        return call

    found = {"old": old, "named": named}
    monkeypatch.setattr("tlhub.testing.data.function", lambda path: found.get(path) or function(path))
    found = gpu.compare(
        gemm, problem, lambda a, b, *, out, **scalars: torch.matmul(a, b, out=out), 0, peers,
        rounds=1, seconds=1e-3, seed=0, l2=1,
    )  # fmt: skip
    assert timed == ["tlhub", "torch-flash", "torch"] and list(found["left_out"]) == ["cupy", *missing]
    assert found["left_out"]["torch-flash4"] == "no_such_package is not installed"
    assert found["left_out"]["torch-old"] == "cannot import name 'call' from 'package'"
    assert found["libraries"] == {"torch-flash": "another 1.0", "torch": f"torch {torch.__version__}"}


def test_peers_are_those_of_the_device():
    gemm = load().kernel("gemm")
    assert list(peers_of(gemm, "cpu")) == ["numpy"] and set(peers_of(gemm, "cuda")) == {"torch", "cupy"}


def test_text_and_json_tell_both_times():
    ours, theirs = Timing((2e-6,), None, (1e-6,)), Timing((4e-6,), "torch 2", (3e-6,))
    report = Report(
        problem={}, title="gemm", arch="cuda:sm_90a", model="a GPU", threads=0, schedule="s", config={},
        origin="cache", key="k", flops=6e3, worst=0.5, fault=None, ours=ours, peers=(Peer("torch", theirs),),
        bytes=3_000_000, bandwidth=4e12,
    )  # fmt: skip
    lines = str(report).splitlines()
    assert lines[0] == "gemm on cuda:sm_90a (a GPU)"
    assert lines[3].split() == ["a", "call", "GFLOP/s", "ratio", "on", "the", "GPU", "GFLOP/s", "ratio", "memory"]
    assert lines[4].split() == ["tlhub", "2", "us", "3.0", "1", "us", "6.0", "0.75"]
    assert lines[5].split() == ["torch", "4", "us", "1.5", "2.00", "3", "us", "2.0", "3.00", "0.25", "torch", "2"]
    assert lines[6] == "memory    of the 4.00 TB/s at which it is read, each byte once"
    peer = report.to_json()["peers"]["torch"]
    assert peer["ratio"] == 2.0 and peer["device_ratio"] == pytest.approx(3.0)
    assert peer["device"] == {"seconds": 3e-6, "rounds": [3e-6]}
    assert peer["memory"] == pytest.approx(0.25) and report.to_json()["bandwidth"] == 4e12
