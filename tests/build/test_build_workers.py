"""Worker processes: crashes, hangs, chatter, edits, forks, and a parent that dies."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import lab
import pytest

from tlhub.build import pool, process
from tlhub.errors import BuildError


@pytest.fixture(scope="module")
def workers():
    """A pool of one worker, so that each test finds what the last one left."""
    made = pool.Pool(size=1)
    yield made
    made.close()


def log_of(error):
    """Return what the log says, and remove it."""
    with open(error.log) as file:
        text = file.read()
    os.unlink(error.log)
    return text


def test_a_crash_is_an_error_and_the_next_build_works(workers):
    with pytest.raises(BuildError, match="worker died with signal SIGABRT") as caught:
        lab.build("aborts", builder=workers)
    assert "about to abort" in log_of(caught.value) and "about to abort" in str(caught.value)
    lab.build("add", builder=workers)


def test_an_exception_leaves_the_worker_alive(workers):
    lab.build("add", builder=workers)
    (worker,) = workers._all
    with pytest.raises(BuildError, match="no tile of this size") as caught:
        lab.build("raises", builder=workers)
    log = log_of(caught.value)
    assert "on its way" in log and "Traceback" in log
    lab.build("add", builder=workers)
    assert workers._all == {worker} and worker.alive()


def test_the_hint_of_an_error_comes_last(workers):
    with pytest.raises(BuildError, match="no such tile") as caught:
        lab.build("raises_with_hint", builder=workers)
    log_of(caught.value)
    *_, log, hint = str(caught.value).splitlines()
    assert log == f"log: {caught.value.log}" and hint == "hint: tile=8" and str(caught.value).count("\nhint:") == 1


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raises", "lab_programs:raises failed: RuntimeError: no tile of this size"),
        ("exits", "lab_programs:exits failed: SystemExit: no licence"),
        ("none", "this one returned NoneType"),
        ("vanishes", "the tvm worker died with exit code 0 in lab_programs:vanishes"),
    ],
)
def test_what_fails_names_the_program_and_the_log_last(workers, program, said):
    with pytest.raises(BuildError) as caught:
        lab.build(program, builder=workers)
    assert said in str(caught.value)
    assert str(caught.value).splitlines()[-1] == f"hint: cat {caught.value.log}"
    log = log_of(caught.value)
    assert "Traceback" in log or program == "vanishes"


def test_a_folder_that_is_not_utf8(workers, tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff x")
    made = lab.build("add", builder=workers, folder=folder)
    assert lab.read(made) and sorted(os.listdir(folder)) == ["kernel.so", "program.tir"]


def test_no_room_for_temporary_files(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = pool.Pool(size=1)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", full)
        with pytest.raises(BuildError, match="No space left on device\nhint: export TMPDIR=") as caught:
            lab.build("add", builder=made)
        assert tempfile.gettempdir() in str(caught.value)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full)  # no log can be kept: the fault is told all the same
        with pytest.raises(BuildError, match="no tile of this size") as caught:
            lab.build("raises", builder=made)
        assert caught.value.log is None
        with pytest.raises(BuildError, match="SIGABRT\n|about to abort"):
            lab.build("aborts", builder=made)
    made.close()


def test_scratch_of_the_dead_is_swept_and_that_of_the_living_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = pool.Pool(size=1)
    lab.build("add", builder=made)
    (living,) = (n for n in os.listdir(tmp_path) if n.startswith("tlhub-worker-"))
    names = {f"{process._PREFIX}7-dead": 0, f"{process._PREFIX}7-young": time.time(), "tlhub-other": 0, living: 0}
    for name, age in names.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "log").touch()
        os.utime(tmp_path / name, (age, age))
    process._sweep.cache_clear()
    process._sweep(str(tmp_path))
    kept = set(names) & set(os.listdir(tmp_path))
    made.close()
    assert kept == set(names) - {f"{process._PREFIX}7-dead"}


def test_a_hang_is_stopped_with_all_that_it_started(workers, tmp_path):
    lab.build("add", builder=workers)
    start = time.monotonic()
    with pytest.raises(BuildError, match="took longer than 1.5 seconds and was stopped") as caught:
        lab.build("hangs", builder=workers, config={"pids": str(tmp_path / "pids")}, timeout=1.5)
    assert time.monotonic() - start < 20
    assert "asleep" in log_of(caught.value)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not running(pid)
    lab.build("add", builder=workers)


def test_what_programs_print_does_no_harm(workers):
    assert lab.read(lab.build("prints", builder=workers)) == lab.read(lab.build("add", builder=workers))


def test_workers_import_no_torch(workers):
    lab.build("no_torch", builder=workers)


def test_a_program_that_wants_all_memory(workers):
    with pytest.raises(BuildError, match="MemoryError") as caught:
        lab.build("hogs", builder=workers)
    os.unlink(caught.value.log)


def test_an_edited_program_is_built_as_it_is_now(workers, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "edited_program.py"
    text = "from lab_programs import add\n\ndef program(problem, config, arch):\n    {}\n"
    file.write_text(text.format("raise RuntimeError('the old one')"))
    schedule = lab.schedule("program", module="edited_program")
    with pytest.raises(BuildError, match="the old one") as caught:
        lab.build(schedule, builder=workers)
    os.unlink(caught.value.log)
    file.write_text(text.format("return add(problem, config, arch)  # the new one"))
    lab.build(schedule, builder=workers)


def test_several_threads_build_at_once():
    made = pool.Pool(size=2)
    results, failures = [], []

    def one(i):
        try:
            results.append(lab.read(lab.build("add" if i % 2 else "prints", builder=made)))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and len(results) == 6 and len(set(results)) == 1
    assert len(made._all) <= 2
    pids = [w._process.pid for w in made._all]
    made.close()
    assert not any(map(running, pids))


def test_a_forked_child_builds_with_workers_of_its_own():
    code = """
        import os, lab
        from tlhub.build import pool
        first = lab.read(lab.build("add"))
        ours = {w._process.pid for w in pool.default()._all}
        child = os.fork()
        if child == 0:
            same = lab.read(lab.build("add")) == first
            theirs = {w._process.pid for w in pool.default()._all}
            pool.default().close()
            os._exit(0 if same and not ours & theirs else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lab.read(lab.build("add")) == first  # the child did not end ours
    """
    done = _script(code)
    _, said = done.communicate()
    assert done.returncode == 0, said[-2000:]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_survives_its_parent(tmp_path, how):
    """Killed in the middle of a build: the worker, and the process that the program started, end too."""
    parent = _script(
        f"import lab; lab.build('hangs', config={{'pids': {str(tmp_path / 'pids')!r}}})", TMPDIR=str(tmp_path)
    )
    until = time.monotonic() + 60
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert parent.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    pids = [int(p) for p in re.findall(r"\d+", (tmp_path / "pids").read_text())]
    parent.send_signal(how)
    parent.communicate()
    until = time.monotonic() + 10
    while (any(map(running, pids)) or left(tmp_path)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(running, pids))
    assert left(tmp_path) == []


def left(folder):
    return [n for n in os.listdir(folder) if n.startswith("tlhub-worker")]


def _script(code, **env):
    import textwrap

    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def running(pid):
    """Tell whether a process lives; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
