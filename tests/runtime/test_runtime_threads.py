"""The pool of threads: regions at once, nested in nothing, after fork, resized, failing, idle."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import lab
import numpy as np
import pytest

import tlhub.runtime.threads as threads
from tlhub.errors import ArgumentError


@pytest.fixture(autouse=True)
def _default_threads(monkeypatch):
    yield
    monkeypatch.delenv("TLHUB_NUM_THREADS", raising=False)
    threads.set_num_threads(None)


def numbers(seed, rows=64):
    return np.random.default_rng(seed).standard_normal((rows, 257), "float32")


def test_any_number_of_threads_gives_the_same():
    add = lab.compiled("add")
    a, b = numbers(1), numbers(2)
    for n in (1, 2, 3, 8, 1, 64, 2):
        threads.set_num_threads(n)
        assert threads.num_threads() == n
        for rows in (0, 1, 2, 7, 64):
            np.testing.assert_array_equal(add(a[:rows], b[:rows]), a[:rows] + b[:rows])


def test_two_libraries_share_one_set_of_threads():
    add, moments = lab.compiled("add"), lab.compiled("moments", "moments")
    threads.set_num_threads(5)
    a = numbers(1)
    add(a, a)
    before = _thread_count()
    for _ in range(10):
        moments(a.astype("float64"))
        add(a, a)
    assert _thread_count() == before
    threads.set_num_threads(2)
    add(a, a)
    assert _thread_count() == before - 3


def test_python_threads_calling_at_once_are_right():
    add = lab.compiled("add")
    threads.set_num_threads(2)
    failures = []

    def call(seed):
        a, b = numbers(seed), numbers(seed + 1)
        out = np.empty_like(a)
        for _ in range(300):
            out.fill(np.nan)
            add(a, b, out=out)
            if not np.array_equal(out, a + b):
                failures.append(seed)

    callers = [threading.Thread(target=call, args=(10 * i,)) for i in range(4)]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    assert not failures


def test_threads_change_while_others_call():
    add = lab.compiled("add")
    a = numbers(1)
    stop = threading.Event()
    wrong = []

    def call():
        while not stop.is_set():
            if not np.array_equal(add(a, a), 2 * a):
                wrong.append(1)

    caller = threading.Thread(target=call)
    caller.start()
    for n in (1, 2, 4, 3) * 10:
        threads.set_num_threads(n)
    stop.set()
    caller.join()
    assert not wrong


def test_forked_children_compute_right():
    """Forked while the pool is idle, and while another thread is in a region; children of children too."""
    run(
        """
        def child(a, depth=0):
            pid = os.fork()
            if pid:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            for _ in range(20):
                assert (call(a) == 2 * a).all()
            assert len(os.listdir("/proc/self/task")) >= 3  # it has a pool of its own
            os._exit(child(a, 1) if depth == 0 else 0)

        a = np.random.default_rng(0).standard_normal((1024, 257), "float32")
        assert (call(a) == 2 * a).all()
        assert [child(a) for _ in range(5)] == [0] * 5
        assert (call(a) == 2 * a).all()

        stop = threading.Event()
        caller = threading.Thread(target=lambda: [call(a) for _ in iter(stop.is_set, True)])
        caller.start()
        codes = [child(a) for _ in range(10)]
        stop.set()
        caller.join()
        assert codes == [0] * 10
        """,
        TLHUB_NUM_THREADS="3",
    )


def test_the_error_of_a_task_is_raised():
    fails = lab.compiled("fails_inside")
    threads.set_num_threads(2)
    a = np.zeros((64, 4), "float32")
    fails(a, a)
    for row in (0, 63):
        bad = a.copy()
        bad[row] = 1000
        for _ in range(20):
            with pytest.raises(Exception, match="row too large"):
                fails(bad, a)
    fails(a, a)


def test_idle_threads_sleep():
    add = lab.compiled("add")
    threads.set_num_threads(2)
    a = numbers(1)
    add(a, a)
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.05


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", 10**6])
def test_what_is_no_number_of_threads(value):
    with pytest.raises(ArgumentError, match="number of threads is .*; allowed: 1 to 1024"):
        threads.set_num_threads(value)


def test_the_variable(monkeypatch):
    monkeypatch.setenv("TLHUB_NUM_THREADS", "3")
    assert threads.num_threads() == 3
    monkeypatch.setenv("TLHUB_NUM_THREADS", "")  # empty counts as unset
    assert threads.num_threads() == len(os.sched_getaffinity(0))
    for value in ("0", "many", "-1", "1.5", "²"):
        monkeypatch.setenv("TLHUB_NUM_THREADS", value)
        with pytest.raises(ArgumentError, match="TLHUB_NUM_THREADS is") as caught:
            threads.num_threads()
        assert "export TLHUB_NUM_THREADS=" in caught.value.hint


def test_the_affinity_mask_is_the_default():
    run(
        """
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        a = np.ones((64, 64), "float32")
        call(a)
        before = len(os.listdir("/proc/self/task"))
        assert (call(a) == 2 * a).all() and len(os.listdir("/proc/self/task")) == before
        """,
        TLHUB_NUM_THREADS="",
    )


def test_a_library_alone_reads_the_variable_itself():
    """As a program in another language would: nobody tells the library how many threads to use."""
    run(
        """
        import tvm_ffi
        alone = tvm_ffi.load_module(sys.argv[1])
        a, c = np.ones((64, 64), "float32"), np.zeros((64, 64), "float32")
        before = len(os.listdir("/proc/self/task"))
        alone["main"](a, a, c, None, None)
        assert (c == 2).all() and len(os.listdir("/proc/self/task")) == before + 4
        """,
        TLHUB_NUM_THREADS="5",
    )


def run(code, **env):
    """Run *code* in a fresh interpreter, with a kernel loaded by ``call`` when it is first used."""
    prelude = """
import os, sys, threading
sys.modules["torch"] = None  # importing it takes a second
import numpy as np
loaded = []
def call(a):
    if not loaded:
        from tlhub.runtime import load_library
        loaded.append(load_library(open(sys.argv[1], "rb").read(), "x").module["main"])
    c = np.full_like(a, np.nan)
    loaded[0](a, a, c, None, None)
    return c
"""
    made, _, _ = lab.linked("add")
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code), f"{made.folder}/kernel.so"],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _thread_count():
    return len(os.listdir("/proc/self/task"))
