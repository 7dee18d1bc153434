"""The documents are true: their examples run, their tables are the code's, their links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return path.name


def blocks(path: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(path.read_text("utf-8")) if kind == language]


def commands(path: Path) -> list[str]:
    """Return the lines that begin with ``tlhub`` of the shell blocks, comments cut off."""
    lines = [line.partition(" #")[0].strip() for text in blocks(path, "sh") for line in text.splitlines()]
    assert all(line.startswith("tlhub ") for line in lines if line), lines
    return [line for line in lines if line]


def table(path: Path, header: str) -> list[list[str]]:
    """Return the rows, as lists of cells, of the table whose first header cell is *header*."""
    lines = path.read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


WITH_PYTHON = [path for path in DOCUMENTS if blocks(path, "python")]
COMMANDS = {line: path for path in reversed(DOCUMENTS) for line in commands(path)}


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name)
def test_python_runs_when_pasted(path: Path, tmp_path: Path) -> None:
    """All blocks of a document, in order, in one fresh process."""
    text = "\n".join(blocks(path, "python"))
    if "import torch" in text:
        pytest.importorskip("torch")
    else:  # tvm-ffi would import it, which takes seconds
        text = f"import sys\nsys.modules['torch'] = None\n{text}"
    script = tmp_path / "pasted.py"
    script.write_text(text, "utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the workload of docs/cli.md in it."""
    made = tmp_path_factory.mktemp("documents")
    for text in blocks(ROOT / "docs" / "cli.md", "toml"):
        file, _, rest = text.removeprefix("# ").partition("\n")
        (made / file).write_text(rest, "utf-8")
    return made


@pytest.mark.parametrize("line", COMMANDS, ids=[f"{p.name}: {line}" for line, p in COMMANDS.items()])
def test_command_runs(line: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "cache clear" in line or "cache prune" in line:
        monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / "cache"))  # other tests use the shared one
    if "plugin new" in line:
        folder = tmp_path
    if "cache export" in line or "cache import" in line:  # of what the commands before them made
        run("tlhub cache prewarm --from workload.toml", folder)
        run("tlhub cache export kernels.tar.zst", folder)
    run(line, folder)


def run(line: str, folder: Path) -> None:
    code = "from tlhub.cli import main; main()"
    words = shlex.split(line)[1:]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_and_option_is_documented() -> None:
    import click

    from tlhub.cli import cli

    text = (ROOT / "docs" / "cli.md").read_text("utf-8")

    def missing(command: click.Command, words: tuple[str, ...]) -> list[str]:
        if isinstance(command, click.Group):
            context = click.Context(command)
            found = [(n, command.get_command(context, n)) for n in command.list_commands(context)]
            return [m for n, c in found if c for m in missing(c, (*words, n))]
        absent = [] if re.search(rf"\b{' '.join(words)}\b", text) else [" ".join(words)]
        options = [o for p in command.params if isinstance(p, click.Option) for o in p.opts if o.startswith("--")]
        return absent + [f"{' '.join(words)} {o}" for o in options if o != "--help" and o not in text]

    assert missing(cli, ()) == []


def test_environment_variables_are_the_ones_that_are_read() -> None:
    documented = [row[0].strip("`") for row in table(ROOT / "README.md", "variable")]
    sources = [*(ROOT / "tlhub").rglob("*.py"), *(ROOT / "plugins").glob("tlhub_*/*.py")]
    read = {n for p in sources for n in re.findall(r'environ(?:\.get\(|\[)\s*"(TLHUB_\w+)"', p.read_text("utf-8"))}
    assert read <= set(documented)
    from tlhub.cli.doctor import VARIABLES

    assert sorted(documented) == sorted(VARIABLES)


def test_extras_are_those_of_the_distribution() -> None:
    from importlib import metadata

    documented = {row[0].strip("`") for row in table(ROOT / "README.md", "extra")}
    assert documented == set(metadata.metadata("tlhub-core").get_all("Provides-Extra"))


def test_errors_are_those_of_the_module() -> None:
    from tlhub import errors

    for row in table(ROOT / "docs" / "concepts.md", "error"):
        kind = getattr(errors, row[0].strip("`"))
        bases = [b.__name__ for b in kind.__bases__ if b is not errors.TlhubError]
        assert re.findall(r"`(\w+)`", row[1]) == bases
    listed = {row[0].strip("`") for row in table(ROOT / "docs" / "concepts.md", "error")}
    assert listed == {
        k.__name__ for k in vars(errors).values() if isinstance(k, type) and errors.TlhubError in k.__bases__
    }


