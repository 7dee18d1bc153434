"""What the tests run in processes of their own: nothing here imports pytest, so that they start quickly."""

from __future__ import annotations

import os
import resource
import signal
import time
import warnings
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from cache_help import MEMBERS, PROBLEM, make_manifest, publish

from tlhub.cache.store import Store


def publish_at_once(root: str, barrier: Barrier, rounds: int, results: Any) -> None:
    store = Store("user", root)
    good = 0
    for number in range(rounds):
        manifest = make_manifest(PROBLEM, config={"round": number})
        barrier.wait(60)
        entry = publish(store, manifest)
        good += entry.published and entry.read("kernel.so") == MEMBERS["kernel.so"]
        good += entry.manifest.config == {"round": number}
    results.put(good)


def stage_and_stop(root: str, where: str) -> None:
    """Publish, and stop for good in the middle of it."""

    def stop(*args: Any, **kwargs: Any) -> None:
        print("here", flush=True)
        time.sleep(600)

    store = Store("user", root)
    if where == "building":
        with store.stage() as staged:
            Path(staged.path, "kernel.so").write_bytes(b"half")
            stop()
    setattr(os, where, stop)
    publish(store)


def hold_lock(root: str) -> None:
    with Store("user", root).lock("key") as lock:
        print("here" if lock else "no", flush=True)
        time.sleep(600)


def publish_with_a_small_file_limit(root: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = Store("user", root)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        entry = publish(store)
    print(entry.folder, entry.read("kernel.so") == MEMBERS["kernel.so"], len(caught), os.listdir(f"{root}/v1/.staging"))
