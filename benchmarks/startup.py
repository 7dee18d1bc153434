"""What tlhub costs besides the kernel: imports, lookups, calls, builds. Prints a Markdown table.

    python benchmarks/startup.py [--rounds 15]

Each figure is a median of rounds, and differences are of rounds in turn, so that a slow phase of the machine
falls on both sides. Processes count from their start to their end. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy

import tlhub
import tlhub.catalog
from tlhub.hooks import hookimpl
from tlhub.specs import Arg, Dim, Kernel, Schedule

GEMM = ("gemm", "64,64,64", "--dtype", "float32")

RESULT = """
import numpy, tlhub
a, b = numpy.ones((64, 64), "float32"), numpy.ones((64, 64), "float32")
assert tlhub.get("gemm", (64, 64, 64), "float32")(a, b)[0, 0] == 64
"""

HEAVY = ("numpy", "tvm_ffi", "tvm", "tilelang", "torch", "click", "rich", "filelock", "platformdirs")


class Row(NamedTuple):
    what: str
    measured: float
    bar: float
    unit: str
    note: str = ""

    def __str__(self) -> str:
        verdict = "yes" if self.measured <= self.bar else "**no**"
        return f"| {self.what} | {self.measured:.3g} {self.unit} | {self.bar:g} {self.unit} | {verdict} | {self.note} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TLHUB_CACHE_DIR"] = f"{folder}/cache"
        cold, warm = builds(folder)
        rows = [*processes(rounds), *in_process(rounds), *disk(rounds), region(rounds)]
    rows += [Row("one CPU kernel built, worker start included", cold, 2, "s"), Row("in a warm worker", warm, 0.3, "s")]
    when = time.strftime("%Y-%m-%d", time.gmtime())
    print(f"{model()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {when}\n")
    print("| what | measured | bar | met | |\n| --- | --- | --- | --- | --- |")
    print("\n".join(map(str, rows)))


def model() -> str:
    return next(iter(tlhub.catalog.load().targets["cpu"].devices())).model


# -- processes -------------------------------------------------------------------------------------


def wall(*command: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def python(code: str, torch: bool = True) -> tuple[str, ...]:
    hide = "" if torch else "import sys; sys.modules['torch'] = None\n"
    return (sys.executable, "-c", hide + code)


def in_turn(rounds: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Return the readings of each side, taken in turn."""
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, readings in zip(sides, taken, strict=True):
            readings.append(side())
    return taken


def above(more: list[float], less: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(more, less, strict=True))


def processes(rounds: int) -> list[Row]:
    commands = {
        "bare": python("pass"),
        "import": python("import tlhub"),
        "numpy": python("import numpy, tvm_ffi"),
        "result": python(RESULT),
        "numpy, no torch": python("import numpy, tvm_ffi", torch=False),
        "result, no torch": python(RESULT, torch=False),
        "get": python("from tlhub.cli import main; main()")[:3] + ("get", *GEMM),
    }
    for command in commands.values():
        wall(*command)
    taken = dict(zip(commands, in_turn(rounds, *(lambda c=c: wall(*c) for c in commands.values())), strict=True))
    heavy = subprocess.run(
        python(f"import sys, tlhub; print([m for m in {HEAVY} if m in sys.modules])"), capture_output=True, text=True
    ).stdout.strip()
    middle = {name: statistics.median(readings) for name, readings in taken.items()}
    over_with = above(taken["result"], taken["numpy"])
    over_without = above(taken["result, no torch"], taken["numpy, no torch"])
    return [
        Row("`import tlhub` over bare Python", 1e3 * above(taken["import"], taken["bare"]), 30, "ms", heavy),
        Row("cold process to a result, warm cache, no torch", middle["result, no torch"], 0.2, "s"),
        Row("the same above `import numpy, tvm_ffi`", 1e3 * over_without, 60, "ms"),
        Row("the same where torch is installed", 1e3 * over_with, 60, "ms", f"{middle['result']:.2f} s in all"),
        Row("`tlhub get` of it, torch installed or not", middle["get"], 0.2, "s"),
    ]


# -- in this process -------------------------------------------------------------------------------


