"""nvcc: the rule that finds it, what it says when there is none, and what is read from what it prints."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shlex
import sys
import sysconfig
from pathlib import Path

import pytest

from tlhub.errors import BuildError
from tlhub_cuda import nvcc
from tlhub_cuda.nvcc import Nvcc, Usage


def tool(folder: Path, version="13.0.88", name="nvcc", body=None) -> Path:
    """Write a stand-in that tells a version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    line = f"Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}"
    path.write_text(f"#!{sys.executable}\n{body or f'print({line!r})'}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with no CUDA: the folder of PATH, and one for pip's packages."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None)
    return tmp_path


def test_the_order_in_which_it_is_looked_for(bare, monkeypatch):
    places = [bare / "nvidia" / "cu13" / "bin", bare / "bin", bare / "path" / "bin", bare / "home" / "bin"]
    for i, place in enumerate(places):
        monkeypatch.setenv("CUDA_PATH", str(bare / "path"))
        monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
        command = tool(place, f"13.{i}.7")
        assert nvcc.find() == Nvcc(str(command), f"13.{i}.7") and nvcc.find().release == (13, i)


def test_no_nvcc(bare, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(bare / "gone"))
    monkeypatch.setenv("CUDA_PATH", "")
    tool(bare / "bin", body="raise SystemExit(1)")
    with pytest.raises(BuildError) as caught:
        nvcc.find()
    assert caught.value.message == (
        f"no nvcc; looked for {bare}/gone/bin/nvcc of $CUDA_HOME (not found), $CUDA_PATH/bin/nvcc (not found), "
        "nvcc in PATH (does not run), the pip package nvidia-cuda-nvcc (not found)"
    )
    assert caught.value.hint == 'pip install "tlhub-core[nvcc]"'


def test_a_host_compiler_is_needed(bare, monkeypatch):
    found = Nvcc(str(tool(bare / "cuda", body="import sys; print(sys.argv[1:])")), "13.0.88")
    with pytest.raises(
        BuildError, match="nvcc needs a host compiler; looked in PATH for gcc, clang and cc\n"
    ) as caught:
        found.run(str(bare), ["-cubin"])
    assert caught.value.hint == "install gcc, or name another in NVCC_CCBIN"
    tool(bare / "bin", name="clang")
    assert found.run(str(bare), ["-cubin"]).strip() == "['-ccbin', 'clang', '-cubin']"
    monkeypatch.setenv("NVCC_CCBIN", "/opt/gcc 14/bin/gcc")
    assert "'/opt/gcc 14/bin/gcc'" in found.run(str(bare), ["-cubin"])


def test_what_it_printed_is_told(bare):
    tool(bare / "bin", name="gcc")
    found = Nvcc(str(tool(bare / "cuda", body="print('a.cu(3): error: no'); raise SystemExit(2)")), "13.0.88")
    with pytest.raises(BuildError, match=r"nvcc 13.0.88 failed:\na.cu\(3\): error: no"):
        found.run(str(bare), [])
    with pytest.raises(BuildError, match="the compiler '/gone/nvcc' does not run"):
        Nvcc("/gone/nvcc", "13.0.88").run(str(bare), [])


@pytest.mark.parametrize(
    ("version", "arch", "least"),
    [("12.4.131", "sm_100a", "12.8"), ("11.7.1", "sm_90a", "12.0"), ("12.4.1", "sm_90a", None)],
)
def test_too_old_for_an_arch(bare, version, arch, least):
    found = Nvcc("nvcc", version)
    if least is None:
        return found.serve(arch)
    with pytest.raises(BuildError, match=f"nvcc {version} does not know {arch}; CUDA {least} and later do\nhint: pip"):
        found.serve(arch)


def follow(hint, monkeypatch):
    """Do what a hint says of the environment; return what else it says to do."""
    before, _, home = hint.rpartition("export CUDA_HOME=")
    (path,) = shlex.split(home)
    monkeypatch.setenv("CUDA_HOME", path)
    return before


