"""Locks: they save work, and nothing is wrong without them."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from typing import Any

import pytest
from cache_help import until

from tlhub.cache import locks
from tlhub.cache.store import Store

pytestmark = pytest.mark.light


def test_a_lock_is_one_keys(store: Store) -> None:
    with store.lock("a") as first, store.lock("b") as second:
        assert first and second


def test_who_waits_is_told_for_whom_and_not_for_ever(store: Store) -> None:
    told: list[str] = []
    results: list[Any] = []
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with store.lock("key"):
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(20)
    start = time.monotonic()
    with store.lock("key", timeout=0.2, waiting=told.append) as lock:
        results.append(lock)
    assert 0.1 < time.monotonic() - start < 5
    assert not results[0] and f"process {os.getpid()}" in results[0].holder
    assert len(told) == 1 and f"process {os.getpid()}" in told[0]
    waiter = threading.Thread(target=lambda: wait_for_it(store, told, results))
    waiter.start()
    until(lambda: len(told) == 2)
    leave.set()
    thread.join(20)
    waiter.join(20)
    assert results[1]
    assert [name for name in os.listdir(f"{store.root}/v1/.locks") if name.endswith(".by")] == []


def wait_for_it(store: Store, told: list[str], results: list[Any]) -> None:
    with store.lock("key", timeout=20, waiting=told.append) as lock:
        results.append(lock)


def no_lock(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_lock_that_cannot_be_is_no_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("filelock.FileLock.acquire", no_lock)
    with store.lock("key") as lock:
        assert not lock and lock.holder is None


def test_doctor_is_told_whether_there_are_locks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.check()
    folder = f"{store.root}/v1/.locks"
    assert locks.check(folder).ok
    with locks.keyed(folder, "doctor", 0.0, None, 0o600):
        assert locks.check(folder).ok, "another doctor's"
    monkeypatch.setattr("filelock.FileLock.acquire", no_lock)
    assert not locks.check(folder).ok


def test_an_error_under_the_lock_frees_it(store: Store) -> None:
    with contextlib.suppress(KeyError), store.lock("key"):
        raise KeyError
    with store.lock("key", timeout=0) as lock:
        assert lock
