"""Certificates: who needs one, what one is worth once the source has changed, and that what ships has one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tlhub
import tlhub.hub
import tlhub_registry
from tlhub import catalog, certificates, sources, workload
from tlhub.build.pool import Built, Pool
from tlhub.cache.chain import this_host
from tlhub.devices import locate
from tlhub.errors import NoSchedule, NotPrebuilt
from tlhub.problem import make
from tlhub.specs import ABI, Schedule
from tlhub.workload import Item

pytestmark = pytest.mark.light

ARCH = "cuda:sm_90a"
FAKE = Schedule("fake", "gemm", 2, 1, ("cuda",), "cuda", "tlhub_gemm.reference:reference", symbolic=())
OURS = [s for group in catalog.load().schedules.values() for s in group if certificates.needed(catalog.load(), s)]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put schedules in the place of gemm's, brought by tlhub-core or by somebody else's distribution."""
    monkeypatch.setattr(tlhub_registry, "certificate", lambda kernel, schedule: None)

    def install(*schedules: Schedule, distribution: str = "tlhub-core") -> None:
        known = catalog.load()
        brought = replace(known.plugins[0], distribution=distribution, editable=False)
        changed = replace(
            known,
            schedules={**known.schedules, "gemm": schedules},
            owners={**known.owners, **{("gemm", s.name): brought for s in schedules}},
        )
        monkeypatch.setattr(tlhub.hub, "load", lambda: changed)
        certificates._read.cache_clear()
        tlhub.hub.forget()

    yield install
    certificates._read.cache_clear()
    tlhub.hub.forget()