@pytest.mark.parametrize(("old", "new"), [("home", "a path"), ("home", "nvidia/cu13"), ("a path", "nvidia/cu13")])
def test_the_hint_takes_the_one_that_will_do(bare, monkeypatch, old, new):
    monkeypatch.setenv("PATH", str(bare / "a path" / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    tool(bare / old / "bin", "12.4.131")
    command = tool(bare / new / "bin", "12.8.93")
    with pytest.raises(BuildError) as caught:
        nvcc.find().serve("sm_120a")
    assert follow(caught.value.hint, monkeypatch) == ""
    assert nvcc.find() == Nvcc(str(command), "12.8.93")
    nvcc.find().serve("sm_120a")


def test_the_hint_where_none_will_do(bare, monkeypatch):
    """What pip installs comes after the one that is too old: it must be named."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(bare / name))
    tool(bare / "bin", "12.4.131")
    with pytest.raises(BuildError) as caught:
        nvcc.find().serve("sm_120a")
    assert follow(caught.value.hint, monkeypatch) == 'pip install "tlhub-core[nvcc]" && '
    tool(bare / "purelib" / "nvidia" / "cu13" / "bin", "13.0.88")
    nvcc.find().serve("sm_120a")


@pytest.mark.parametrize(
    ("release", "arch", "driver"),
    [
        ((13, 0), "sm_90a", 580),
        ((13, 5), "sm_75", 580),
        ((12, 9), "sm_80", 525),
        ((12, 9), "sm_100a", 570),
        ((13, 0), "sm_120a", 580),
        ((12, 4), "compute_80", 550),
        ((12, 7), "compute_80", 570),
        ((13, 0), "compute_80", 580),
        ((13, 2), "compute_80", 595),
        ((11, 8), "sm_80", 525),
        ((11, 8), "sm_89", 525),
        ((11, 4), "compute_80", 525),
    ],
)
def test_the_least_driver(release, arch, driver):
    assert nvcc.least_driver(release, arch) == driver


def test_ptx_for_drivers_that_are_not_known(bare, monkeypatch):
    major, minor = max(nvcc._DRIVERS)
    with pytest.raises(BuildError) as caught:
        nvcc.least_driver((major, minor + 1), "compute_80")
    assert caught.value.message == (
        f"nvcc {major}.{minor + 1} writes PTX for drivers that tlhub does not know; it knows those up to "
        f"CUDA {major}.{minor}"
    )
    assert f'pip install "tlhub-core[nvcc]" "nvidia-cuda-nvcc<{major}.{minor + 1}" && ' in caught.value.hint
    tool(bare / "bin", f"{major}.{minor}.1")
    with pytest.raises(BuildError) as caught:
        nvcc.least_driver((major + 1, 0), "compute_80")
    assert caught.value.hint == f"export CUDA_HOME={bare}"


SAID = """\
program.cu(4): warning #177-D: variable "unused" was declared but never referenced
    int unused;
        ^

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

ptxas info    : 0 bytes gmem, 16 bytes cmem[4]
ptxas info    : Compiling entry function 'large' for 'sm_90a'
ptxas info    : Function properties for large
    144 bytes stack frame, 132 bytes spill stores, 228 bytes spill loads
ptxas info    : Used 255 registers, used 9 barriers, 144 bytes cumulative stack size, 1024 bytes smem, 540 bytes cmem[0]
ptxas info    : Compile time = 2.838 ms
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Compiling entry function 'small$1' for 'sm_90a'
ptxas info    : Function properties for small$1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers
ptxas warning : Value of threads per SM for entry large is out of range. .minnctapersm will be ignored
ptxas warning : Value of threads per SM for entry large is out of range. .minnctapersm will be ignored
"""


def test_what_ptxas_says_of_each_kernel():
    assert nvcc.usage(SAID) == {"large": Usage(255, 360, 1024), "small$1": Usage(10, 0, 0)}
    assert nvcc.usage("") == {}


def test_warnings_once_each():
    first, slow, third = nvcc.warnings(SAID)
    assert first.startswith("program.cu(4): warning #177-D")
    assert "(C7510) Potential" in slow and third.startswith("ptxas warning : Value of threads")


def test_the_rule_finds_this_machines():
    """Here there is one, or the error says where it was looked for."""
    try:
        found = nvcc.find()
    except BuildError as error:
        assert error.hint
        return
    assert os.access(found.command, os.X_OK) and found.release >= (11, 0)
