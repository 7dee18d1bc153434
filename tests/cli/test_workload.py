"""Workload files: what they may say, and that every mistake names the file and the problem."""

from __future__ import annotations

import re
import subprocess

import pytest

from tlhub import catalog
from tlhub.errors import ArgumentError
from tlhub.workload import Item, Mistake, parse, read

pytestmark = pytest.mark.light

GOOD = """
[[problem]]
kernel = "gemm"
shape = [1024, "N", 64]
dtype = "float32"

[[problem]]
kernel = "gemm"
shape = { M = 8, N = 8, K = 8 }
dtype = { a = "float32", b = "float32" }
options = { trans_b = true }
archs = ["cpu:x86-64-v3", "x86-64-v2"]
"""


def test_problems():
    first, second, third = parse(GOOD, "w.toml", catalog.load())
    assert first == Item("gemm", (1024, "N", 64), "float32", {})
    assert (second.arch, third.arch) == ("cpu:x86-64-v3", "cpu:x86-64-v2")
    assert second.request() == {
        "kernel": "gemm",
        "shape": {"M": 8, "N": 8, "K": 8},
        "dtype": {"a": "float32", "b": "float32"},
        "arch": "cpu:x86-64-v3",
        "schedule": None,
        "trans_b": True,
    }


def test_lists_are_every_combination():
    text = """
    [[problem]]
    kernel = "gemm"
    shapes = [[8, 8, 8], { M = "M", N = 8, K = 8 }]
    dtypes = ["float32", "float64"]
    options = [{}, { trans_b = true }]
    schedules = ["cpu_blocked"]
    """
    found = parse(text, "w.toml", catalog.load())
    assert len(set(map(repr, found))) == len(found) == 8
    assert all(isinstance(item, Item) and item.schedule == "cpu_blocked" for item in found)
    assert found[0] == Item("gemm", (8, 8, 8), "float32", {}, None, "cpu_blocked")
    assert found[-1] == Item("gemm", {"M": "M", "N": 8, "K": 8}, "float64", {"trans_b": True}, None, "cpu_blocked")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"gemm"', '"gem"', "problem 1: unknown kernel 'gem'"),
        ('[1024, "N", 64]', "[1024, 1.5, 64]", "problem 1: gemm: dim N is 1.5"),
        ('[1024, "N", 64]', "[1024, -1, 64]", "problem 1: gemm: dim N is -1"),
        ('[1024, "N", 64]', "[1024, true, 64]", "problem 1: gemm: dim N is True"),
        ('[1024, "N", 64]', "64", "problem 1: shape is 64; it is a list"),
        ('dtype = "float32"', "", "problem 1: dtype is missing"),
        ('dtype = "float32"', "dtype = 32", "problem 1: dtype is 32"),
        ("options =", "optoins =", "problem 2: unknown key 'optoins'.*\n?.*did you mean 'options'"),
        ("trans_b = true", "trans_c = true", "problem 2: gemm: no option 'trans_c'"),
        ("trans_b = true", "trans_b = 1", "problem 2: gemm: option trans_b is 1"),
        ('"x86-64-v2"', '"x86-64-v9"', "problem 2: unknown arch 'x86-64-v9'"),
        ('archs = ["cpu:x86-64-v3", "x86-64-v2"]', "archs = []", "problem 2: archs is empty"),
        ("options =", 'schedule = "nope"\noptions =', "problem 2: unknown schedule 'nope'"),
        ('dtype = "float32"', 'dtypes = "float32"', "problem 1: dtypes is 'float32'; it is a list"),
        ('dtype = "float32"', 'dtype = "float32"\ndtypes = ["float32"]', "problem 1: dtype and dtypes are both given"),
        ('dtype = "float32"', 'dtypes = ["float32", 3]', "problem 1: dtype is 3; it is a dtype's name"),
        ("{ trans_b = true }", "3", "problem 2: options is 3; it is a table"),
    ],
)
def test_mistakes_name_the_problem_and_leave_the_others_alone(old, new, said):
    assert old in GOOD
    found = parse(GOOD.replace(old, new, 1), "w.toml", catalog.load())
    (mistake,) = (item for item in found if isinstance(item, Mistake))
    assert re.search(said, str(mistake)) and str(mistake).startswith("workload 'w.toml', problem ")
    if "kernel" not in said and "dim" not in said:  # their hints are the contract's
        assert mistake.error.hint
    assert len(found) == (3 if "problem 1" in said else 2)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[problem]]", "[[problems]]", "it has 'problems'"),
        ("[[problem]]\nkernel", "kernel", "it has 'kernel'|not TOML"),
        ('kernel = "gemm"', 'kernel = "gemm', "is not TOML(.|\n)*hint: sed -n 3p w.toml"),
    ],
)
def test_a_file_that_is_no_list_of_problems(old, new, said):
    count = -1 if "problems" in new else 1
    with pytest.raises(ArgumentError, match=said) as caught:
        parse(GOOD.replace(old, new, count), "w.toml", catalog.load())
    assert str(caught.value).startswith("workload 'w.toml'") and caught.value.hint


def test_the_hint_for_a_missing_file_writes_one(tmp_path):
    path = tmp_path / "my work.toml"
    with pytest.raises(ArgumentError) as caught:
        read(str(path), catalog.load())
    subprocess.run(caught.value.hint, shell=True, check=True)
    assert read(str(path), catalog.load()) == (Item("gemm", ("M", "N", "K"), "float32", {}),)


@pytest.mark.parametrize("text", ["", "problem = 3", "problem = [3]"])
def test_a_file_without_problems(text):
    with pytest.raises(ArgumentError, match="workload 'w.toml'"):
        parse(text, "w.toml", catalog.load())


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none.toml", tmp_path, tmp_path / "empty", tmp_path / "latin.toml"):
        with pytest.raises(ArgumentError, match="cannot be read"):
            read(str(path), catalog.load())
