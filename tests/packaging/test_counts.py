"""The closing line of `make test`: what it counts, and what makes it fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.light

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/>
<testcase name="c"><failure message="no"/></testcase>
<testcase name="d"><error message="set-up"/></testcase>
<testcase name="e"><skipped type="pytest.skip" message="torch is not installed"/></testcase>
<testcase name="f"><skipped type="pytest.skip" message="torch is not installed"/></testcase>
<testcase name="g"><skipped type="pytest.xfail" message="known"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("run", Path(__file__).parents[1] / "run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "REPORTS", tmp_path)
    return module


def test_counts_of_a_report(script: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, "utf-8")
    result = script.read(report, 1)
    assert (result.passed, result.failed, dict(result.skipped)) == (3, 2, {"torch is not installed": 2})


@pytest.mark.parametrize("text", [None, "<testsuites/>"])
def test_a_run_that_failed_without_a_failed_test_is_a_failure(
    script: ModuleType, tmp_path: Path, text: str | None
) -> None:
    report = tmp_path / "report.xml"
    if text:
        report.write_text(text, "utf-8")
    assert script.read(report, 5).failed == 1


@pytest.mark.parametrize(
    ("arguments", "failed", "skips", "code"),
    [([], 0, 0, 0), ([], 1, 0, 1), ([], 0, 2, 0), (["--no-skips"], 0, 2, 1), (["--no-skips"], 0, 0, 0)],
)
def test_last_line_and_exit_code(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    failed: int,
    skips: int,
    code: int,
) -> None:
    def run(step: object) -> object:
        skipped = script.Counter({"jax is not installed": skips} if skips else {})
        return script.Result(passed=4, failed=failed, skipped=skipped)

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "tests", *arguments])
    assert script.main() == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"4 passed, {failed} failed, {skips} skipped"
    assert ("skipped 2: jax is not installed" in lines) == bool(skips)


def test_a_step_that_is_misspelt_is_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "lints"])
    with pytest.raises(SystemExit, match="2"):
        script.main()


def test_every_mark_has_files(script: ModuleType) -> None:
    for name in ("light", "tvm", "wheel"):
        assert len(script.marked(name)) > 2
