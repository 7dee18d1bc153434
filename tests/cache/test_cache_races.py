"""Several processes at one store. Spawned, so that nothing is shared but the disk."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from cache_children import publish_at_once
from cache_help import BUILD, MEMBERS, files_below, lookup, make_manifest, publish, serves, until

from tlhub.cache import locks, placing, prune, repair
from tlhub.cache.entry import Damaged
from tlhub.cache.store import Store

pytestmark = pytest.mark.light

ROUNDS = 6
spawn = multiprocessing.get_context("spawn")


def test_eight_processes_publish_the_same_entries(store: Store) -> None:
    barrier, results = spawn.Barrier(8), spawn.Queue()
    workers = [
        spawn.Process(target=publish_at_once, args=(str(store.root), barrier, ROUNDS, results)) for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=60) for _ in workers] == [2 * ROUNDS] * 8
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    found = lookup(store)
    assert len(found.entries) == ROUNDS and not found.skipped
    assert os.listdir(f"{store.root}/v1/.staging") == []
    assert repair.verify(store).count == ROUNDS


def _run_until_it_stops(root: str, where: str) -> subprocess.Popen[str]:
    code = f"import cache_children as t; t.stage_and_stop({root!r}, {where!r})"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


@pytest.mark.parametrize("where", ["building", "fsync", "rename"])
def test_a_writer_that_is_killed_leaves_nothing_to_be_seen(store: Store, where: str) -> None:
    process = _run_until_it_stops(str(store.root), where)
    try:
        assert not serves(store) and not lookup(store).skipped
        assert prune.clear(store).staging == 0, "the writer lives: its folder is its own"
        assert len(os.listdir(f"{store.root}/v1/.staging")) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert not serves(store) and list(store.entries()) == []
    assert publish(store).folder is not None and serves(store), "its leavings are in nobody's way"
    assert len(os.listdir(f"{store.root}/v1/.staging")) == 1, "and nobody removes them while writing"
    assert prune.remove(store, prune.plan(store.entries(), now=time.time())).staging == 1
    assert os.listdir(f"{store.root}/v1/.staging") == []
    assert serves(store)


def test_the_lock_of_a_killed_process_is_free(store: Store) -> None:
    code = f"import cache_children as t; t.hold_lock({str(store.root)!r})"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        with store.lock("key", timeout=0) as lock:
            assert not lock and f"process {process.pid}" in str(lock.holder)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    with store.lock("key", timeout=5) as lock:
        assert lock


def test_a_reader_during_clear_sees_whole_entries_or_none(store: Store) -> None:
    stop, seen, errors = threading.Event(), [0, 0], []

    def read() -> None:
        mine = Store("user", str(store.root))
        try:
            while not stop.is_set():
                found = lookup(mine).entries
                seen[bool(found)] += 1
                for entry in found:
                    try:
                        entry.prepare()
                    except Damaged:  # removed meanwhile: a miss
                        continue
                    assert entry.read("kernel.so") == MEMBERS["kernel.so"]
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(24):
            publish(store)
            goal = seen[1] + 1
            if turn % 4 == 0:
                until(lambda goal=goal: seen[1] >= goal or bool(errors))
            prune.clear(store)
    finally:
        stop.set()
        reader.join(20)
    assert not errors and min(seen) > 0


def test_what_was_in_the_way_and_is_pruned_is_in_nobodys_way(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store)

    def pruned_meanwhile(*_: object) -> None:
        prune.clear(store)

    monkeypatch.setattr(placing, "winner", pruned_meanwhile)
    assert publish(store).published and serves(store)


def test_a_folder_that_is_pruned_while_it_is_made_is_made_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    make, turns = store.make, iter([True, True, False])

    def pruned_meanwhile(below: str) -> object:
        if below.count("/") > 1 and next(turns, False):
            raise FileNotFoundError(below)
        return make(below)

    monkeypatch.setattr(store, "make", pruned_meanwhile)
    assert publish(store).published and serves(store)


def test_a_staging_folder_that_is_swept_before_it_is_locked_is_another(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, made = locks.hold, []

    def swept_meanwhile(path: str) -> locks.Hold:
        made.append(path)
        if len(made) == 1:
            os.rmdir(path)
        return hold(path)

    monkeypatch.setattr(locks, "hold", swept_meanwhile)
    with store.stage() as staged:
        assert staged.path == made[1] != made[0] and os.path.isdir(staged.path)


def test_a_real_limit_of_file_size(store: Store) -> None:
    """The manifest does not fit: the kernel is served, and nothing half-written is to be seen."""
    assert len(make_manifest().to_bytes()) > 600 > max(map(len, MEMBERS.values()))
    code = f"import cache_children as t; t.publish_with_a_small_file_limit({str(store.root)!r})"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-B", "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert shown.stdout == "None True 1 []\n", shown.stderr
    assert files_below(str(store.root)) == []


def test_a_fork_shares_no_lock(store: Store) -> None:
    """A child that forked while a lock was held neither holds it afterwards nor frees it."""
    with store.lock("key"):
        child = os.fork()
        if child == 0:
            with store.lock("key", timeout=0) as lock:
                os._exit(7 if lock else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    with store.lock("key", timeout=0) as lock:
        assert lock


def test_builds_differ_by_config(store: Store) -> None:
    configs = [{"tile": 1}, {"tile": True}, {}, BUILD["config"]]
    assert len({publish(store, make_manifest(config=config)).folder for config in configs}) == 4
