"""benchmarks/certify.py, on the device that is here: what it proves, and that one fault costs one problem."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tlhub import catalog, certificates, sources
from tlhub.workload import Item

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "certify.py"
ONE = '[[problem]]\nkernel = "gemm"\nshape = [33, 17, 65]\ndtype = "{}"\nschedule = "cpu_blocked"\n'


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def certify() -> Any:
    return module(SCRIPT)


@pytest.fixture(scope="module")
def examination() -> Any:
    return module(SCRIPT.with_name("examination.py"))


@pytest.fixture(autouse=True)
def _without_torch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many processes would import it, which takes seconds."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)


def test_a_certificate_is_what_was_measured_and_a_fault_leaves_none(tmp_path: Path) -> None:
    good, both, store, out = tmp_path / "good.toml", tmp_path / "both.toml", tmp_path / "store", tmp_path / "out"
    good.write_text(ONE.format("float32"))
    both.write_text(ONE.format("float64") + ONE.format("float32"))
    built = run("prebuild", "--store", store, "--workload", good)
    assert built.returncode == 0 and built.stdout.startswith("built"), built.stderr
    failed = run("run", "--store", store, "--workload", both, "--out", out)
    assert failed.returncode == 1 and not out.exists(), failed.stderr
    assert "33x17x65 float64: FAILED: NotPrebuilt" in failed.stdout
    assert "33x17x65 float32: error 0.0" in failed.stdout, "the next problem is measured all the same"
    done = run("run", "gemm/cpu_blocked", "--jobs", 2, "--store", store, "--workload", good, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((out / "gemm-cpu_blocked.json").read_text("utf-8"))
    found = certificates.Certificate(**document)
    schedule = next(s for s in catalog.load().schedules["gemm"] if s.name == "cpu_blocked")
    assert (found.revision, found.source_digest) == (schedule.revision, sources.digest(schedule))
    (row,) = found.problems
    assert row["dims"] == {"B": 1, "M": 33, "N": 17, "K": 65} and row["peer"] is None
    assert 0 < row["error"] <= 1 and row["seconds"] is row["ratio"] is None, "nothing is timed that is small"


def test_the_plan_is_every_problem_of_the_schedules_that_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(ONE.format("float64") + ONE.format("float32"))
    assert "gemm/cpu_blocked: 2 problems\n  33x17x65 float64\n" in run("plan", "--workload", path).stdout
    nothing = run("plan", "other", "--workload", path)
    assert nothing.returncode == 2 and "no problem of other" in nothing.stderr
    path.write_text(ONE.format("float31"))
    wrong = run("plan", "--workload", path)
    assert wrong.returncode == 1 and "problem 1" in wrong.stderr and "float31" in wrong.stderr


CHILD = """
import json, os, sys, time
pipe = os.fdopen(int(sys.argv[1]), "w", buffering=1)
for line in sys.stdin:
    what, item = json.loads(line)
    if item["kernel"] == "dies":
        os._exit(3)
    if item["kernel"] == "hangs":
        time.sleep(60)
    if item["kernel"] == "slow":
        time.sleep(0.5)
    row = {"fault": "wrong"} if item["kernel"] == "wrong" else {"error": 0, "pid": os.getpid(), "what": what}
    pipe.write(json.dumps(row) + "\\n")
