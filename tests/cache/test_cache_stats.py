"""Statistics: what processes counted is there after they ended, once each, and counting costs look-ups nothing."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_help import make_manifest, publish

from tlhub.cache import locks, stats
from tlhub.cache.store import Store
from tlhub.errors import BuildError, CacheError, NotPrebuilt

pytestmark = pytest.mark.light


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    stats._renew_after_fork()
    yield
    stats._renew_after_fork()


def folder(store: Store) -> Path:
    return Path(f"{store.root}/{stats.STATS}")


def in_a_process(store: Store, code: str, count: int = 1) -> None:
    head = "from tlhub.cache import stats\nfrom tlhub.cache.store import Store\n"
    head += f"store = Store('user', {str(store.root)!r})\n"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen([sys.executable, "-c", head + code], env=environ) for _ in range(count)]
    assert [process.wait(60) for process in running] == [0] * count


def test_what_many_processes_counted_is_summed(store: Store) -> None:
    assert stats.read(store) == stats.Stats({}, None)  # type: ignore[arg-type]
    in_a_process(store, "stats.note(store, {'hits.cache': 2, 'saved_seconds': 0.5})", count=4)
    told = stats.read(store)
    assert dict(told.counts) == {"hits.cache": 8, "saved_seconds": 2.0} and told.since
    assert len(list(folder(store).iterdir())) == 4


def test_each_outcome_of_a_lookup_has_its_counts(store: Store) -> None:
    manifest = make_manifest(provenance={"seconds": 1.5})
    stats.found(store, "site", manifest)
    stats.found(store, "built", manifest)
    for error in (NotPrebuilt("x"), BuildError("x"), CacheError("x")):
        with pytest.raises(type(error)), stats.failures(store):
            raise error
    with pytest.raises(KeyError), stats.failures(store):
        raise KeyError
    stats.flush()
    assert dict(stats.read(store).counts) == {
        "hits.site": 1,
        "saved_seconds": 1.5,
        "misses": 3,
        "builds": 1,
        "build_seconds": 1.5,
        "errors.NotPrebuilt": 1,
        "errors.BuildError": 1,
        "errors.CacheError": 1,
    }


def test_a_hit_neither_writes_nor_locks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store)
    for call in ("open", "write", "mkdir", "listdir", "lstat", "stat"):
        monkeypatch.setattr(os, call, None)
    monkeypatch.setattr(stats, "locks", None)
    stats.found(store, "cache", make_manifest())
    monkeypatch.undo()
    assert not folder(store).exists()


def test_what_the_process_answered_itself_is_told_when_it_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    again = [0]
    monkeypatch.setattr(stats, "_again", lambda: again[0])
    stats.found(store, "cache", make_manifest())
    for again[0], total in ((5, 5), (7, 7), (3, 10)):  # the table was emptied before the third
        stats.flush()
        assert stats.read(store).counts["hits.memory"] == total


def test_threads_lose_nothing(store: Store) -> None:
    def work() -> None:
        for _ in range(500):
            stats.note(store, {"hits.cache": 1})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        stats.flush()
    for thread in threads:
        thread.join()
    stats.flush()
    assert stats.read(store).counts["hits.cache"] == 2000


def _in_a_child(root: str) -> None:
    stats.note(Store("user", root), {"hits.cache": 1})


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_child_counts_for_itself(store: Store, how: str) -> None:
    """Children that multiprocessing forks end without atexit, and know what their parent had noted."""
    stats.note(store, {"hits.cache": 10})
    child = multiprocessing.get_context(how).Process(target=_in_a_child, args=(str(store.root),))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and stats.read(store).counts["hits.cache"] == 1
    stats.flush()
    assert stats.read(store).counts["hits.cache"] == 11


# -- files -------------------------------------------------------------------------------------------


def test_files_of_the_dead_are_folded_and_those_of_the_living_stay(store: Store) -> None:
    stats.note(store, {"misses": 1})
    stats.flush()
    folder(store).joinpath("dead").write_text('{"since": 5.0, "counts": {"misses": 2}}\n{"since": 6.0, "counts": {"mis')
    mine = {p.name for p in folder(store).iterdir()} - {"dead"}
    other = Store("other", str(store.root))
    stats._fold(other, str(folder(store)))
    assert {p.name for p in folder(store).iterdir()} == {*mine, stats.TOTAL}
    assert stats.read(store).counts == {"misses": 3} and stats.read(store).since == 5.0
    stats.note(store, {"misses": 1})
    stats.flush()
    assert stats.read(store).counts == {"misses": 4}


def test_folding_that_is_killed_counts_nothing_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_process(store, "stats.note(store, {'hits.cache': 1})", count=2)
    with monkeypatch.context() as patch:
        patch.setattr(stats, "_remove", lambda folder, names: None)  # killed before it could
        stats._fold(store, str(folder(store)))
    for _ in range(2):
        assert stats.read(store).counts == {"hits.cache": 2}
        stats._fold(store, str(folder(store)))
    assert [p.name for p in folder(store).iterdir()] == [stats.TOTAL]


def test_many_files_are_folded_by_who_comes_next(store: Store) -> None:
    store.own(stats.STATS)
    for number in range(stats._MANY):
        folder(store).joinpath(f"1-{number}").write_text('{"since": 1.0, "counts": {"misses": 1}}\n')
    stats.note(store, {"misses": 1})
    stats.flush()
    assert len(list(folder(store).iterdir())) == 2 and stats.read(store).counts == {"misses": stats._MANY + 1}


def test_zero_counts_from_nothing_also_for_who_runs_on(store: Store) -> None:
    stats.note(store, {"misses": 3})
    stats.flush()
    stats.zero(Store("other", str(store.root)))
    assert stats.read(store).counts == {}
    stats.note(store, {"misses": 1})
    stats.flush()
    assert stats.read(store).counts == {"misses": 1}
    with store.lock("stats"):
        stats.note(store, {"misses": 1})
        stats.flush()  # waits for nobody
    assert stats.read(store).counts == {"misses": 2}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"counts": 1}',
        '{"counts": {"x": "y"}, "since": null}',
        "\xff\n1\n",
        "[" * 100_000,
        '{"counts": {"x": 1e999}, "since": 1, "folded": []}',
        '{"counts": {}, "since": "now", "folded": []}',
        '{"counts": {"x": -1}, "since": 1, "folded": []}',
    ],
)
def test_what_is_no_count_counts_nothing(store: Store, text: str) -> None:
    store.own(stats.STATS)
    for name in (stats.TOTAL, "1-x"):
        folder(store).joinpath(name).write_bytes(text.encode("latin-1"))
    assert stats.read(store).counts == {}
    stats._fold(store, str(folder(store)))
    assert stats.read(store).counts == {}


def test_what_is_no_file_of_counts_is_not_waited_for(store: Store, tmp_path: Path) -> None:
    store.own(stats.STATS)
    os.mkfifo(folder(store) / "1-pipe")
    folder(store).joinpath("1-link").symlink_to("/dev/zero")
    done = threading.Thread(target=stats.read, args=(store,), daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive()


def test_a_store_that_cannot_be_written_is_not_counted(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (Store("site", str(store.root), writable=False), Store("memory", None), Store("x", tmp_path / "file")):
        stats.note(place, {"misses": 1})
        stats.flush()
        assert stats.read(place).counts == {}
    with pytest.raises(CacheError):
        stats.zero(Store("x", tmp_path / "file"))


def test_without_locks_only_what_is_old_is_taken_for_dead(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_process(store, "stats.note(store, {'misses': 1})", count=2)
    old, fresh = sorted(folder(store).iterdir())
    os.utime(old, (1, 1))
    monkeypatch.setattr(locks, "claim", lambda path: locks.Hold())
    stats._fold(store, str(folder(store)))
    assert {p.name for p in folder(store).iterdir()} == {fresh.name, stats.TOTAL}
    assert stats.read(store).counts == {"misses": 2}
