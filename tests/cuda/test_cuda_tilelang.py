"""TileLang programs to launches: what a prim_func's parameters become, which function a call takes, wrong programs."""

from __future__ import annotations

import functools
import os

import cuda_lab
import pytest
from cuda_array import Array
from cuda_lab import number

from tlhub.build import frontends
from tlhub.errors import BuildError

A, C = 1 << 30, 1 << 40


@functools.cache
def build(program, dims=("M", "N"), arch="cuda:sm_80", **config):
    return cuda_lab.build(
        f"tilelang_programs:{program}", cuda_lab.SCALE, dims, arch=arch, toolchain="tilelang", config=config
    )


def call(driver, made, m, n, alpha=2.0, a=A, strides=None):
    """Call with a of any strides and c without gaps."""
    arrays = [Array((m, n), a, strides=strides), Array((m, n), C)]
    return driver.do(cuda_lab.call, made.linked, [*arrays, None, alpha])


def numbers(launch, forms):
    return [number(p, form) for p, form in zip(launch["parameters"], forms, strict=True)]


def test_a_prim_func(driver):
    made = build("compact", ("M", 256))
    launch = call(driver, made, 100, 256).launch
    assert (launch["grid"], launch["block"]) == ([4, 2, 1], [128, 1, 1])
    assert sorted(numbers(launch, "QQfi")[:2]) == [A, C] and numbers(launch, "QQfi")[2:] == [2.0, 100]
    assert made.built.resources["spills"] == 0 and made.built.toolchain["tilelang"].startswith("0.1.")
    assert sorted(os.listdir(made.folder)) == ["kernel.so", "program.cu"] == sorted(made.built.members)
    assert made.built.warnings == ()
    # the arguments are held to what the function takes for granted
    assert "strides" in call(driver, made, 100, 256, strides=(260, 1)).error
    refused = call(driver, made, 100, 256, a=A + 4)
    assert "scale" in refused.error and not refused.calls


def test_a_tensor_map(driver):
    made = build("compact", ("M", 256), "cuda:sm_90a", load="tma")
    said = call(driver, made, 100, 256)
    (fields,) = [m for m in said.maps() if m]
    expected = {"dtype": 7, "address": A, "dims": [256, 100], "strides": [1024], "box": [64, 64], "steps": [1, 1]}
    assert {key: fields[key] for key in expected} == expected
    assert said.launch["shared"] == 64 * 64 * 4


def test_any_strides(driver):
    launch = call(driver, build("branches"), 100, 70, strides=(81, 2)).launch
    assert launch["grid"] == [2, 2, 1]
    assert numbers(launch, "QQiidiiii") == [A, C, 81, 2, 2.0, 70, 1, 100, 70]


def test_the_first_function_that_may_be(driver):
    made = build("branches")
    first, second = call(driver, made, 5, 128, strides=(132, 1)).launches()
    assert [first["grid"], second["grid"]] == [[5, 1, 1], [5, 1, 1]]
    assert [first["block"], second["block"]] == [[32, 1, 1], [64, 1, 1]]  # in the order of the function
    assert numbers(first, "QQiiq") == [A, C, 5, 32, 33]
    for other in ({"strides": (133, 1)}, {"strides": (132, 2)}, {"a": A + 4}):
        assert call(driver, made, 5, 128, **other).launch["grid"] == [2, 1, 1]
    assert call(driver, made, 5, 124).launch["grid"] == [2, 1, 1]


def test_clusters_and_programmatic_launches(driver):
    launch = call(driver, build("waits", ("M", 256), "cuda:sm_90a"), 3, 256).launch
    assert launch["grid"] == [4, 3, 1] and launch["cluster"] == [2, 1, 1] and launch["programmatic"] == 1


def test_more_rows_than_an_int_holds_are_refused(driver):
    refused = call(driver, build("compact", ("M", 256)), 1 << 31, 256)
    assert refused.error and not refused.launches()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("nothing", "returns a prim_func, or a TileProgram of them; this one returned int"),
        ("none", "this one returned no function"),
        ("too_few", r"the program has 2 parameters \(a_handle, c_handle\); the contract asks for 3: a, c, alpha"),
        ("wrong_dtype", "argument 'a' has dtype 'float16'; the contract asks for 'float32'"),
        ("wrong_extent", "argument 'a' has 128 in dim N; the problem asks for any extent"),
        ("wrong_scalar", "parameter 'alpha' for scalar 'alpha' is float16, not float64"),
        ("square", "m is dim M of one of the program's buffers, and dim N of that for argument 'a'; they may differ"),
        ("one_stride", "stride 0 of the program's buffer for argument 'c' is row; it may be an integer, a symbol"),
        ("raises", r"tilelang_programs:raises failed: RuntimeError: no tile of this size\n.*tilelang_programs.py"),
    ],
)
def test_a_wrong_program_is_told_what_is_wrong(program, reason):
    with pytest.raises(BuildError, match=reason):
        build(program)


def test_without_tilelang(monkeypatch):
    from tlhub.build.frontends import tilelang

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match="tilelang is not installed") as caught:
        tilelang.prepare()
    assert caught.value.hint == 'pip install "tlhub-core[tilelang]"'
    assert frontends.module("tilelang") == tilelang.__name__
