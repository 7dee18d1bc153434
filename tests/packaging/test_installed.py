"""What an installation gives: a light import, the built-ins, their data. Against a checkout and against the wheel."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata, resources

import pytest

import tlhub

pytestmark = pytest.mark.light


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light() -> None:
    heavy = {
        "numpy",
        "tvm_ffi",
        "tvm",
        "tilelang",
        "torch",
        "jax",
        "click",
        "rich",
        "filelock",
        "platformdirs",
        "ml_dtypes",
    }
    assert python(f"import sys, tlhub; print(sorted({heavy!r} & set(sys.modules)))") == "[]\n"


def test_import_starts_and_prints_nothing() -> None:
    code = "import threading, tlhub; tlhub.__all__; print(threading.active_count())"
    assert python(code) == "1\n"


def test_public_names_exist() -> None:
    code = "import tlhub; print(all(callable(getattr(tlhub, n)) for n in tlhub.__all__), sorted(tlhub.__all__))"
    assert python(code) == "True ['explain', 'freeze', 'get', 'get_for', 'record', 'set_num_threads']\n"


def test_version_is_the_distribution_s() -> None:
    assert metadata.version("tlhub-core") == tlhub.__version__


def test_built_ins_come_by_entry_points() -> None:
    points = {p.name: p.value for p in metadata.entry_points(group="tlhub") if p.dist and p.dist.name == "tlhub-core"}
    assert points == {n: f"tlhub_{n}" for n in ("cpu", "cuda", "gemm", "attention", "mixed")}


def test_sources_that_are_no_python_are_there() -> None:
    names = {p.name for p in resources.files("tlhub.build").iterdir()}
    assert "cpu_pool.c" in names
    assert any(name.startswith("host_shim") for name in names)


def test_base_requirements_are_light() -> None:
    base = {r.split(";")[0].strip() for r in metadata.requires("tlhub-core") or () if "extra ==" not in r}
    names = {"".join(c for c in r if c.isalnum() or c in "-_").rstrip("0123456789") for r in base}
    assert not {n for n in names if n in ("apache-tvm", "tilelang", "torch", "jax", "ziglang", "pytest")}
