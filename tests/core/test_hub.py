"""Lookups end to end: built once, found again, refused with the right words, the same cold and warm."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tlhub
import tlhub.hub
import tlhub.lookup
from tlhub.catalog import load
from tlhub.errors import ArgumentError, BuildError, DeviceError, NoSchedule, NotPrebuilt, PluginError, UnknownName

pytestmark = pytest.mark.tvm

SIZE = (64, 48, 32)


def product(m: int = 64, n: int = 48, k: int = 32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((m, k)).astype("float32"), rng.standard_normal((k, n)).astype("float32")


def in_process(code: str, **environment: str) -> Any:
    """Run *code* in a fresh interpreter and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOOKUP = """
import json, sys
sys.modules["torch"] = None  # tvm-ffi would import it, which takes seconds
import tlhub, numpy as np
k = tlhub.get("gemm", (64, 48, 32), "float32")
c = k(np.ones((64, 32), "float32"), np.ones((32, 48), "float32"))
print(json.dumps([k.origin, k.match, k.key, float(c.min()), float(c.max())]))
"""


def test_built_by_one_process_and_found_by_the_next(cold_cache: str) -> None:
    first = in_process(LOOKUP)
    second = in_process(LOOKUP)
    assert first[0] == "built" and second[0] == "cache" and second[1] in ("exact", "compatible")
    assert first[2] == second[2]
    assert first[3:] == second[3:] == [32.0, 32.0]


