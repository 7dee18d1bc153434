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


@pytest.fixture(scope="module", params=["of the examples", pytest.param("make prebuilt", marks=pytest.mark.slow)])
def prebuilt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of CPU kernels: what the README's examples need, or what `make prebuilt` made."""
    if request.param == "make prebuilt":
        (made,) = (ROOT / "build" / "prebuilt").glob("tlhub_prebuilt_cpu-*.whl")
        return made
    folder = tmp_path_factory.mktemp("prebuilt")
    (folder / "examples.toml").write_text(EXAMPLES, "utf-8")
    command = [str(Path(sys.executable).with_name("tlhub")), "package", "build", "--from", "examples.toml", "--json"]
    environ = {**os.environ, "TLHUB_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / json.loads(done.stdout)["wheel"]


def test_the_readme_runs_where_nothing_compiles(prebuilt: Path, tmp_path: Path) -> None:
    venv, cache = tmp_path / "venv", tmp_path / "cache"
    (core,) = (ROOT / "build" / "wheels").glob("tlhub_core-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", "--python", str(venv / "bin" / "python")]
    subprocess.run([*pip, "install", str(core), str(prebuilt)], check=True)
    before = sorted(str(path) for path in venv.rglob("*") if "__pycache__" not in path.parts)

    def run(program: str, *arguments: str) -> str:
        environ = {
            "PATH": str(venv / "bin"),
            "HOME": str(tmp_path),
            "TLHUB_CACHE_DIR": str(cache),
            "TLHUB_DEVICE": "cpu",
        }
        command = [str(venv / "bin" / program), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
        return done.stdout

    code = "import importlib.util as u; print(*map(u.find_spec, ('tvm', 'ziglang', 'hatchling')))"
    assert run("python", "-c", code) == "None None None\n"
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    said = run("python", "-c", "\n".join(blocks))
    assert re.search(r"^prebuilt cpu_blocked cpu:", said, re.MULTILINE), said
    assert "served from tlhub-prebuilt-" in said and not list(cache.rglob("kernel.so")), "nothing is built"
    (plugin,) = [p for p in json.loads(run("tlhub", "plugins", "--json")) if p["stores"]]
    assert plugin["status"] == "ok" and plugin["distribution"].startswith("tlhub-prebuilt-")
    after = sorted(str(path) for path in venv.rglob("*") if "__pycache__" not in path.parts)
    assert after == before, "what is installed is not written to"
