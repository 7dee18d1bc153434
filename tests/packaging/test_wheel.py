"""The built wheels, in the environment where they are installed: run by `make test`, which builds them."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "wheels"


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def tlhub(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("tlhub")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def wheel(distribution: str) -> Path:
    (found,) = WHEELS.glob(f"{distribution}-*.whl")
    return found


def test_this_is_the_wheel() -> None:
    import tlhub

    assert Path(sys.prefix) in Path(tlhub.__file__).parents


def test_wheel_holds_every_file_of_the_packages() -> None:
    names = set(zipfile.ZipFile(wheel("tlhub_core")).namelist())
    folders = [ROOT / "tlhub", *(ROOT / "plugins").glob("tlhub_*"), ROOT / "registry" / "tlhub_registry"]
    expected = {str(f.relative_to(p.parent)) for p in folders for f in p.rglob("*") if f.is_file()}
    expected |= {f"tlhub/template/{f.name}" for f in (ROOT / "plugins" / "template").iterdir() if f.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    assert len(expected) > 40
    assert names >= expected, sorted(expected - names)
    assert {n for n in names if ".dist-info/" not in n} == expected, "the wheel holds what it should not"


def test_metadata() -> None:
    archive = zipfile.ZipFile(wheel("tlhub_core"))
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    text = archive.read(name).decode()
    assert "\nRequires-Python: >=3.10\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    extras = {line.partition(": ")[2] for line in text.splitlines() if line.startswith("Provides-Extra: ")}
    assert extras == {"tvm", "tilelang", "cuda", "cc", "nvcc", "archive", "package", "trust", "oci", "testing", "all"}


# -- the template's wheel beside it ----------------------------------------------------------------


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    """The template's wheel, installed while the tests that ask for it run; returns a folder with its tests alone."""
    pip("install", "--force-reinstall", "--no-deps", str(wheel("tlhub_plugin_xyz")))
    yield ROOT / "plugins" / "template"
    pip("uninstall", "--yes", "tlhub-plugin-xyz")


def test_kernel_of_a_known_plugin_is_unknown_until_installed() -> None:
    pip("uninstall", "--yes", "tlhub-plugin-xyz")
    done = tlhub("get", "xyz_rms_norm", "4,512", "--dtype", "float32")
    assert done.returncode == 2 and done.stdout == ""
    assert "unknown kernel 'xyz_rms_norm': the plugin tlhub-plugin-xyz has it and is not installed" in done.stderr
    assert "hint: pip install ./plugins/template" in done.stderr


def test_installed_plugin_is_listed(installed: Path) -> None:
    done = tlhub("plugins", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    listed = document["plugins"] if isinstance(document, dict) else document
    (plugin,) = [p for p in listed if p["distribution"] == "tlhub-plugin-xyz"]
    assert (plugin["status"], plugin["editable"], plugin["kernels"]) == ("ok", False, ["xyz_rms_norm"])


def test_installed_plugin_is_served(installed: Path) -> None:
    command = ("get", "xyz_rms_norm", "4,512", "--dtype", "float32", "--json")
    first, second = tlhub(*command), tlhub(*command)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    built, cached = json.loads(first.stdout), json.loads(second.stdout)
    assert (built["origin"], cached["origin"]) == ("built", "cache")
    assert built["key"] == cached["key"]
    assert built["schedule"] == "rows"


def test_its_own_tests_pass_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_xyz.py").write_text((installed / "test_xyz.py").read_text("utf-8"), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
