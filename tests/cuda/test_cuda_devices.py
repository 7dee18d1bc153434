"""Finding GPUs, through a libnvidia-ml of ours: no GPU and no driver is needed."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tlhub
from tlhub import sources
from tlhub.cache.chain import this_host
from tlhub.cache.manifest import Manifest
from tlhub.errors import BuildError
from tlhub.specs import ABI
from tlhub.stores import user_store
from tlhub_cuda import TARGET, device, nvml

_H200, _OTHER = "GPU-aa11-22", "GPU-aa33-44"


def _compile(folder: Path, *flags: str) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = Path(__file__).with_name("fake_nvml.c")
    library = folder / nvml.LIBRARY
    subprocess.run([compiler, "-shared", "-fPIC", *flags, str(source), "-o", str(library)], check=True)
    return str(library)


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """The path of a libnvidia-ml.so.1."""
    return _compile(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(monkeypatch, fake):
    """``machine(FAKE_GPUS="3", ...)``: be on a machine with those GPUs, and return its devices."""

    def be(library=fake, **variables):
        monkeypatch.setattr(nvml, "LIBRARY", library)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        _forget()
        return TARGET.devices()

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    yield be
    _forget()


def _forget():
    for remembered in (device._system, device._visible_here, device.devices):
        remembered.cache_clear()


def test_a_model_of_the_registry_has_its_facts(machine):
    h200, _ = machine()
    known = TARGET.models["h200"]
    assert (h200.arch, h200.model, h200.index, h200.driver) == ("cuda:sm_90a", "NVIDIA H200", 0, 580)
    assert (h200.cores, h200.shared_memory, h200.l2) == (known.cores, known.shared_memory, known.l2)
    assert h200.bandwidth == known.bandwidth


def test_a_model_that_nobody_knows_has_what_nvml_says(machine):
    _, other, turing = machine(FAKE_GPUS="4")
    assert (turing.arch, turing.index, turing.cores) == ("cuda:sm_75", 3, 72)
    assert (other.arch, other.model, other.index) == ("cuda:sm_86", "NVIDIA Unheard Of", 1)
    assert (other.cores, other.bandwidth) == (46, 448.064e9)
    assert (other.shared_memory, other.l2) == (TARGET.facts("cuda:sm_86").shared_memory, 6 << 20)


def test_a_device_runs_its_own_arch_and_native_is_the_first(machine):
    for facts in machine(FAKE_GPUS="5"):
        assert TARGET.runs(facts.arch, facts) is None
    assert TARGET.canonical("native") == "sm_90a"
    machine(CUDA_VISIBLE_DEVICES="1")
    assert TARGET.canonical("native") == "sm_86"


def test_what_has_no_exact_arch_takes_ptx_and_what_is_too_old_is_left_out_with_the_reason(machine):
    found = machine(FAKE_GPUS="5")
    assert [(f.index, f.arch) for f in found if f.index > 1] == [(3, "cuda:sm_75"), (4, "cuda:compute_80")]
    assert found[3].shared_memory == 101376 and found[2].bandwidth > 0  # NVML tells none of a GB10
    assert "Tesla V100-SXM2-16GB is sm_70" in TARGET.absent() and "a CUDA 12 toolkit is needed" in TARGET.absent()


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ("1", ["NVIDIA Unheard Of"]),
        ("1,0", ["NVIDIA Unheard Of", "NVIDIA H200"]),
        (" 1 , 0 ", ["NVIDIA Unheard Of", "NVIDIA H200"]),
        ("0,7,1", ["NVIDIA H200"]),
        ("7,0", []),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
        ("0,0", []),
        (_OTHER, ["NVIDIA Unheard Of"]),
        ("GPU-aa3,GPU-aa1", ["NVIDIA Unheard Of", "NVIDIA H200"]),
        ("GPU-aa", []),
        (f"{_H200},nonsense,{_OTHER}", ["NVIDIA H200"]),
        ("MIG-aa11-22", []),
    ],
)
def test_cuda_visible_devices(machine, text, models):
    found = machine(CUDA_VISIBLE_DEVICES=text)
    assert [f.model for f in found] == models
    assert [f.index for f in found] == list(range(len(models)))
    if len(models) < 2:
        assert TARGET.absent() == f"CUDA_VISIBLE_DEVICES={text!r} shows {len(models)} of 2 GPUs"
    else:
        assert TARGET.absent() is None


@pytest.mark.light
def test_visible_without_the_variable_is_everything():
    assert device.visible(None, ["a", "b"]) == (0, 1) and device.visible(None, []) == ()


def test_a_gpu_that_may_not_be_used_is_not_counted(machine):
    assert [(f.index, f.model) for f in machine(FAKE_LOST="0")] == [(0, "NVIDIA Unheard Of")]


@pytest.mark.parametrize(
    ("function", "count", "said"),
    [
        ("nvmlInit_v2", 0, "NVML does not start: nvmlInit_v2: Not Supported"),
        ("nvmlDeviceGetCount_v2", 0, "NVML lists no GPU: nvmlDeviceGetCount_v2: Not Supported"),
        ("nvmlDeviceGetHandleByIndex_v2", 0, "the NVIDIA driver lists no GPU"),
        ("nvmlDeviceGetCudaComputeCapability", 0, "the NVIDIA driver lists no GPU"),
        ("nvmlSystemGetDriverVersion", 2, None),
        ("nvmlSystemGetCudaDriverVersion_v2", 2, None),
        ("nvmlDeviceGetName", 2, None),
        ("nvmlDeviceGetUUID", 2, None),
        ("nvmlDeviceGetMemoryBusWidth", 2, None),
        ("nvmlDeviceGetMaxClockInfo", 2, None),
        ("nvmlDeviceGetNumGpuCores", 2, None),
    ],
)
def test_a_call_that_fails_costs_what_it_tells_and_no_more(machine, fake, function, count, said):
    found = machine(FAKE_FAIL=function)
    assert len(found) == count and TARGET.absent() == said
    for facts in found:
        assert facts.cores > 1 and facts.bandwidth > 1e11 and facts.model
        assert facts.driver == (0 if function == "nvmlSystemGetDriverVersion" else 580)
    assert ctypes.CDLL(fake).fake_started() == 0  # and NVML is left as it was


def test_a_library_too_old_for_a_call_is_of_use(machine, tmp_path):
    _, other = machine(library=_compile(tmp_path, "-DOLD"))
    assert other.model == "NVIDIA Unheard Of" and other.cores == TARGET.facts("cuda:sm_86").cores


@pytest.mark.parametrize(("version", "major"), [("550.163.01", 550), ("580", 580), ("", 0), ("N/A", 0)])
def test_driver_versions(machine, version, major):
    assert {f.driver for f in machine(FAKE_DRIVER=version)} == {major}


def test_no_driver_is_no_device_and_no_noise(machine, capfd):
    assert machine(library="libnvidia-ml.so.none") == ()
    assert TARGET.absent().startswith("no NVIDIA driver: libnvidia-ml.so.none")
    assert TARGET.canonical("native") is None and "no NVIDIA driver" in TARGET.unsupported("native")
    assert capfd.readouterr() == ("", "")


def test_the_doctor_tells_of_driver_and_compiler(machine, monkeypatch):
    from tlhub.cli import doctor
    from tlhub_cuda import nvcc

    def none():
        raise BuildError("no nvcc; looked for it in PATH", hint="pip install it")

    compiler = SimpleNamespace(version="13.0.88", command="/opt/nvcc", release=(13, 0))
    monkeypatch.setattr(nvcc, "find", lambda: compiler)
    monkeypatch.setattr(nvcc, "_candidates", lambda: iter([("nvcc in PATH", "/opt/nvcc")]))
    monkeypatch.setattr(nvcc, "_version", lambda command: "13.0.88")
    machine(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="0,1")
    found = {c.name: c for c in doctor._devices()}
    assert found["target cuda"].detail.startswith("cuda:0 NVIDIA H200 (cuda:sm_90a, 132 cores), cuda:1 NVIDIA Unheard")
    assert (found["cuda driver"].state, found["cuda driver"].detail) == ("ok", "580.65.06")
    assert (found["nvcc"].state, found["nvcc"].detail) == ("ok", "13.0.88 (/opt/nvcc)")

    machine(FAKE_CUDA="12080")
    found = {c.name: c for c in doctor._devices()}
    assert (found["nvcc"].state, found["nvcc"].hint) == ("warning", "update the driver to 580 or later")
    assert found["nvcc"].detail == "13.0.88 (/opt/nvcc): the driver runs code of CUDA 12 and older"
    here = {"/opt/nvcc": "13.0.88", "/opt/cuda 12/bin/nvcc": "12.8.93"}
    monkeypatch.setattr(nvcc, "_candidates", lambda: ((command, command) for command in here))
    monkeypatch.setattr(nvcc, "_version", here.get)
    found = {c.name: c for c in doctor._devices()}
    assert found["nvcc"].hint == "export CUDA_HOME='/opt/cuda 12'"

    monkeypatch.setattr(nvcc, "find", none)
    machine(CUDA_DEVICE_ORDER="", CUDA_VISIBLE_DEVICES="0,1")
    found = {c.name: c for c in doctor._devices()}
    assert (found["cuda driver"].state, found["cuda driver"].hint) == ("warning", "export CUDA_DEVICE_ORDER=PCI_BUS_ID")
    assert (found["nvcc"].state, found["nvcc"].hint) == ("warning", "pip install it")
    assert found["nvcc"].detail == "no nvcc; looked for it in PATH: nothing can be built for cuda"

    machine(library="libnvidia-ml.so.none")
    found = {c.name: c for c in doctor._devices()}
    assert found["target cuda"].state == "ok" and "no NVIDIA driver" in found["target cuda"].detail
    assert "cuda driver" not in found


def test_an_entry_that_needs_more_shared_memory_than_the_device_has_is_refused(machine, cold_cache):
    """PTX that fits an H200, which has more than every device that it is for, and not a smaller one."""
    machine()
    where = {"arch": "cuda:compute_80", "schedule": "simt"}
    problem = ("gemm", (64, 64, 64), "float16")
    told, host = tlhub.explain(*problem, **where), this_host()
    (candidate,) = told.resolution.candidates
    manifest = Manifest.make(
        told.problem,
        told.place.arch,
        schedule=candidate.schedule.name,
        schedule_revision=candidate.schedule.revision,
        source_digest=sources.digest(candidate.schedule),
        config=candidate.config,
        toolchain={},
        abi=ABI,
        platform={"os": host.os, "machine": host.machine, "glibc": ""},
        resources={"shared_memory": 163 << 10},
    )
    with user_store().stage() as staged:
        Path(staged.path, "kernel.so").write_bytes(b"")
        user_store().publish(staged, manifest)
    large, small = (tlhub.explain(*problem, device=f"cuda:{i}", **where) for i in (0, 1))
    assert large.place.facts.shared_memory == small.place.facts.shared_memory == 99 << 10
    assert large.hit is not None and small.hit is None
    assert "it needs 166912 bytes of shared memory a block, the device has 101376" in str(small)


# -- in processes of their own, as the dynamic loader finds the library ----------------------------


def _environment(fake: str, **more: str) -> dict[str, str]:
    left_out = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "LD_LIBRARY_PATH": os.path.dirname(fake), **more}


def _tlhub(fake: str, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tlhub", *args]
    return subprocess.run(command, env=_environment(fake, **more), capture_output=True, text=True)


def test_targets_lists_the_gpus(fake):
    found = next(t for t in json.loads(_tlhub(fake, "targets", "--json").stdout) if t["name"] == "cuda")
    assert [(d["device"], d["model"], d["driver"]) for d in found["devices"]] == [
        ("cuda:0", "NVIDIA H200", 580),
        ("cuda:1", "NVIDIA Unheard Of", 580),
    ]
    assert found["native"] == "sm_90a" and "h200" in found["models"]


def test_explain_takes_the_first_gpu_or_the_one_that_is_named(fake):
    problem = ("explain", "gemm", "64,64,64", "--dtype", "float16")
    assert "on cuda:sm_90a (device cuda:0: NVIDIA H200)" in _tlhub(fake, *problem).stdout
    assert "on cuda:sm_86 (device cuda:1: NVIDIA Unheard Of)" in _tlhub(fake, *problem, "--device", "cuda:1").stdout
    assert "on cuda:sm_86 (device cuda:1:" in _tlhub(fake, *problem, "--arch", "cuda:sm_86").stdout
    assert "on cpu:" in _tlhub(fake, *problem, CUDA_VISIBLE_DEVICES="").stdout
    old = _tlhub(fake, *problem, "--device", "cuda:2", FAKE_GPUS="3")
    assert "there are: cuda:0 (NVIDIA H200), cuda:1 (NVIDIA Unheard Of) (Tesla V100-SXM2-16GB is sm_70: " in old.stderr
    assert "a CUDA 12 toolkit is needed" in old.stderr
    hidden = _tlhub(fake, *problem, "--device", "cuda:0", CUDA_VISIBLE_DEVICES="")
    assert hidden.returncode == 1 and "CUDA_VISIBLE_DEVICES='' shows 0 of 2 GPUs" in hidden.stderr


_FORK = """
import os, sys
import tlhub
from tlhub_cuda import TARGET
here = TARGET.devices()
child = os.fork()
if not child:
    same = TARGET.devices() == here and tlhub.explain("gemm", (64, 64, 64), "float16").place.device == "cuda:0"
    os._exit(0 if same else 1)
print(len(here), os.waitpid(child, 0)[1], [m for m in ("torch", "tvm_ffi", "cupy", "numpy") if m in sys.modules])
"""


def test_a_fork_after_listing_works_and_no_array_library_is_imported(fake):
    done = subprocess.run([sys.executable, "-c", _FORK], env=_environment(fake), capture_output=True, text=True)
    assert done.stdout.strip() == "2 0 []", done.stderr