def test_the_order_of_builds_changes_neither_keys_nor_bytes(
    cold_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process built before is nothing that a build depends on: one store, not twins for each order."""
    problems = [{"trans_a": a, "trans_b": b} for a in (False, True) for b in (False, True)]
    stores = []
    for turn in range(2):
        monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / str(turn)))
        tlhub.hub.forget()
        random.Random(turn).shuffle(problems)
        for options in problems:
            tlhub.hub.prewarm("gemm", SIZE, "float32", device="cpu", **options)
        found = Path(str(tmp_path / str(turn))).glob("v1/*/*/*/*/kernel.so")
        stores.append({path.parts[-5:]: path.read_bytes() for path in found})
    assert stores[0] == stores[1] and len(stores[0]) == len(problems)


def test_every_size_is_served_by_one_binary() -> None:
    one, two = tlhub.get("gemm", SIZE, "float32"), tlhub.get("gemm", (1, 7, 13), "float32")
    assert one is not two and one.key == two.key and two.origin == "memory"
    a, b = product(1, 7, 13)
    np.testing.assert_allclose(two(a, b), a @ b, rtol=1e-5, atol=1e-5)


def test_a_concrete_lookup_takes_its_own_size_only() -> None:
    kernel = tlhub.get("gemm", SIZE, "float32")
    with pytest.raises(ArgumentError, match="argument 'a'") as caught:
        kernel(*product(65))
    assert caught.value.argument == "a" and "64" in str(caught.value.expected)
    any_size = tlhub.get("gemm", ("M", 48, 32), "float32")
    for m in (1, 64, 65):
        a, b = product(m)
        np.testing.assert_allclose(any_size(a, b), a @ b, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="argument 'b'"):
        any_size(product()[0], np.ones((32, 49), "float32"))


def test_get_again_is_the_same_object() -> None:
    kernel = tlhub.get("gemm", SIZE, "float32", trans_b=True)
    assert tlhub.get("gemm", SIZE, "float32", trans_b=True) is kernel
    assert tlhub.get("gemm", list(SIZE), "float32", trans_b=True, trans_a=False) is kernel
    assert tlhub.get("gemm", {"M": 64, "N": 48, "K": 32}, {"a": "float32", "b": "float32"}, trans_b=True) is kernel


@pytest.mark.parametrize("shape", [(64.0, 48, 32), (True, 48, 32), (-1, 48, 32), (64, 48), ("6 4", 48, 32)])
def test_bad_dims_get_the_same_answer_cold_and_warm(shape: Any) -> None:
    tlhub.hub.forget()
    with pytest.raises(ArgumentError) as cold:
        tlhub.get("gemm", shape, "float32")
    tlhub.get("gemm", SIZE, "float32")
    tlhub.get("gemm", (1, 48, 32), "float32")
    with pytest.raises(ArgumentError) as warm:
        tlhub.get("gemm", shape, "float32")
    assert str(cold.value) == str(warm.value)


def test_options_of_another_type_get_the_same_answer_cold_and_warm() -> None:
    tlhub.get("gemm", SIZE, "float32", trans_a=True)
    with pytest.raises(ArgumentError, match="trans_a is 1"):
        tlhub.get("gemm", SIZE, "float32", trans_a=1)


def test_unknown_names() -> None:
    with pytest.raises(UnknownName, match="did you mean 'gemm'"):
        tlhub.get("gem", SIZE, "float32")
    with pytest.raises(UnknownName):
        tlhub.get("gemm", SIZE, "float32", arch="cpu:x86-64-v9")
    with pytest.raises(UnknownName, match="unknown schedule"):
        tlhub.get("gemm", SIZE, "float32", schedule="nothing")
    with pytest.raises((UnknownName, DeviceError)):
        tlhub.get("gemm", SIZE, "float32", device="cuda:0")


def test_what_only_other_targets_serve_says_so() -> None:
    with pytest.raises(NoSchedule) as caught:
        tlhub.get("gemm", SIZE, "float32", compute="tf32", device="cpu")
    assert "tf32" in str(caught.value) and caught.value.hint


def test_compiling_off(cold_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    with pytest.raises(NotPrebuilt) as caught:
        tlhub.get("gemm", SIZE, "float32")
    words = caught.value.hint.split()
    assert words[:2] == ["tlhub", "explain"]
    shown = subprocess.run(
        [sys.executable, "-c", "from tlhub.cli import main; main()", *words[1:]], capture_output=True, text=True
    )
    assert "NotPrebuilt" in shown.stdout, shown.stderr
    monkeypatch.setenv("TLHUB_COMPILE", "sometimes")
    with pytest.raises(ArgumentError, match="auto, never"):
        tlhub.get("gemm", SIZE, "float32")


def test_threads_that_ask_at_once_build_once(cold_cache: str) -> None:
    start, kernels = threading.Barrier(6), []

    def ask() -> None:
        start.wait()
        kernels.append(tlhub.get("gemm", SIZE, "float32"))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({k.key for k in kernels}) == 1 and len(kernels) == 6
    assert sum(k.origin == "built" for k in set(kernels)) <= 1
    entries = [f for f, _, files in os.walk(cold_cache) if "entry.json" in files]
    assert len(entries) == 1


def test_a_child_after_fork_computes_right() -> None:
    a, b = product()
    kernel = tlhub.get("gemm", SIZE, "float32")
    kernel(a, b)
    pid = os.fork()
    if not pid:
        try:
            again = tlhub.get("gemm", SIZE, "float32")
            good = np.allclose(again(a, b), a @ b, atol=1e-4) and np.allclose(kernel(a, b), a @ b, atol=1e-4)
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_get_for_reads_dims_dtypes_and_device_off_the_arrays() -> None:
    a, b = product()
    kernel = tlhub.get_for("gemm", a, b)
    assert kernel is tlhub.get("gemm", SIZE, "float32", device="cpu")
    assert tlhub.get_for("gemm", a.T, b, trans_a=True).problem.dim == {"B": 1, "M": 64, "N": 48, "K": 32}
    batch = tlhub.get_for("gemm", np.ones((3, 4, 5), "float32"), np.ones((3, 5, 6), "float32"))
    assert batch.problem.dim == {"B": 3, "M": 4, "N": 6, "K": 5}
    with pytest.raises(ArgumentError, match="expected K=32"):
        tlhub.get_for("gemm", a, b[:-1])
    with pytest.raises(ArgumentError, match="not an array"):
        tlhub.get_for("gemm", a, [[1.0]])
    with pytest.raises(ArgumentError, match="its inputs are a, b"):
        tlhub.get_for("gemm", a)


def test_arrays_that_are_odd_are_refused_by_name() -> None:
    a, b = product()

    class Odd:
        dtype, shape = b.dtype, b.shape

        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    class Lost(Odd):
        def __dlpack_device__(self) -> Any:
            raise BufferError("it moved")

    for shape in ((None, "x"), (32, None)):
        with pytest.raises(ArgumentError, match="'b': expected a shape of integers") as caught:
            tlhub.get_for("gemm", a, Odd(shape=shape))
        assert caught.value.argument == "b"
    with pytest.raises(ArgumentError, match="BufferError: it moved"):
        tlhub.get_for("gemm", Lost(shape=a.shape), b)
    with pytest.raises(ArgumentError, match="'a': expected a dtype of .*, got >f4") as caught:
        tlhub.get_for("gemm", a.astype(">f4"), b)
    assert caught.value.hint == "a.astype('float32')"
    with pytest.raises(ArgumentError, match="'>f4'"):
        tlhub.get("gemm", SIZE, np.dtype(">f4"))
    with pytest.raises(UnknownName, match="unknown schedule 3"):
        tlhub.get("gemm", SIZE, "float32", schedule=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("TLHUB_MATCH", "foo"), ("TLHUB_STORES", "/opt/kernels?foo")])
def test_a_policy_that_is_not_one_is_a_wrong_argument(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="foo"):
        tlhub.explain("gemm", SIZE, "float32")


def test_an_arch_that_no_device_here_runs_is_built_and_not_callable() -> None:
    kernel = tlhub.get("gemm", SIZE, "float32", arch="cpu:x86-64-v4")
    if load().targets["cpu"].runs("cpu:x86-64-v4", load().targets["cpu"].devices()[0]) is None:
        pytest.skip("this machine runs x86-64-v4")
    with pytest.raises(DeviceError, match="no device here"):
        kernel(*product())


def test_the_next_candidate_serves_when_one_fails_to_build(cold_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = load()
    good = catalog.schedules["gemm"][0]
    bad = replace(good, name="bad", priority=99, program="tlhub_gemm.cpu_program:no_such_function")
    broken = replace(
        catalog,
        schedules={**catalog.schedules, "gemm": (bad, good)},
        owners={**catalog.owners, ("gemm", "bad"): catalog.owner(good)},
    )
    monkeypatch.setattr(tlhub.hub, "load", lambda: broken)
    with pytest.warns(RuntimeWarning, match="no_such_function"):
        kernel = tlhub.get("gemm", SIZE, "float32")
    assert kernel.schedule == good.name
    with pytest.raises(BuildError, match="no_such_function"):
        tlhub.get("gemm", SIZE, "float32", schedule="bad")


def test_a_schedule_without_its_source_is_passed_by(cold_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = load()
    good = tlhub.get("gemm", SIZE, "float32").schedule
    lost = replace(next(s for s in catalog.schedules["gemm"] if s.name == good), name="lost", priority=99)
    lost = replace(lost, program="no_such_package.gemm:program", sources=())
    owners = {**catalog.owners, ("gemm", "lost"): catalog.owners["gemm", good]}
    schedules = {**catalog.schedules, "gemm": (*catalog.schedules["gemm"], lost)}
    monkeypatch.setattr(tlhub.hub, "load", lambda: replace(catalog, schedules=schedules, owners=owners))
    assert tlhub.get("gemm", SIZE, "float32").schedule == good
    with pytest.raises(NoSchedule, match=r"lost: source 'no_such_package.gemm' of a schedule cannot be found"):
        tlhub.get("gemm", SIZE, "float32", schedule="lost")


def test_the_config_is_that_of_the_entry_that_serves(cold_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tlhub.get("gemm", SIZE, "float32")
    catalog = load()
    schedule = next(s for s in catalog.schedules["gemm"] if s.name == first.schedule)
    monkeypatch.setenv("TLHUB_MATCH", "revision")
    other = replace(schedule, configs=lambda problem, facts: ({**first.config, "kc": 64},))
    changed = replace(catalog, schedules={**catalog.schedules, "gemm": (other,)})
    monkeypatch.setattr(tlhub.hub, "load", lambda: changed)
    tlhub.hub.forget()
    again = tlhub.get("gemm", SIZE, "float32")
    assert (again.match, again.key, again.config) == ("revision", first.key, first.config)


def test_importing_is_light() -> None:
    code = """
import sys, json; before = set(sys.modules)
import tlhub
heavy = {"numpy", "tvm_ffi", "tvm", "tilelang", "torch", "click", "rich", "filelock", "platformdirs", "pluggy"}
print(json.dumps(sorted(heavy & (set(sys.modules) - before))))
"""
    assert in_process(code) == []


def test_explaining_loads_no_runtime() -> None:
    code = """
import sys, json, tlhub
tlhub.explain("gemm", (64, 64, 64), "float32")
print(json.dumps(sorted({"tvm_ffi", "tvm", "tilelang", "torch", "numpy"} & set(sys.modules))))
"""
    assert in_process(code) == []


def test_public_modules_are_attributes_whatever_was_imported():
    code = "import tlhub; tlhub.errors.ArgumentError, tlhub.specs.Kernel, tlhub.hooks.hookimpl, tlhub.testing.check"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_exact_match_is_found_by_a_process_that_built_nothing(
    cold_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLHUB_MATCH", "exact")
    built = tlhub.get("gemm", SIZE, "float32")
    tlhub.hub.forget()
    tlhub.lookup.toolchains.clear()  # as in a new process
    monkeypatch.setattr("tlhub.build.pool.Pool.build", None)  # nothing is compiled
    found = tlhub.get("gemm", SIZE, "float32")
    assert found.match == "exact" and found.key == built.key


def test_a_refusal_by_the_program_itself_is_not_the_callers_fault() -> None:
    kernel = copy.copy(tlhub.get("gemm", SIZE, "float32"))

    def refuse(*_: Any) -> None:
        raise ValueError(
            "Mismatched b.shape[1] on argument #1 when calling:\n  `tlhub_program(a, b, c)`,\n  expected 48"
        )

    kernel.function = refuse
    with pytest.raises(PluginError, match="expected 48") as caught:
        kernel(*product())
    assert kernel.schedule in str(caught.value) and not isinstance(caught.value, ValueError)


def test_serving_is_noted_as_use_and_explaining_is_not(cold_cache: str) -> None:
    stamp = f"{tlhub.get('gemm', SIZE, 'float32').entry.folder}/entry.json"
    os.utime(stamp, (1e9, 1e9))
    tlhub.explain("gemm", SIZE, "float32")
    assert os.stat(stamp).st_mtime == 1e9
    tlhub.hub.forget()
    tlhub.get("gemm", SIZE, "float32")
    assert os.stat(stamp).st_mtime > 1e9
