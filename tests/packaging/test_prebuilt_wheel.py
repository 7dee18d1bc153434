"""The wheels of tlhub-core and of CPU kernels in a fresh environment: no compiler, no extra, the README's example."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).resolve().parents[2]

EXAMPLES = """
[[problem]]
kernel = "gemm"
shape = ["M", "N", "K"]
dtype = "float32"
options = [{}, { trans_b = true }]

[[problem]]
kernel = "attention"
shape = ["B", "S", "H", "D"]
dtype = "float32"
options = { causal = true }
"""


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel of what the README's examples need, each entry signed, and the public key."""
    folder = tmp_path_factory.mktemp("prebuilt")
    (folder / "examples.toml").write_text(EXAMPLES, "utf-8")
    environ = {**os.environ, "TLHUB_CACHE_DIR": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "config")}

    def tlhub(*arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("tlhub")), *arguments]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    tlhub("cache", "prewarm", "--from", "examples.toml")
    key = Path(tlhub("trust", "keygen", "release").strip())
    tlhub("trust", "sign", "--key", "release")
    made = json.loads(tlhub("package", "build", "--from", "examples.toml", "--json"))
    assert made["entries"] and all(len(entry["signed_by"]) == 1 for entry in made["entries"])
    return folder / made["wheel"], key


@pytest.fixture(params=["of the examples", pytest.param("make prebuilt", marks=pytest.mark.slow)])
def prebuilt(request: pytest.FixtureRequest) -> Path:
    """The wheel of CPU kernels: what the README's examples need, or what `make prebuilt` made."""
    if request.param == "make prebuilt":
        (made,) = (ROOT / "build" / "prebuilt").glob("tlhub_prebuilt_cpu-*.whl")
        return made
    return request.getfixturevalue("signed")[0]


def install(place: Path, wheel: Path, extra: str = "") -> Path:
    """Have pip install tlhub-core, with *extra*, and *wheel* into a new environment; return that."""
    venv = place / "venv"
    (core,) = (ROOT / "build" / "wheels").glob("tlhub_core-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", "--python", str(venv / "bin" / "python")]
    subprocess.run([*pip, "install", "--no-compile", f"{core}{extra}", str(wheel)], check=True)
    return venv


def run_in(venv: Path, program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, which finds no other."""
    place = venv.parent
    environ = {"PATH": str(venv / "bin"), "HOME": str(place), "TLHUB_CACHE_DIR": str(place / "cache"), **more}
    command = [str(venv / "bin" / program), *arguments]
    return subprocess.run(
        command, cwd=place, env={"TLHUB_DEVICE": "cpu", **environ}, capture_output=True, text=True, check=False
    )


def test_the_readme_runs_where_nothing_compiles(prebuilt: Path, tmp_path: Path) -> None:
    venv = install(tmp_path, prebuilt)
    before = sorted(str(path) for path in venv.rglob("*") if "__pycache__" not in path.parts)

    def run(program: str, *arguments: str) -> str:
        done = run_in(venv, program, *arguments)
        assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
        return done.stdout

    code = "import importlib.util as u; print(*map(u.find_spec, ('tvm', 'ziglang', 'hatchling')))"
    assert run("python", "-c", code) == "None None None\n"
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    said = run("python", "-c", "\n".join(blocks))
    assert re.search(r"^prebuilt cpu_blocked cpu:", said, re.MULTILINE), said
    assert "served from tlhub-prebuilt-" in said
    assert not list((tmp_path / "cache").rglob("kernel.so")), "nothing is built"
    (plugin,) = [p for p in json.loads(run("tlhub", "plugins", "--json")) if p["stores"]]
    assert plugin["status"] == "ok" and plugin["distribution"].startswith("tlhub-prebuilt-")
    after = sorted(str(path) for path in venv.rglob("*") if "__pycache__" not in path.parts)
    assert after == before, "what is installed is not written to"


def test_what_is_signed_serves_where_that_is_required(signed: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, key = signed
    venv = install(tmp_path, wheel, "[trust]")
    policy = {"TLHUB_SIGNED": "require"}

    def get() -> subprocess.CompletedProcess[str]:
        return run_in(venv, "tlhub", "get", "gemm", "8,8,8", "--dtype", "float32", "--json", **policy)

    refused = run_in(venv, "tlhub", "explain", "gemm", "8,8,8", "--dtype", "float32", **policy)
    assert get().returncode == 1 and "nobody whom you trust signed it" in refused.stdout
    assert run_in(venv, "tlhub", "trust", "add", "release", str(key)).returncode == 0
    served = get()
    assert served.returncode == 0 and json.loads(served.stdout)["origin"] == "prebuilt", served.stderr
    library = Path(json.loads(served.stdout)["entry"], "kernel.so")
    library.write_bytes(library.read_bytes()[:-1] + b"!")
    assert get().returncode == 1, "a signature is of these bytes"
