"""Refusals: what a device does not take is passed over, here and by the next process, and stays as it is."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tlhub
from tlhub import hub, refusals, runtime
from tlhub.cache import home
from tlhub.errors import ArgumentError, CacheError, DeviceError, NotPrebuilt

pytestmark = pytest.mark.light

SIZE = (8, 8, 8)
UNFIT = "gemm: cuLibraryLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU (no kernel image); nothing was launched"
STICKY = "gemm: cuLaunchKernelEx of main failed: error 700; the GPU's context is lost, and this process must restart"


class Machine:
    """Libraries by what is in them. ``faults``: schedule to what loading it, or calling it, raises."""

    def __init__(self, compiler):
        self.compiler, self.faults, self.calls = compiler, {}, []
        self.scratch = False  # whether calls need scratch memory

    def load(self, entry):
        name = entry.read("kernel.so").decode().split()[0]
        if isinstance(self.faults.get(name), CacheError):
            raise self.faults[name]

        def call(a, b, c, *rest):
            self.calls.append(name)
            if name in self.faults:
                raise self.faults[name]
            c[:] = a @ b

        def scratch(*arguments):
            if name in self.faults:
                raise self.faults[name]
            return 16 if name == "second" else 0

        return SimpleNamespace(bind=lambda problem: call, scratch=scratch if self.scratch else None), False


@pytest.fixture
def machine(compiler, monkeypatch, tmp_path):
    """A CPU with schedules ``best``, ``second`` and ``third``, libraries that are made up, and a state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    known = hub.load()
    usual = hub.explain("gemm", SIZE, "float32", device="cpu").resolution.candidates[0].schedule
    schedules = tuple(replace(usual, name=n, priority=p) for p, n in enumerate(("third", "second", "best")))
    owner = replace(known.owner(usual), editable=False)
    owners = {**known.owners, **{("gemm", s.name): owner for s in schedules}}
    changed = replace(known, schedules={**known.schedules, "gemm": schedules}, owners=owners)
    monkeypatch.setattr(hub, "load", lambda: changed)
    made = Machine(compiler)
    monkeypatch.setattr(runtime, "load_entry", made.load)
    hub.forget()
    return made


def get():
    return tlhub.get("gemm", SIZE, "float32", device="cpu")


def product():
    rng = np.random.default_rng(0)
    return rng.standard_normal((2, 8, 8)).astype("float32")


def next_process():
    """What a new process would know."""
    hub.forget()
    refusals.forget()


def test_an_entry_that_does_not_load_gives_way_and_is_left_alone(machine, cold_cache):
    entry, _ = hub.prewarm("gemm", SIZE, "float32", device="cpu")
    before = sorted((p.name, p.read_bytes()) for p in Path(entry.folder).iterdir())
    machine.faults["best"] = CacheError("library 'best' could not be loaded: undefined symbol: foo")
    with pytest.warns(RuntimeWarning, match=rf"serving 'second' \(.*\) in the place of 'best' \({entry.key[:16]}\)"):
        kernel = get()
    assert kernel.schedule == "second" and kernel.key != entry.key
    assert sorted((p.name, p.read_bytes()) for p in Path(entry.folder).iterdir()) == before
    machine.faults.clear()
    next_process()
    assert get().key == kernel.key  # it is remembered, so nothing is warned of
    told = tlhub.explain("gemm", SIZE, "float32", device="cpu")
    assert told.hit.index == 1 and "it was refused: library 'best' could not" in str(told)
    elsewhere = tlhub.explain("gemm", SIZE, "float32", arch="cpu:x86-64-v2")
    assert "refused" not in str(elsewhere)


def test_a_first_launch_that_the_device_does_not_take_gives_way(machine):
    kernel = get()
    machine.faults["best"] = RuntimeError(UNFIT)
    a, b = product()
    out = np.zeros((8, 8), "float32")
    with pytest.warns(RuntimeWarning, match="'second'.* in the place of 'best'.*NO_BINARY_FOR_GPU"):
        assert kernel(a, b, out=out) is out
    np.testing.assert_array_equal(out, a @ b)
    assert kernel.schedule == "second" and "second" in repr(kernel) and get() is kernel
    np.testing.assert_array_equal(kernel(a, b), a @ b)
    assert machine.calls == ["best", "second", "second"]
    next_process()
    assert get().schedule == "second"


@pytest.mark.parametrize("read_only", [False, True])
def test_one_after_the_other(machine, read_only):
    machine.faults.update(best=RuntimeError(UNFIT), second=CacheError("it does not load"))
    a, b = product()
    a.flags.writeable = not read_only
    kernel = get()
    with pytest.warns(RuntimeWarning):
        np.testing.assert_array_equal(kernel(a, b), a @ b)
    assert kernel.schedule == "third" and len(refusals.current()) == 2


def test_asking_for_scratch_memory_is_a_first_call_too(machine):
    machine.scratch = True
    machine.faults["best"] = RuntimeError(UNFIT)
    with pytest.warns(RuntimeWarning):
        assert get().workspace(*product()) == 16


def test_where_nothing_else_serves_the_first_error_is_told_and_nothing_is_noted(machine, monkeypatch):
    machine.faults = {name: RuntimeError(UNFIT) for name in ("best", "second", "third")}
    a, b = product()
    kernel = get()
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    with pytest.raises(DeviceError, match="NO_BINARY_FOR_GPU"):
        kernel(a, b)
    assert refusals.current() == []
    machine.faults = {name: CacheError("noexec") for name in ("best", "second", "third")}
    next_process()
    with pytest.raises(CacheError, match="noexec"):
        get()
    assert refusals.current() == []  # the machine may be at fault, and mended


