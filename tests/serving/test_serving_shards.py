"""Prewarming in parts: by digest, so that processes that share nothing but the store build each kernel once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.light

HERE = Path(__file__).parent
WORKLOAD = """
[[problem]]
kernel = "gemm"
shapes = [["M", "N", "K"], [64, 48, 32]]      # one binary: the schedule leaves every dim open
dtypes = ["float32", "float64"]
options = [%s]
arch = "cpu:x86-64-v3"
"""
CHOICES = [
    f'{{ trans_a = {a}, trans_b = {b}, bias = {c}, epilogue = "{e}" }}'
    for a in ("true", "false")
    for b in ("true", "false")
    for c in ("true", "false")
    for e in ("none", "relu", "gelu", "silu")
]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.toml"
    path.write_text(WORKLOAD % ", ".join(CHOICES))
    return path


def test_four_processes_build_each_of_64_kernels_once(workload: Path, cold_cache: str) -> None:
    held, gate = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    children = [
        subprocess.Popen(
            [sys.executable, HERE / "shard_child.py", "--from", workload, "--rank", str(rank), "--world", "4"],
            stdin=held,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(4)
    ]
    os.close(held)
    os.close(gate)
    said = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 4
    counts, built = zip(*map(json.loads, said), strict=True)
    digests = [digest for part in built for digest in part]
    assert len(digests) == len(set(digests)) == 64
    assert all(4 <= len(part) <= 32 for part in built)  # and none does it all
    assert sum(count["built"] + count["present"] for count in counts) == 128
    assert len(list(Path(cold_cache).glob("v1/*/*/*/*/entry.json"))) == 64


def test_parts_are_the_whole_and_the_same_each_time(workload, compiler, cli):
    def part(*words: object) -> list[str]:
        done = cli("cache", "prewarm", "--from", workload, *words, "--json")
        assert done.exit_code == 0, done.stderr
        return [outcome["problem"] for outcome in json.loads(done.stdout)["problems"]]

    parts = [part("--rank", rank, "--world", 3) for rank in range(3)]
    assert sorted(sum(parts, [])) == sorted(part()) and parts[1] == part("--rank", 1, "--world", 3)


def test_a_mistake_is_one_ranks(tmp_path, compiler, cli):
    path = tmp_path / "w.toml"
    path.write_text('[[problem]]\nkernel = "gem"\nshape = [1, 2, 3]\ndtype = "float32"')
    codes = [cli("cache", "prewarm", "--from", path, "--rank", r, "--world", 3).exit_code for r in range(3)]
    assert sorted(codes) == [0, 0, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rank", 1), "--rank goes with --world"),
        (("--world", 1), "--rank goes with --world"),
        (("--rank", 2, "--world", 2), "there is no rank 2 of 2"),
        (("--rank", -1, "--world", 2), "-1"),
    ],
)
def test_parts_that_are_none(workload, cli, words, said):
    done = cli("cache", "prewarm", "--from", workload, *words)
    assert done.exit_code == 2 and said in done.stderr and done.stdout == ""
