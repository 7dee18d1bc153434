"""Run every check and every test, here and against the built wheel, and close with one line of counts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "reports"


@dataclass(frozen=True)
class Step:
    """A command of the environment *venv*; with ``tests`` a pytest run of those tests."""

    name: str
    venv: str
    command: tuple[str, ...]
    tests: bool = False


@dataclass
class Result:
    """What one step did: counts, and the reasons of what was skipped."""

    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", action="store_true", help="the long tests too")
    parser.add_argument("--no-skips", action="store_true", help="a skipped test is a failure")
    parser.add_argument(
        "--only", metavar="NAME", help="the steps whose name begins so: lint, tests, wheel, tvm, plugin"
    )
    options = parser.parse_args()
    chosen = [s for s in steps(options.slow) if s.name.startswith(options.only or "")]
    if not chosen:
        parser.error(f"no step begins with {options.only!r}: {', '.join(s.name for s in steps(False))}")
    REPORTS.mkdir(parents=True, exist_ok=True)
    results = [run(step) for step in chosen]
    skipped: Counter[str] = sum((r.skipped for r in results), Counter())
    for reason, count in sorted(skipped.items()):
        print(f"skipped {count}: {reason}")
    passed, failed = sum(r.passed for r in results), sum(r.failed for r in results)
    if options.no_skips and skipped:
        print("a skipped test is a failure here")
    print(f"{passed} passed, {failed} failed, {skipped.total()} skipped", flush=True)
    return int(failed > 0 or (options.no_skips and skipped.total() > 0))


def steps(slow: bool) -> list[Step]:
    """Return all steps in order; pytest's default, from pyproject.toml, leaves out ``slow`` and ``wheel``."""
    every = ("-m", "not wheel") if slow else ()
    # what a file's tests have compiled is shared between them, in one process
    two = ("-n", "2", "--dist", "loadfile")
    return [
        Step("lint: rules", ".venv", ("ruff", "check", "--quiet")),
        Step("lint: format", ".venv", ("ruff", "format", "--diff", "--quiet")),
        Step("lint: types", ".venv", ("mypy",)),
        Step("lint: layers", ".venv", ("lint-imports", "--no-logo")),
        Step("tests", ".venv", ("pytest", *two, *every), tests=True),
        Step("wheel: light tests", ".venv-wheel", ("pytest", *two, *marked("light")), tests=True),
        Step("tvm: its newest", ".venv-tvm", ("pytest", *two, *marked("tvm")), tests=True),
        Step("plugin: its wheel", ".venv-tvm", ("pytest", *two, *marked("wheel", slow)), tests=True),
    ]


def marked(name: str, slow: bool = False) -> tuple[str, ...]:
    """Return pytest's arguments for the tests with that mark, in files that use it: others may lack an import."""
    files = sorted(p for p in (ROOT / "tests").rglob("test_*.py") if f"pytest.mark.{name}" in p.read_text("utf-8"))
    return ("-m", name if slow else f"{name} and not slow", *(str(p.relative_to(ROOT)) for p in files))


def run(step: Step) -> Result:
    """Run one step with its output shown, and return its counts."""
    print(f"== {step.name}", flush=True)
    started = time.monotonic()
    report = REPORTS / f"{step.name.replace(': ', '-').replace(' ', '-')}.xml"
    report.unlink(missing_ok=True)
    program, *arguments = step.command
    if step.tests:
        arguments += ["-q", f"--junitxml={report}"]
    # as `python -m` would not: the folder one is in stays off the path, so that the wheel is what is imported
    command = [str(ROOT / step.venv / "bin" / program), *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PATH"] = os.pathsep.join([str(ROOT / step.venv / "bin"), os.environ.get("PATH", os.defpath)])
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    result = read(report, code) if step.tests else Result(passed=int(code == 0), failed=int(code != 0))
    counts = f"{result.passed} passed, {result.failed} failed, {result.skipped.total()} skipped"
    print(f"   {step.name}: {counts}, {time.monotonic() - started:.0f} s", flush=True)
    return result


def read(report: Path, code: int) -> Result:
    """Return the counts of a JUnit report; a run that failed without a failed test counts as one failure."""
    result = Result()
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        elif skip is not None and skip.get("type") != "pytest.xfail":
            result.skipped[skip.get("message") or "no reason given"] += 1
        else:
            result.passed += 1
    if code != 0 and result.failed == 0:
        result.failed = 1
    return result


if __name__ == "__main__":
    sys.exit(main())