@pytest.mark.parametrize(
    "error", [RuntimeError(STICKY), RuntimeError("gemm: out of memory"), RuntimeError("some library's own")]
)
def test_other_errors_are_told(machine, error):
    kernel = get()
    machine.faults["best"] = error
    with pytest.raises(RuntimeError) as caught:
        kernel(*product())
    assert str(error) in str(caught.value) and kernel.schedule == "best" and refusals.current() == []
    assert isinstance(caught.value, DeviceError) == str(error).startswith("gemm: ")


def test_arguments_that_are_wrong_are_the_callers(machine):
    kernel = get()
    machine.faults["best"] = ValueError("gemm: argument 'a': expected shape (8, 8), got (9, 8)")
    with pytest.raises(ArgumentError):
        kernel(*product())
    assert refusals.current() == []


def test_a_schedule_that_was_asked_for_and_a_pin_do_not_give_way(machine, tmp_path, monkeypatch, cli):
    machine.faults["best"] = CacheError("it does not load")
    with pytest.raises(CacheError, match="it does not load"):
        tlhub.get("gemm", SIZE, "float32", device="cpu", schedule="best")
    hub.prewarm("gemm", SIZE, "float32", device="cpu", schedule="second")
    path = tmp_path / "pins.json"
    assert cli("pin", "gemm", "8,8,8", "--dtype", "float32", "--device", "cpu", "--to", path).exit_code == 0
    monkeypatch.setenv("TLHUB_PINS", str(path))
    next_process()
    with pytest.raises(CacheError, match="it does not load"):
        get()


def test_another_driver_and_a_later_day_try_again(machine, monkeypatch):
    machine.faults["best"] = CacheError("it does not load")
    with pytest.warns(RuntimeWarning):
        get()
    machine.faults.clear()
    (refusal,) = refusals.current()
    facts = tlhub.explain("gemm", SIZE, "float32", device="cpu").place.facts
    assert refusals.why(refusal.key, facts) == "it does not load"
    for other in (replace(facts, driver=590), replace(facts, model="another")):
        assert refusals.why(refusal.key, other) is None
    monkeypatch.setattr(refusals.time, "time", lambda: refusal.expires + 1)
    next_process()
    assert get().schedule == "best" and refusals.current() == []


def test_the_command_lists_and_forgets(machine, cli):
    machine.faults["best"] = CacheError("it does not load")
    with pytest.warns(RuntimeWarning):
        get()
    table = cli("cache", "refusals")
    assert table.exit_code == 0 and "it does not load" in table.stdout and "1 refused" in table.stderr
    (told,) = json.loads(cli("cache", "refusals", "--json").stdout)["refusals"]
    assert told["reason"] == "it does not load" and len(told["key"]) == 64
    assert "1 refused, and forgotten" in cli("cache", "refusals", "--clear").stderr
    machine.faults.clear()
    next_process()
    assert get().schedule == "best" and json.loads(cli("cache", "refusals", "--json").stdout)["refusals"] == []


def test_a_wrong_clock_refuses_nothing_for_years(machine, monkeypatch):
    facts = tlhub.explain("gemm", SIZE, "float32", device="cpu").place.facts
    with monkeypatch.context() as patch:
        patch.setattr(refusals.time, "time", lambda: 4e9)
        refusals.note("k", facts, "it does not load")
        assert refusals.why("k", facts)
    next_process()
    assert refusals.why("k", facts) is None and refusals.current() == []


def test_what_it_notes_leaves_the_state_folder_trusted(machine):
    before = os.umask(0o002)
    try:
        refusals.note("k", tlhub.explain("gemm", SIZE, "float32", device="cpu").place.facts, "it does not load")
    finally:
        os.umask(before)
    folder = Path(os.environ["XDG_STATE_HOME"]) / "tlhub"
    assert home.make(str(folder)) and (folder / "refusals").is_dir()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"key": 1}', '{"key": "x", "device": "d", "driver": "x"}', "\xff"]
)
def test_notes_that_are_none_are_passed_over(machine, text):
    folder = Path(os.environ["XDG_STATE_HOME"]) / "tlhub" / "refusals"
    folder.mkdir(parents=True)
    (folder / f"{'0' * 32}.json").write_text(text)
    (folder / "other").mkdir()
    assert refusals.current() == [] and get().schedule == "best"


def test_a_state_folder_that_cannot_be_written(machine, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    machine.faults["best"] = CacheError("it does not load")
    with pytest.warns(RuntimeWarning):
        assert get().schedule == "second"
    assert tlhub.explain("gemm", SIZE, "float32", device="cpu").hit.index == 1  # this process knows


def test_what_was_refused_and_is_built_again_is_not_taken(machine, monkeypatch, cold_cache):
    hub.prewarm("gemm", SIZE, "float32", device="cpu")
    machine.faults["best"] = CacheError("it does not load")
    monkeypatch.setattr(machine.compiler, "broken", {"third"})
    with pytest.warns(RuntimeWarning):
        assert get().schedule == "second"
    assert [name for name, _, _ in machine.compiler.made] == ["best", "best", "second"]
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    with pytest.raises(NotPrebuilt):
        tlhub.get("gemm", SIZE, "float32", device="cpu", schedule="best")


def test_threads_whose_first_calls_fail_at_once(machine):
    kernel, start, done = get(), threading.Barrier(4), []
    machine.faults["best"] = RuntimeError(UNFIT)
    a, b = product()

    def call():
        start.wait()
        done.append(kernel(a, b))

    threads = [threading.Thread(target=call) for _ in range(4)]
    with pytest.warns(RuntimeWarning):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(done) == 4 and all(np.array_equal(c, a @ b) for c in done) and kernel.schedule == "second"
