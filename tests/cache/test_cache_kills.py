"""benchmarks/kills.py: what writers and cleaners that were killed leave behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"


def kill(count: int, change: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import runpy, sys\nsys.argv = ['kills', '--kills', '{count}']\n{change}\n"
    code += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_fifty_kills_tear_and_lose_nothing() -> None:
    done = kill(50)
    assert done.returncode == 0 and "50 kills" in done.stdout, done.stderr


TORN = """
import os, time
def publish_file_by_file(source, target, rename=os.rename, **where):
    if "/.staging/" in str(source) and "/.staging/" not in str(target):
        os.mkdir(target)
        for name in sorted(os.listdir(source)):
            rename(f"{source}/{name}", f"{target}/{name}")
            time.sleep(0.005)  # so that a few kills are enough to hit it
    else:
        rename(source, target, **where)
os.rename = publish_file_by_file
"""


def test_the_script_finds_a_writer_that_tears() -> None:
    done = kill(60, TORN)
    assert done.returncode == 1 and "missing" in done.stderr, done.stdout
