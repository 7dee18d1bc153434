"""Suites: what is in them, what a row says that has no figures, and what the rows come to."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tlhub.bench import suite
from tlhub.bench.report import Peer, Timing
from tlhub.bench.suite import Row, Suite
from tlhub.errors import ArgumentError, NoSchedule, NotPrebuilt, TlhubError, UnknownName
from tlhub.workload import Item

pytestmark = pytest.mark.light


class Measured:
    """What a row needs of a report."""

    def __init__(self, ours: Timing, *peers: Peer) -> None:
        self.ours, self.peers, self.fault = ours, peers, None

    def to_json(self):
        return {"tlhub": self.ours.to_json()}

    def memory(self, timing):
        return 0.875


def row(title, call, device):
    """A row whose peer takes 1 ms, and 1 ms on the GPU alone."""
    theirs = Timing((1e-3,), "torch 2", (1e-3,))
    return Row(title, Measured(Timing((1e-3 / call,), None, (1e-3 / device,)), Peer("torch", theirs)))


@pytest.mark.parametrize("name", suite.suites())
def test_the_registrys_suites_hold_valid_problems(name):
    items = suite.read(name)
    assert all(isinstance(item, Item) for item in items), items
    assert len({repr(item) for item in items}) == len(items)


def test_the_suite_of_gemm_has_squares_layers_and_few_rows():
    items = suite.read("gemm")
    squares = [i for i in items if len(set(i.shape)) == 1]
    assert sorted({i.shape[0] for i in squares}) == [1024, 2048, 4096, 8192, 16384]
    assert {(i.dtype, bool(i.options.get("trans_b"))) for i in squares} == {
        (dtype, nt) for dtype in ("float16", "bfloat16") for nt in (False, True)
    }
    rest = [i.shape for i in items if i not in squares]
    assert {m for m, *_ in rest} == {1, 8, 16, 32, 64, 128, 512, 2048, 8192}
    assert len({tuple(nk) for _, *nk in rest}) == 8 and len(rest) == 8 * 9 - 1  # one is a square


def test_the_suite_of_gemm_is_for_a_gpu_unless_something_else_is_asked_for(monkeypatch):
    asked: list[tuple[str | None, str | None]] = []
    monkeypatch.setattr(suite, "bench", lambda *_, arch, device, **how: asked.append((arch, device)))
    for where in ({}, {"arch": "cpu:native"}, {"device": "cpu"}):
        suite.run("gemm", **where)
        assert set(asked) == {(where.get("arch", None if where else "cuda:sm_90a"), where.get("device"))}
        asked.clear()


def test_an_unknown_suite():
    with pytest.raises(UnknownName, match="unknown suite 'gem'; known: attention, .*gemm, or a file") as caught:
        suite.read("gem")
    assert caught.value.hint == "did you mean 'gemm'?"
    with pytest.raises(ArgumentError, match=r"nowhere.toml' cannot be read"):
        suite.read("nowhere.toml")


def test_what_the_rows_come_to():
    found = Suite("gemm", (row("one", 2.0, 1.0), row("two", 0.5, 4.0), Row("three", reason="no store has it\nhint: x")))
    assert found.summary()["torch"]["ratio"] == pytest.approx({"geomean": 1.0, "least": 0.5, "count": 2})
    assert found.summary()["torch"]["device_ratio"] == pytest.approx({"geomean": 2.0, "least": 1.0, "count": 2})
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [r["title"] for r in document["rows"]] == ["one", "two", "three"]
    assert document["rows"][2]["reason"] == "no store has it\nhint: x" and "tlhub" not in document["rows"][2]
    lines = str(found).splitlines()
    assert lines[0].split() == ["a", "call", "GPU", "memory", "torch", "torch,", "GPU"]
    assert lines[1].split() == ["one", "500", "us", "1", "ms", "0.88", "2.00", "1.00"]
    assert lines[3].split(None, 1) == ["three", "no store has it"]
    assert lines[4].split() == ["geomean", "1.00", "2.00"] and lines[5].split() == ["least", "0.50", "1.00"]


def test_a_suite_without_any_figures():
    assert Suite("gemm", (Row("one", reason="not built"),)).summary() == {}
    text = str(Suite("gemm", (Row("one", reason="not built"),)))
    assert "not built" in text and "geomean" not in text


def test_what_fails_is_a_row_and_the_rest_is_measured(monkeypatch, tmp_path):
    path = tmp_path / "some.toml"
    path.write_text(
        '[[problem]]\nkernel = "gemm"\nshapes = [[1, 8, 8], [2, 8, 8], [3, 8, 8]]\ndtype = "float32"\n'
        '[[problem]]\nkernel = "gem"\nshape = [4, 8, 8]\ndtype = "float32"\n'
    )
    asked = []

    def bench(kernel, shape, dtype, **how):
        asked.append((shape[0], how["schedule"], how["rounds"]))
        if shape[0] == 1:
            raise NotPrebuilt("no store has it", hint="tlhub explain")
        if shape[0] == 2:
            raise TlhubError("the process ended")
        return row("", 2.0, 1.0).report

    monkeypatch.setattr(suite, "bench", bench)
    found = suite.run(str(path), device="cpu", schedule="blocked", rounds=3)
    assert asked == [(1, "blocked", 3), (2, "blocked", 3), (3, "blocked", 3)]
    assert [bool(r.fault) for r in found.rows] == [True, True, False, True]
    assert "no store has it" in found.rows[0].fault and "unknown kernel 'gem'" in found.rows[3].fault
    assert found.rows[2].title.startswith("gemm(")


def test_a_process_that_failed_ends_before_the_next_one_starts(monkeypatch, tmp_path):
    path = tmp_path / "some.toml"
    path.write_text(
        '[[problem]]\nkernel = "gemm"\nshapes = [[1, 8, 8], [2, 8, 8], [3, 8, 8], [4, 8, 8]]\ndtype = "float32"\n'
    )
    events: list[str] = []

    class Worker:
        """Stands for a process; *failed* as a Side says it."""

        made = 0

        def __init__(self, name, threads):
            Worker.made += 1
            self.number, self.failed = Worker.made, False

        def __enter__(self):
            events.append(f"start {self.number}")
            return self

        def __exit__(self, *_):
            events.append(f"end {self.number}")

    def bench(kernel, shape, dtype, *, worker, **how):
        events.append(f"row {shape[0]} in {worker.number}")
        if shape[0] == 1:
            raise NoSchedule("nothing serves it")  # before the process was asked
        if shape[0] == 2:
            worker.failed = True
            raise TlhubError("an illegal address")
        return row("", 2.0, 1.0).report

    monkeypatch.setattr(suite, "bench", bench)
    monkeypatch.setattr(suite, "Side", Worker)
    elsewhere = SimpleNamespace(target=SimpleNamespace(name="cuda"))
    monkeypatch.setattr("tlhub.devices.locate", lambda *_: elsewhere)
    found = suite.run(str(path))
    assert [bool(r.fault) for r in found.rows] == [True, True, False, False]
    assert events == [
        "start 1", "row 1 in 1", "row 2 in 1", "end 1", "start 2", "row 3 in 2", "row 4 in 2", "end 2",
    ]  # fmt: skip
