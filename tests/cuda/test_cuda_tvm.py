"""TVM programs to launches on a GPU: no nvcc and no GPU to make the source, any strides, wrong programs."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import cuda_lab
import pytest
from cuda_array import Array
from cuda_lab import number

from tlhub.errors import BuildError

pytestmark = pytest.mark.tvm
A, C = 1 << 30, 1 << 40


@functools.cache
def build(program):
    return cuda_lab.build(f"tvm_programs:{program}", cuda_lab.SCALE, arch="cuda:sm_80", toolchain="tvm")


def call(driver, made, m, n, a=A, strides=None):
    arrays = [Array((m, n), a, strides=strides), Array((m, n), C)]
    return driver.do(cuda_lab.call, made.linked, [*arrays, None, 2.0])


def test_a_scheduled_function(driver):
    made = build("scale")
    launch = call(driver, made, 5, 100, A + 4, (-7, 3)).launch
    assert (launch["grid"], launch["block"]) == ([2, 5, 1], [64, 1, 1])
    wide = [number(p, "q") for p in launch["parameters"] if len(p) == 16]
    assert wide[:2] == [A + 4, C]  # a and c, each its own
    assert {-7, 3, 100, 1}.issubset(wide) and 2.0 in [number(p, "d") for p in launch["parameters"]]
    assert sorted(os.listdir(made.folder)) == ["kernel.so", "program.cu"]
    assert {"apache-tvm", "nvcc"} <= set(made.built.toolchain) and made.built.resources["spills"] == 0
    assert made.built.warnings == ()


def test_what_a_function_takes_for_granted(driver):
    made = build("compact")
    assert call(driver, made, 5, 100).launch["grid"] == [2, 5, 1]
    assert "strides" in call(driver, made, 5, 100, strides=(101, 1)).error
    refused = call(driver, made, 5, 100, A + 4)
    assert "has no launch for the call" in refused.error and not refused.calls


def test_the_names_of_buffers_do_not_matter_or_are_asked_for(driver):
    """Two buffers of one name are never taken for each other."""
    try:
        made = build("unnamed")
    except BuildError as error:
        assert "not known to be an argument's data" in error.message and "a name of its own" in error.hint
        return
    source = Path(made.folder, "program.cu").read_text()
    names = re.findall(r"float\* __restrict__ (\w+)", source)[-2:]
    written = re.search(r"^ *(\w+)\[.*\] = ", source, re.MULTILINE)[1]
    given = dict(zip(names, (number(p) for p in call(driver, made, 5, 100).launch["parameters"]), strict=False))
    assert given == {name: C if name == written else A for name in names}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("unscheduled", "no loop that is bound to blocks or threads of a GPU|Did you forget to bind"),
        ("square", "m is dim M of one of the program's buffers, and dim N of that for argument 'a'; they may differ"),
    ],
)
def test_a_wrong_program_is_told_what_is_wrong(program, reason):
    with pytest.raises(BuildError, match=reason):
        build(program)
