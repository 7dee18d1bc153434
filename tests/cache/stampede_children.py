"""Many processes that want one kernel at the same moment: forked, so that starting them takes no time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

SHAPE = (16, 8, 4)


def stampede(count: int, ready: Any) -> list[Any]:
    """Have *count* children ask at once, each after ``ready()``; return what each found, or its error's text."""
    start, go = os.pipe()
    found, tell = os.pipe()
    children = []
    for _ in range(count):
        child = os.fork()
        if not child:
            os.close(go)
            os.read(start, 1)  # until the parent closes its end
            os.write(tell, json.dumps(_ask(ready)).encode() + b"\n")
            os._exit(0)
        children.append(child)
    os.close(tell)
    os.close(start)
    os.close(go)
    with open(found, "rb") as lines:
        results = [json.loads(line) for line in lines]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * count, codes
    return results


def _ask(ready: Any) -> Any:
    import numpy as np

    import tlhub

    try:
        ready()
        m, n, k = SHAPE
        a, b = np.arange(m * k, dtype="f4").reshape(m, k), np.ones((k, n), "f4")
        kernel = tlhub.get("gemm", SHAPE, "float32")
        return [kernel.origin, kernel.entry.published, bool((kernel(a, b) == a @ b).all())]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def without_locks(donor: str) -> Any:
    """Return what switches every lock of a store off in a child, and has a build copy the entry *donor*."""
    from tlhub.build import pool
    from tlhub.cache import locks
    from tlhub.cache.manifest import Manifest
    from tlhub.cache.store import Store

    made = Manifest.parse(Path(donor, "entry.json").read_bytes())

    def copied(self: Any, *arguments: Any, **_: Any) -> Any:
        for name in made.members:
            shutil.copy(f"{donor}/{name}", arguments[6])
        facts = (made.toolchain, made.abi, made.platform["machine"], made.glibc, made.resources, 0, ())
        return pool.Built(*facts, tuple(made.members), 0.1)

    def ready() -> None:
        pool.Pool.build = copied  # type: ignore[method-assign,assignment]
        Store.lock = lambda *_, **__: contextlib.nullcontext(locks.Lock(False))  # type: ignore[method-assign]

    return ready


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would take a second to import it
    import filelock  # noqa: F401
    import tvm_ffi  # noqa: F401

    import tlhub
    import tlhub.runtime

    tlhub.explain("gemm", SHAPE, "float32")  # what every child would import and find out
    count, *donor = sys.argv[1:]
    ready = without_locks(*donor) if donor else lambda: None
    print(json.dumps(stampede(int(count), ready)))


if __name__ == "__main__":
    main()
