"""`tlhub plugin new`: the template under another name, whole, and over nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tlhub import scaffold
from tlhub.errors import ArgumentError

pytestmark = pytest.mark.light


@pytest.mark.parametrize(("name", "identifier"), [("norms", "norms"), ("my-norms2", "my_norms2"), ("xyzzy", "xyzzy")])
def test_project_carries_the_name_everywhere(tmp_path: Path, name: str, identifier: str) -> None:
    project = scaffold.write(name, tmp_path)
    assert project == tmp_path / f"tlhub-plugin-{name}"
    assert sorted(p.name for p in project.iterdir()) == sorted(
        ["README.md", "pyproject.toml", f"test_{identifier}.py", f"tlhub_plugin_{identifier}.py"]
    )
    text = "".join(p.read_text("utf-8") for p in project.iterdir())
    assert f'name = "tlhub-plugin-{name}"\n' in text
    assert f'{identifier} = "tlhub_plugin_{identifier}"\n' in text
    assert f'tlhub.get("{identifier}_rms_norm"' in text
    assert "xyz" not in text.replace(name, "").replace(identifier, "")


def test_plugin_loads_and_declares_its_kernel(tmp_path: Path) -> None:
    project = scaffold.write("my-norms", tmp_path)
    info = project / "tlhub_plugin_my_norms-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tlhub-plugin-my-norms\nVersion: 0.1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[tlhub]\nmy_norms = tlhub_plugin_my_norms\n", "utf-8")
    code = (
        f"import sys; sys.path.insert(0, {str(project)!r}); from tlhub import catalog; found = catalog.load();"
        "plugin = next(p for p in found.plugins if p.name == 'my_norms');"
        "print(plugin.status, found.kernel('my_norms_rms_norm').name, found.schedules['my_norms_rms_norm'][0].program)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "ok my_norms_rms_norm tlhub_plugin_my_norms:rows\n"


@pytest.mark.parametrize("name", ["", "My Norm", "9a", "a--b", "a-", "-a", "a_b", "../a", "a/b", "a\nb", "norme\u0301"])
def test_bad_name_is_refused_with_one_that_works(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        scaffold.write(name, tmp_path)
    assert repr(name) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    better = (caught.value.hint or "").removeprefix("tlhub plugin new ")
    assert scaffold.write(better, tmp_path).is_dir()


def test_prefix_is_not_doubled(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="hint: tlhub plugin new norms$"):
        scaffold.write("tlhub-plugin-norms", tmp_path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    project = scaffold.write("norms", tmp_path)
    (project / "README.md").write_text("mine", "utf-8")
    with pytest.raises(ArgumentError, match="is there already"):
        scaffold.write("norms", tmp_path)
    assert (project / "README.md").read_text("utf-8") == "mine"


def test_template_is_small() -> None:
    """Under 45 lines besides the kernel's body, which is the function that a worker calls."""
    import ast

    template = scaffold._template()
    source = (template / "tlhub_plugin_xyz.py").read_text("utf-8")
    (body,) = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "rows"]
    others = source.splitlines()[: body.lineno - 1] + source.splitlines()[body.end_lineno :]
    assert len([line for line in others if line.strip()]) < 45