def per_call(call: Callable[[], object], seconds: float = 0.02) -> float:
    """Return seconds a call, of as many calls as fill *seconds*."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(100):
            call()
        count += 100
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def in_process(rounds: int) -> list[Row]:
    shape = (64, 64, 64)
    gemm = tlhub.get("gemm", shape, "float32", trans_a=False, trans_b=False, epilogue="none")
    absent = (None,) * len(gemm.signature.scalars)

    def again() -> object:
        return tlhub.get("gemm", shape, "float32", trans_a=False, trans_b=False, epilogue="none")

    # an empty product has no arithmetic, so that what is left is the way there
    none = tlhub.get("gemm", (0, 64, 64), "float32")
    x, b, y = (numpy.ones(s, "float32") for s in ((0, 64), (64, 64), (0, 64)))
    ours, bare = in_turn(
        rounds,
        lambda: per_call(lambda: none(x, b, out=y)),
        lambda: per_call(lambda: none.function(x, b, y, None, *absent)),
    )
    (lookups,) = in_turn(rounds, lambda: per_call(again))
    return [
        Row("`get` again, three options", 1e6 * statistics.median(lookups), 1, "us"),
        Row(
            "a call with `out=` above the bare tvm-ffi function",
            1e6 * above(ours, bare),
            0.6,
            "us",
            f"bare: {1e6 * statistics.median(bare):.2f} us",
        ),
    ]


DISK = """
import json, sys, time, tlhub
variants = json.loads(sys.argv[1])
tlhub.get("gemm", (64, 64, 64), "float32", **variants[0])
taken = []
for options in variants[1:]:
    start = time.perf_counter()
    found = tlhub.get("gemm", (64, 64, 64), "float32", **options)
    taken.append(time.perf_counter() - start)
    assert found.origin == "cache", found.origin
print(json.dumps(taken))
"""

VARIANTS = [
    {"trans_a": a, "trans_b": b, "epilogue": e} for e in ("none", "relu") for a in (False, True) for b in (False, True)
]


def disk(rounds: int) -> list[Row]:
    for options in VARIANTS:
        tlhub.get("gemm", (64, 64, 64), "float32", **options)
    taken: list[float] = []
    for _ in range(max(3, rounds // 3)):
        done = subprocess.run([*python(DISK), json.dumps(VARIANTS)], check=True, stdout=subprocess.PIPE, text=True)
        taken += json.loads(done.stdout)
    return [Row("a verified hit from disk, in process", 1e3 * statistics.median(taken), 0.5, "ms", "and loaded")]


BUILD = """
import json, time, tlhub
taken = []
for options in ({}, {"trans_a": True}, {"trans_b": True}):
    start = time.perf_counter()
    found = tlhub.get("gemm", (64, 64, 64), "float32", **options)
    taken.append(time.perf_counter() - start)
    assert found.origin == "built", found.origin
print(json.dumps(taken))
"""


def builds(folder: str) -> tuple[float, float]:
    """Return the seconds of a first build of a process, and of a later one."""
    cold, warm = [], []
    for number in range(3):
        env = {**os.environ, "TLHUB_CACHE_DIR": f"{folder}/build{number}"}
        done = subprocess.run(python(BUILD, torch=False), check=True, stdout=subprocess.PIPE, text=True, env=env)
        first, *rest = json.loads(done.stdout)
        cold.append(first)
        warm += rest
    return statistics.median(cold), statistics.median(warm)


# -- a parallel region -----------------------------------------------------------------------------


@hookimpl
def tlhub_kernels() -> list[Kernel]:
    return [
        Kernel(
            name="region",
            revision=1,
            dims=(Dim("N"),),
            inputs=(Arg("x", ("N",)),),
            outputs=(Arg("y", ("N",)),),
            dtypes=("float32",),
            reference="startup:region",
            tolerance="startup:region",
            flops=lambda dims: float(dims["N"]),
        )
    ]


@hookimpl
def tlhub_schedules() -> list[Schedule]:
    return [Schedule("parallel", "region", 1, 1, ("cpu",), "tvm", "startup:program", symbolic=("N",))]


def program(problem: object, config: object, arch: str) -> object:
    """Copy N floats, each in a task of its own."""
    from tvm.script import tirx as T

    @T.prim_func
    def copy(x: T.handle, y: T.handle):  # type: ignore[no-untyped-def]
        N = T.int64()
        X = T.match_buffer(x, (N,), "float32", align=4, offset_factor=1)
        Y = T.match_buffer(y, (N,), "float32", align=4, offset_factor=1)
        for i in T.parallel(N):
            Y[i] = X[i]

    return copy


def region(rounds: int) -> Row:
    """Time a loop of two iterations over two threads against the same on one."""
    from importlib import metadata

    from tlhub import catalog, hub, plugins
    from tlhub.runtime import threads

    sys.path.insert(0, str(Path(__file__).parent))
    installed = list(metadata.entry_points(group=plugins.GROUP))
    known = catalog.assemble(plugins.find([*installed, metadata.EntryPoint("startup", "startup", plugins.GROUP)]))
    hub.load = lambda: known  # type: ignore[assignment]
    hub.forget()
    copy = hub.get("region", (2,), "float32")
    x, y = numpy.ones(2, "float32"), numpy.zeros(2, "float32")

    def on(count: int) -> float:
        threads.set_num_threads(count)
        copy.function(x, y, None)
        return per_call(lambda: copy.function(x, y, None))

    two, one = in_turn(rounds, lambda: on(2), lambda: on(1))
    threads.set_num_threads(None)
    assert (y == x).all()
    return Row("a parallel region of two threads", 1e6 * above(two, one), 10, "us", "above the same loop on one thread")


if __name__ == "__main__":
    main()