def certify(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    document = {
        "kernel": "gemm",
        "schedule": "fake",
        "revision": 1,
        "source_digest": sources.digest(FAKE),
        "device": "NVIDIA H200",
        "driver": 580,
        "date": "2026-11-30",
        "problems": [
            {"arch": ARCH, "error": 0.25, "ratio": 1.01},
            {"arch": "cuda:compute_80", "error": 0.5, "ratio": None},
        ],
    }
    monkeypatch.setattr(tlhub_registry, "certificate", lambda kernel, schedule: {**document, **changes})
    certificates._read.cache_clear()


def judged(arch: str = ARCH, **asked: Any) -> dict[str, str]:
    """Return why each schedule stands where it does in the trace of a lookup."""
    found = tlhub.explain("gemm", (64, 64, 64), "float16", arch=arch, **asked).resolution
    return {c.schedule.name: c.reason for c in found.candidates} | {r.schedule: r.reason for r in found.rejected}


def test_ours_without_one_serves_only_by_name(serve: Any) -> None:
    serve(FAKE)
    reason = judged()["fake"]
    assert reason == f"no certificate for its source ({sources.digest(FAKE)[:16]}): served when asked for by name"
    with pytest.raises(NoSchedule, match="served when asked for by name"):
        tlhub.get("gemm", (64, 64, 64), "float16", arch=ARCH)
    assert judged(schedule="fake")["fake"] == "asked for"


def test_one_of_its_source_serves_it(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(FAKE)
    certify(monkeypatch)
    assert judged()["fake"] == "priority 0"
    found = certificates.find(FAKE)
    assert found is not None and (found.worst, found.ratio, found.archs) == (0.5, 1.01, ("cuda:compute_80", ARCH))
    for changes in ({"source_digest": "0" * 64}, {"revision": 2}):
        certify(monkeypatch, **changes)
        assert "no certificate" in judged()["fake"]


def test_the_hint_asks_for_it_by_name(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(FAKE)
    with pytest.raises(NoSchedule) as caught:
        tlhub.get("gemm", (64, 32, 16), "float16", arch=ARCH)
    assert caught.value.hint == f"tlhub get gemm M=64,N=32,K=16 --dtype float16 --arch {ARCH} --schedule fake"
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    with pytest.raises(NotPrebuilt) as missing:
        tlhub.get("gemm", (64, 32, 16), "float16", arch=ARCH, schedule="fake")
    assert str(missing.value.hint).endswith("--schedule fake")


def test_others_answer_for_their_own(serve: Any) -> None:
    serve(FAKE, distribution="tlhub-plugin-xyz")
    assert judged()["fake"] == "priority 0"


def test_the_rule_is_for_gpus(serve: Any) -> None:
    serve(replace(FAKE, targets=("cpu", "cuda")))
    assert judged("cpu:x86-64-v3")["fake"] == "priority 0" and "no certificate" in judged()["fake"]


def test_an_experiment_is_asked_for_whoever_brings_it(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = replace(FAKE, experimental=True)
    certify(monkeypatch)
    for distribution in ("tlhub-core", "tlhub-plugin-xyz"):
        serve(experiment, distribution=distribution)
        assert judged()["fake"] == "experimental: served when asked for by name"
        assert judged(schedule="fake")["fake"] == "asked for"
        last = str(tlhub.explain("gemm", (8, 8, 8), "float16", arch=ARCH)).splitlines()[-1]
        typed = f"tlhub get gemm M=8,N=8,K=8 --dtype float16 --arch {ARCH} --schedule fake"
        assert last == f"  fake serves by name: {typed}"


def test_a_lookup_on_a_cpu_reads_none() -> None:
    code = """
import sys, tlhub, tlhub_registry
def certificate(*names): raise SystemExit("read")
tlhub_registry.certificate = certificate
tlhub.explain("gemm", (64, 64, 64), "float32", arch="cpu:x86-64-v3")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_schedules_show_theirs(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from tlhub.cli.listings import schedules

    serve(FAKE)
    monkeypatch.setattr(catalog, "load", tlhub.hub.load)
    (bare,) = json.loads(CliRunner().invoke(schedules, ["gemm", "--json"]).stdout)
    assert (bare["certificate"], bare["needs_certificate"]) == (None, True)
    assert "missing" in CliRunner().invoke(schedules, ["gemm"]).stdout
    certify(monkeypatch)
    (proven,) = json.loads(CliRunner().invoke(schedules, ["gemm", "--json"]).stdout)
    assert proven["certificate"]["device"] == "NVIDIA H200" and proven["certificate"]["worst"] == 0.5
    shown = CliRunner().invoke(schedules, ["gemm"]).stdout
    assert "NVIDIA H200 2026-11-30: 0.5 of the tolerance at most, 1.01 of its peer at least" in shown


# -- symbolic dims: what was built for every M is found for one ------------------------------------


@pytest.mark.parametrize("symbolic", [(), ("M",), ("M", "N")])
def test_a_concrete_m_finds_what_a_symbolic_one_built(
    serve: Any, monkeypatch: pytest.MonkeyPatch, cold_cache: str, symbolic: tuple[str, ...]
) -> None:
    """Also where the schedule would have another config for that M, and whatever it leaves open by itself."""
    built = []

    def build(
        self: Pool, kernel: Any, problem: Any, schedule: Any, config: Any, arch: str, target: Any, folder: str
    ) -> Built:
        built.append((problem.dim, config))
        Path(folder, "kernel.so").write_bytes(b"\x7fELF")
        Path(folder, "program.cu").write_text("")
        host = this_host()
        return Built({"nvcc": "13.3"}, ABI, host.machine, "", {}, 580, (), ("kernel.so", "program.cu"), 0.1)

    def configs(problem: Any, facts: Any) -> Any:
        extent = problem.dim["M"]
        return ({"tile": 128 if isinstance(extent, str) or extent > 64 else 64},)

    monkeypatch.setattr(Pool, "build", build)
    serve(replace(FAKE, symbolic=symbolic, configs=configs), distribution="tlhub-plugin-xyz")
    every = tlhub.get("gemm", ("M", 4096, 4096), "float16", arch=ARCH)
    assert every.entry.manifest.least_driver == 580 and len(built) == 1 and built[0][1] == {"tile": 128}
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    tlhub.hub.forget()
    for m in (1, 64, 65, 8192):
        one = tlhub.get("gemm", (m, 4096, 4096), "float16", arch=ARCH)
        assert (one.key, one.problem.dim["M"], one.config) == (every.key, m, {"tile": 128})
    assert tlhub.explain("gemm", (64, 4096, 4096), "float32", arch=ARCH).outcome == "not prebuilt"
    other = tlhub.explain("gemm", (64, 4096, 2048), "float16", arch=ARCH)
    assert other.outcome == "not prebuilt"


# -- what ships ------------------------------------------------------------------------------------


def test_what_is_served_unasked_has_one() -> None:
    missing = [f"{s.kernel}/{s.name}" for s in OURS if not s.experimental and certificates.find(s) is None]
    assert not missing, (
        "their sources were not measured as they are; on a device that runs them: "
        f"python benchmarks/certify.py run --store DIR {' '.join(missing)}"
    )


@pytest.mark.parametrize("schedule", OURS, ids=lambda s: f"{s.kernel}/{s.name}")
def test_what_ships_says_what_would_prove_it(schedule: Schedule) -> None:
    """Its workload asks for it by name, for problems that it serves: every dtype that it takes is among them."""
    known, kernel = catalog.load(), catalog.load().kernel(schedule.kernel)
    name = f"certify/{schedule.kernel}-{schedule.name}"
    items = workload.parse(tlhub_registry.workload(name), name, known)
    assert [str(item) for item in items if not isinstance(item, Item)] == []
    asked = [item for item in items if isinstance(item, Item)]
    assert {(item.kernel, item.schedule) for item in asked} == {(schedule.kernel, schedule.name)}
    made = [(make(kernel, i.shape, i.dtype, i.options), locate(known, arch=i.arch).facts) for i in asked]
    assert len({(problem, facts.arch) for problem, facts in made}) == len(made)
    assert [reason for reason in (schedule.supports(*pair) for pair in made) if reason] == []
    facts = made[0][1]
    small = [make(kernel, made[0][0].dim, dtype, {}) for dtype in kernel.dtypes]
    assert {p.dtype for p in small if schedule.supports(p, facts) is None} <= {p.dtype for p, _ in made}


def test_each_is_of_a_schedule_and_proves_it() -> None:
    for path in sorted((Path(tlhub_registry.__file__).parent / "certificates").glob("*.json")):
        found = certificates.Certificate(**json.loads(path.read_text("utf-8")))
        assert path.stem == f"{found.kernel}-{found.schedule}"
        holds(found)


def holds(found: certificates.Certificate) -> None:
    assert any((s.kernel, s.name) == (found.kernel, found.schedule) for s in OURS), "no such schedule ships"
    assert re.fullmatch(r"[0-9a-f]{64}", found.source_digest) and re.fullmatch(r"\d{4}-\d\d-\d\d", found.date)
    assert found.device and found.driver >= 525 and found.problems
    for row in found.problems:
        assert 0 <= row["error"] <= 1 and (row["seconds"] is None or row["seconds"] > 0)
        assert row["ratio"] is None or row["ratio"] > 0
        dims = catalog.load().kernel(found.kernel).dims
        assert {d.name for d in dims if not d.when} <= set(row["dims"]) <= {d.name for d in dims}
