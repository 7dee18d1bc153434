"""Recorded lookups: each once, read back as they were asked, whoever else writes to the same file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import tlhub
from tlhub import catalog, recording
from tlhub.cache import locks
from tlhub.errors import ArgumentError, NotPrebuilt
from tlhub.problem import make
from tlhub.workload import Item, read, show, tomllib

pytestmark = pytest.mark.light

ARCH = "cpu:x86-64-v3"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, cold_cache: str) -> None:
    """Nothing was looked up before, and nothing is compiled."""
    for name, value in (("_noted", {}), ("_pending", []), ("_destination", None)):
        monkeypatch.setattr(recording, name, value)
    monkeypatch.setenv("TLHUB_COMPILE", "never")


def ask(*shape: int | str, dtype: str | dict[str, str] = "float32", arch: str = ARCH, **options: object) -> None:
    with pytest.raises(NotPrebuilt):
        tlhub.get("gemm", shape, dtype, arch=arch, **options)


def recorded(path: Path) -> list[Item]:
    found = read(str(path), catalog.load())
    assert all(isinstance(item, Item) for item in found), found
    return list(found)  # type: ignore[arg-type]


def test_each_lookup_is_noted_once_as_it_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "workload.toml"
    monkeypatch.setenv("TLHUB_RECORD", str(path))
    for _ in range(2):
        ask(64, 48, 32)
        ask("M", 48, "M", dtype="float64", trans_b=True, schedule="cpu_blocked")
    first, second = recorded(path)
    assert first == Item("gemm", {"M": 64, "N": 48, "K": 32}, "float32", {}, ARCH, None)
    assert second == Item("gemm", {"M": "n0", "N": 48, "K": "n0"}, "float64", {"trans_b": True}, ARCH, "cpu_blocked")


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype", "options"),
    [
        ("gemm", (2, 3, 4, 5), "float16", {"bias": True, "epilogue": "gelu", "out_dtype": "float32"}),
        ("gemm", ("M", "N", "K"), {"a": "float8_e4m3fn", "b": "float8_e5m2"}, {}),
        ("attention", {"B": "B", "S": "S", "H": 8, "H_kv": 2, "D": 64}, "float32", {"causal": True, "lse": True}),
    ],
)
def test_what_is_written_is_the_same_problem(tmp_path, kernel, shape, dtype, options):
    spec = catalog.load().kernel(kernel)
    asked = make(spec, shape, dtype, options)
    tlhub.record(tmp_path / "w.toml")
    recording.note(spec, asked, ARCH, None)
    (item,) = recorded(tmp_path / "w.toml")
    assert make(spec, item.shape, item.dtype, item.options) == asked


def test_lookups_before_the_recording_are_noted_and_none_after_it(tmp_path: Path) -> None:
    ask(1, 2, 3)
    tlhub.record(tmp_path / "w.toml")
    ask(4, 5, 6)
    tlhub.record(None)
    ask(7, 8, 9)
    assert [item.shape for item in recorded(tmp_path / "w.toml")] == [
        {"M": 1, "N": 2, "K": 3},
        {"M": 4, "N": 5, "K": 6},
    ]
    assert not [f for f in os.listdir(tmp_path) if "-" in f]  # no draft is left


CHILD = """
import sys, tlhub
sys.stdin.read()  # until all have started
for i in range(6):
    for shape in ((i + 1, int(sys.argv[1]), 8), ("M", i, i)):
        try:
            tlhub.get("gemm", shape, "float32", arch="cpu:x86-64-v3")
        except LookupError:
            pass