def test_hooks_are_those_of_the_host() -> None:
    from tlhub.hooks import Hooks

    listed = {row[0].strip("`") for row in table(ROOT / "docs" / "writing-plugins.md", "hook")}
    assert listed == {n for n in vars(Hooks) if n.startswith("tlhub_")}


def test_facts_and_problem_are_those_of_the_records() -> None:
    import dataclasses

    from tlhub.specs import DeviceFacts, Problem

    path = ROOT / "docs" / "writing-plugins.md"
    assert [r[0].strip("`") for r in table(path, "of the facts")] == [f.name for f in dataclasses.fields(DeviceFacts)]
    named = {n for row in table(path, "of the problem") for n in re.findall(r"`problem\.(\w+)`", row[0])}
    shorter = {"dims": "dim", "options": "option"}  # the mappings are what a plugin wants
    assert named == {"dtype", *(shorter.get(f.name, f.name) for f in dataclasses.fields(Problem))}


def test_the_schedule_for_somebody_elses_kernel_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture) -> None:
    import tlhub
    from tlhub import catalog

    (text,) = [b for b in blocks(ROOT / "docs" / "writing-plugins.md", "python") if "SERVED" in b]
    made: dict[str, object] = {}
    exec(text, made)
    (said,) = re.findall(r"print\(.*# (.*)", text)
    assert capsys.readouterr().out.strip() == said
    gemm = catalog.load().kernel("gemm")
    assert list(made["SERVED"]) == [o.name for o in gemm.options]
    (schedule,) = made["tlhub_schedules"]()
    for options, served in (({}, True), ({"epilogue": "relu", "trans_b": True}, True), ({"bias": True}, False)):
        trace = tlhub.explain("gemm", (64, 64, 64), "float32", **options)
        assert (schedule.supports(trace.problem, trace.place.facts) is None) == served
        assert schedule.configs(trace.problem, trace.place.facts)


MIXED = ("quantize", "gemm_scaled", "gemm_w4a16", "gemm_w8a16")


@pytest.mark.parametrize(
    "kernel",
    ["gemm", "attention", "attention_bwd", "attention_decode", "attention_varlen", "attention_varlen_bwd", *MIXED],
)
def test_contract_tables_are_the_contract(kernel: str) -> None:
    from tlhub import catalog
    from tlhub.cli.command import show

    path = ROOT / "docs" / ("mixed.md" if kernel in MIXED else "kernels.md")
    contract = catalog.load().kernel(kernel)
    options = {row[0].strip("`"): re.findall(r"`([^`]+)`", row[1]) for row in table(path, f"{kernel} option")}
    assert options == {o.name: [show(c) for c in o.choices] for o in contract.options}
    arguments = {row[0].strip("`"): re.findall(r"`\(([^)]*)\)`", row[1]) for row in table(path, f"{kernel} argument")}
    declared: dict[str, list[str]] = {}
    for arg in (*contract.inputs, *contract.outputs):
        dims = declared.setdefault(arg.name, [])
        dims += [d for d in [", ".join(arg.dims)] if d not in dims]
    assert arguments == declared
    rows = table(path, f"{kernel} scalar") if contract.scalars else []
    scalars = {row[0].strip("`"): row[1].strip("`") for row in rows}
    assert scalars == {s.name: show(s.default) for s in contract.scalars}
    dims = {row[0].strip("`"): row[1].strip("`") for row in table(path, f"{kernel} dim")}
    assert dims == {d.name: "" if d.default is None else show(d.default) for d in contract.dims}
    (line,) = re.findall(rf"^{kernel} takes dtypes (.*?)\.$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert re.findall(r"`([^`]+)`", line) == list(contract.dtypes)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_make_targets_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(
        r"\bmake (demo|test-all|test|lint|format|bench|prebuilt|clean)\b", path.read_text("utf-8")
    ):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_named_files_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    for file in re.findall(r"`((?:docs|plugins|registry|tests|benchmarks|tlhub)/[\w./-]+)`", text):
        assert (ROOT / file).exists(), file