"""


def test_what_dies_hangs_or_is_wrong_costs_one_problem(
    certify: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(certify, "CHILD", tmp_path / "child.py")
    monkeypatch.setattr(certify, "PATIENCE", 3.0)

    def of(*kinds: str) -> list[Item]:
        return [Item(kind, (1,), "float32", {}) for kind in kinds]

    faults = [None, None, "its process ended with 3", None, "wrong", None, "no answer in 3 s"]
    kinds = of("good", "good", "dies", "good", "wrong", "good", "hangs")
    with certify.Examiners(1) as one:
        rows = one.together("prove", kinds)
        assert [row.get("fault") for row in rows] == faults
        assert rows[0]["pid"] == rows[1]["pid"] != rows[3]["pid"] != rows[5]["pid"]
    with certify.Examiners(2) as two:
        rows = two.together("prove", kinds)
        assert [row.get("fault") for row in rows] == faults
        first, second = two.together("prove", of("slow", "slow"))
        assert first["pid"] != second["pid"], "side by side"
        times = [two.ask("time", item) for item in of("good", "good")]
        assert [row["what"] for row in times] == ["time", "time"]
        assert times[0]["pid"] == times[1]["pid"], "the one that has warmed up"


def test_a_symbolic_dim_is_tried_at_several_extents_by_one_binary(
    examination: Any, monkeypatch: pytest.MonkeyPatch, cold_cache: str
) -> None:
    import tlhub
    from tlhub import testing

    tried, scalars = [], []
    monkeypatch.setattr(examination, "EXTENTS", (1, 9, 33))
    monkeypatch.setattr(examination, "SECONDS", 0.001)
    check = testing.check

    def noted(*args: Any, **named: Any) -> float:
        tried.append(named["dims"]["M"])
        scalars.append(named["scalars"])
        return check(*args, **named)

    monkeypatch.setattr(testing, "check", noted)
    item = Item("gemm", ("M", 17, 65), "float32", {}, None, "cpu_blocked")
    tlhub.get(**item.request())
    row = examination.prove(item)
    assert sorted(set(tried)) == [1, 9, 33] and len(tried) == 3 * len(examination.CASES)
    assert scalars.count({"alpha": 0.75, "out_scale": 0.875}) == 3 and None in scalars
    assert examination.measure(item)["seconds"] is None
    monkeypatch.setattr(examination, "CHECKED", 0)
    large: list[int] = []
    check_there = examination.check_there
    monkeypatch.setattr(examination, "check_there", lambda *a: large.append(a[2].dim["M"]) or check_there(*a))
    assert 0 < examination.prove(item)["error"] <= 1 and large == [1, 9], "the last is measured"
    times = examination.measure(item)
    assert times["seconds"] > 0 and times["peer"] == "numpy" and times["ratio"] > 0
    assert isinstance(row["dims"]["M"], str) and row["dims"]["N"] == 17 and 0 < row["error"] <= 1


def test_moved_scalars_are_no_defaults(examination: Any) -> None:
    from tlhub import catalog, testing
    from tlhub.problem import make

    kernel = catalog.load().kernel("attention")
    made = make(kernel, {"B": 1, "S": 9, "H": 2, "D": 16}, "float32", {})
    usual, moved = testing.default_scalars(kernel, made), examination.moved(kernel, made)
    assert usual.keys() == moved.keys() and all(moved[name] != value for name, value in usual.items())
    assert moved["scale"] == 0.75 / 4 and isinstance(moved["window"], int) and moved["softcap"] > 0


def test_the_data_of_the_cases(examination: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 7)).astype("float32")
    gaps = examination.with_gaps({"x": x, "i": np.arange(6, dtype="int8").reshape(2, 3)}, rng, examination.even)
    assert (gaps["x"] == x).all() and gaps["x"].strides == (128, 4) and np.isnan(gaps["x"].base[:, 7:]).all()
    assert gaps["i"].tolist() == [[0, 1, 2], [3, 4, 5]] and (gaps["i"].base[:, 3:] == 1).all()
    assert examination.with_gaps({"scale": np.float32(2) + np.zeros(())}, rng, examination.even)["scale"] == 2
    h = np.arange(16, dtype="float16").reshape(2, 8)
    odd = [case.spoil({"h": h}, rng)["h"] for case in examination.CASES[1:3]]
    assert all((array == h).all() for array in odd)
    assert odd[0].strides[0] % 16 == 0 and odd[1].strides[0] % 16 and odd[1].ctypes.data - odd[1].base.ctypes.data == 2
    for case, aligned in zip(examination.CASES[1:3], (True, False), strict=True):
        assert all(((n + case.gap(n)) % 8 == 0) == aligned and case.gap(n) >= 3 for n in range(1, 40))
    special = examination.with_specials({"x": x.copy(), "e": np.ones((0, 4), "float16")}, rng)
    assert not np.isfinite(special["x"]).all() and (special["x"] != x).sum() <= 3