"""


@pytest.mark.parametrize("name", ["workload.toml", "folder/"])
def test_many_processes_record_to_one_place(tmp_path: Path, name: str) -> None:
    environment = {**os.environ, "TLHUB_RECORD": f"{tmp_path}/{name}"}
    held, gate = os.pipe()
    commands = [[sys.executable, "-c", CHILD, str(100 + n)] for n in range(4)]
    children = [subprocess.Popen(c, env=environment, stdin=held, stderr=subprocess.PIPE) for c in commands]
    os.close(held)
    os.close(gate)
    said = [child.communicate(timeout=60)[1] for child in children]
    assert [(c.returncode, text) for c, text in zip(children, said, strict=True)] == [(0, b"")] * 4
    found = recorded(tmp_path / name)
    wanted = {(i + 1, 100 + n, 8) for i in range(6) for n in range(4)} | {("n0", i, i) for i in range(6)}
    assert {tuple(item.shape.values()) for item in found} == wanted
    if name == "workload.toml":
        assert len(found) == len(wanted)  # what several asked for stands there once


def test_what_a_person_wrote_stays(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text('# mine\n[[problem]]\nkernel = "gemm"\nshape = [1, 2, 3]\ndtype = "float32"')
    tlhub.record(path)
    ask(1, 2, 3)
    ask(1, 2, 3)
    text = path.read_text()
    assert text.startswith("# mine\n") and len(tomllib.loads(text)["problem"]) == 2


def test_a_place_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot record to .*(Not a directory|File exists)") as caught:
        tlhub.record(tmp_path / "file" / "w.toml")
    assert caught.value.argument == "path"
    monkeypatch.setenv("TLHUB_RECORD", f"{tmp_path}/file/w.toml")
    with pytest.warns(RuntimeWarning, match="not recorded in .*: (Not a directory|File exists)"):
        ask(1, 2, 3)
    (tmp_path / "file").unlink()
    ask(4, 5, 6)
    assert len(recorded(tmp_path / "file" / "w.toml")) == 2  # the one that could not be written, too


def test_who_waits_to_write_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    """Another process has the file; of this one's threads a single one waits for it, and writes what all looked up."""
    tlhub.record(tmp_path / "w.toml")
    kernel = catalog.load().kernel("gemm")
    problems = [make(kernel, (m, 2, 3), "float32", {}) for m in range(1, 5)]
    with locks.keyed(str(tmp_path), ".w.toml", 0.0, None, 0o644) as lock:
        assert lock
        waiting = threading.Thread(target=recording.note, args=(kernel, problems[0], ARCH, None))
        waiting.start()
        while not recording._writing.locked():
            time.sleep(0.001)
        for problem in problems[1:]:
            recording.note(kernel, problem, ARCH, None)
        assert waiting.is_alive() and not (tmp_path / "w.toml").exists()
    waiting.join()
    assert [item.shape["M"] for item in recorded(tmp_path / "w.toml")] == [1, 2, 3, 4]


def test_another_place_meanwhile_gets_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tlhub.record(tmp_path / "old.toml")
    write = recording._write

    def moved(path: str, lookups: object) -> None:
        write(path, lookups)  # type: ignore[arg-type]
        monkeypatch.setattr(recording, "_write", write)
        tlhub.record(tmp_path / "new.toml")

    monkeypatch.setattr(recording, "_write", moved)
    ask(1, 2, 3)
    assert len(recorded(tmp_path / "old.toml")) == len(recorded(tmp_path / "new.toml")) == 1


@pytest.mark.parametrize("name", ["new.toml", "folder/", "a/b/c.toml", "there", "dangling"])
def test_a_place_that_can_be_is_judged_so_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to("elsewhere.toml")
    before = sorted(tmp_path.rglob("*"))
    recording.check(f"{tmp_path}/{name}")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "why"),
    [("file/w.toml", "Not a directory"), ("notes.txt", "it is no workload"), ("bytes", "codec can't decode")],
)
def test_a_place_that_cannot_be_is_judged_so(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "notes.txt").write_text("milk, bread\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=f"cannot record to .*: .*{why}"):
        recording.check(f"{tmp_path}/{name}")


def test_a_warm_lookup_notes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tlhub.record(tmp_path / "w.toml")
    ask(1, 2, 3)
    monkeypatch.setattr(recording, "_flush", None)
    ask(1, 2, 3)


def test_an_option_that_is_none_where_that_is_not_the_default(tmp_path: Path) -> None:
    known = catalog.load()
    gemm = known.kernel("gemm")
    options = tuple(replace(o, default=True) if o.name == "tensor_core" else o for o in gemm.options)
    changed = replace(known, kernels={"gemm": replace(gemm, options=options)})
    asked = make(changed.kernel("gemm"), (1, 2, 3), "float16", {"tensor_core": None})
    tlhub.record(tmp_path / "w.toml")
    recording.note(changed.kernel("gemm"), asked, ARCH, None)
    (item,) = read(str(tmp_path / "w.toml"), changed)
    assert isinstance(item, Item) and item.options == {"tensor_core": None}


def test_keys_and_texts_that_need_quotes(tmp_path: Path) -> None:
    item = Item("gemm", {"M": 1, "N": 2, "K": 3}, "float32", {"odd name": 'a "b" \\ ü'}, "cpu:x86-64-v3")
    table = tomllib.loads(show(item))["problem"][0]
    assert table["options"] == item.options and table["shape"] == item.shape


def test_what_is_no_path_and_no_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (3, "", b"w.toml"):
        with pytest.raises(ArgumentError, match="cannot record to .*: it is no path"):
            tlhub.record(wrong)  # type: ignore[arg-type]
    (tmp_path / "notes.txt").write_text("milk, bread\n")
    monkeypatch.setenv("TLHUB_RECORD", f"{tmp_path}/notes.txt")
    with pytest.warns(RuntimeWarning, match="not recorded in .*: it is no workload"):
        ask(1, 2, 3)
    assert (tmp_path / "notes.txt").read_text() == "milk, bread\n"
