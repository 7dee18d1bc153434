"""Calls of a library for NVIDIA GPUs: what the driver is asked for, and what is refused before it is."""

from __future__ import annotations

from dataclasses import replace

import cuda_lab
import pytest
from cuda_array import Array
from cuda_calls import axpy, matrices, rows, scale, sums, vectors
from cuda_lab import number

KIB = 1 << 10


def test_a_launch(driver):
    said = driver.do(cuda_lab.call, axpy(), vectors(), stream=77)
    assert said.error is None
    launch = said.launch
    assert (launch["grid"], launch["block"], launch["stream"]) == ([4, 1, 1], [256, 1, 1], 77)
    assert [launch.get(key) for key in ("cluster", "cooperative", "programmatic", "shared")] == [None, None, None, 0]
    *pointers, alpha, n = launch["parameters"]
    assert [number(p) for p in pointers] == [3 << 20, 1 << 20, 2 << 20]
    assert number(alpha, "f") == 2.5 and number(n, "i") == 1000


def test_what_the_first_call_does_the_second_does_not(fresh):
    process = fresh()
    first, second = (process.do(cuda_lab.call, axpy(), vectors()) for _ in range(2))
    assert first.names[0] == "cuInit" and first.names.count("cuLibraryLoadData") == 1
    assert second.names == ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]
    assert all(c["code"] == 0 for c in first.calls)
    # loading is unsafe under capture in its strictest mode: it is made ready in the relaxed one, which is left again
    modes = [c["mode"] for c in first.calls if c["call"] == "cuThreadExchangeStreamCaptureMode"]
    at = {name: first.names.index(name) for name in first.names}
    assert modes == [2, 0] and at["cuThreadExchangeStreamCaptureMode"] < at["cuLibraryLoadData"]
    assert at["cuKernelGetFunction"] < len(first.names) - 1 - first.names[::-1].index(
        "cuThreadExchangeStreamCaptureMode"
    )


def test_the_context_is_the_arrays_own_and_the_callers_comes_back(fresh):
    process = fresh()
    for device in (0, 1):
        said, after = process.do(cuda_lab.call_in_context, axpy(), vectors(device=1), device)
        assert said.launch["current"] == 1 and after == device
    assert "cuCtxPushCurrent" not in said.names  # it was current already
    said, after = process.do(cuda_lab.call_in_context, axpy(), vectors(device=1), 2, fail=("cuLaunchKernelEx", 0, 1))
    assert said.error and after == 2


def test_a_tensor_map(driver):
    said = driver.do(cuda_lab.call, scale(), matrices(100, 70, 3.0, strides=(72, 1)))
    (fields, *others) = said.maps()
    assert others == [None] * 5
    expected = {"dtype": 7, "address": 1 << 30, "dims": [70, 100], "strides": [288], "box": [32, 8], "steps": [1, 1]}
    assert {key: fields[key] for key in expected} == expected
    assert [fields[key] for key in ("interleave", "swizzle", "promotion", "fill")] == [0, 0, 3, 0]
    launch = said.launch
    assert launch["grid"] == [4, 13, 1] and launch["cluster"] == [2, 1, 1] and launch["programmatic"] == 1
    assert launch["shared"] == 100 * KIB
    assert [number(p, form) for p, form in zip(launch["parameters"][1:], "QqfIi", strict=True)] == [
        1 << 40,
        70,
        3.0,
        100,
        70,
    ]


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({}, "scale_tiles"),
        ({"address": (1 << 30) + 16}, "scale_tiles"),
        ({"address": (1 << 30) + 4}, "scale_plain"),
        ({"strides": (65, 1)}, "scale_plain"),
        ({"strides": (1, 16)}, "scale_plain"),
        ({"strides": (0, 0)}, "scale_plain"),
    ],
)
def test_the_first_branch_that_holds_is_taken(driver, fields, kernel):
    said = driver.do(cuda_lab.call, scale(), matrices(16, 64, **fields))
    assert said.error is None and said.launch["kernel"] == kernel


def test_a_call_that_no_branch_serves_is_refused(driver):
    said = driver.do(cuda_lab.call, scale(), matrices(16, 64, strides=(-64, 1), address=1 << 31))
    assert said.error == (
        "ValueError: scale: this binary has no launch for the call: M=16, N=64; strides of 'a' (-64, 1), 'c' (64, 1)"
    )
    assert not said.calls


def test_limits_are_raised_once_a_device(fresh):
    process = fresh()
    asked = []
    for device in (0, 0, 1):
        said = process.do(
            cuda_lab.call,
            scale(),
            matrices(8, 64, device=device)[:1] + [Array((8, 64), 1 << 40, device=device), None, 1.0],
            device=device,
        )
        assert said.error is None
        asked += [c for c in said.calls if c["call"] == "cuKernelSetAttribute"]
    assert [(c["kernel"], c["attribute"], c["value"], c["device"]) for c in asked] == [
        ("scale_tiles", 8, 100 * KIB, 0),
        ("scale_tiles", 8, 100 * KIB, 1),
    ]


@pytest.mark.parametrize(
    ("fields", "attribute", "value"), [({"shared": 1024}, 8, 1024), ({"cluster": (16, 1, 1)}, 14, 1)]
)
def test_what_a_kernel_must_be_allowed(fresh, fields, attribute, value):
    made = cuda_lab.build("cuda_programs:axpy", cuda_lab.AXPY, config={"launch": fields})
    said = fresh().do(cuda_lab.call, made.linked, vectors())
    (asked,) = (c for c in said.calls if c["call"] == "cuKernelSetAttribute")
    assert (asked["kernel"], asked["attribute"], asked["value"]) == ("axpy", attribute, value)
    assert said.launch.get("cluster", [1, 1, 1]) == list(fields.get("cluster", (1, 1, 1)))


def test_launches_of_a_branch_follow_each_other(driver):
    scratch = Array((4 * 132 * 100,), 1 << 20, "uint8")
    said = driver.do(cuda_lab.call, sums(), rows(100, 500, scratch))
    first, second = said.launches()
    assert (first["kernel"], second["kernel"]) == ("parts", "whole")
    assert first["grid"] == [132, 1, 1] and first["cooperative"] == 1 and "cooperative" not in second
    assert number(first["parameters"][2]) == number(second["parameters"][0]) == 1 << 20
    assert number(first["parameters"][5], "I") == number(second["parameters"][4], "i") == 132


def test_scratch_memory_is_told_and_asked_for(driver):
    assert driver.do(cuda_lab.call, sums(), rows(100, 500), name="tlhub_workspace").result == 4 * 132 * 100
    assert driver.do(cuda_lab.call, sums(), rows(100, 32), name="tlhub_workspace").result == 0
    assert driver.do(cuda_lab.call, sums(), rows(0, 500), name="tlhub_workspace").result == 0
    told = driver.do(
        cuda_lab.call, sums(), [Array((100, 500), dtype="float16"), *rows(1, 1)[1:]], name="tlhub_workspace"
    )
    assert "argument 'a': expected dtype float32" in told.error


@pytest.mark.parametrize(
    ("workspace", "got"),
    [
        (None, "got None"),
        (5, "got an int"),
        (Array((52799,), 1 << 20, "uint8"), "got 52799 bytes at an address that is 0 past it"),
        (Array((52800,), (1 << 20) + 64, "uint8"), "got 52800 bytes at an address that is 64 past it"),
        (Array((52800,), 1 << 20, "uint8", device=1), "got one on cuda:1"),
        (Array((52800,), 1 << 20, "uint8", device_type=1), "got one on cpu:0"),
        (Array((52800, 2), 1 << 20, "uint8", strides=(4, 1)), "got strides (4, 1)"),
        (Array((52800,), (1 << 40) - 256, "uint8"), "overlaps argument 's'"),
    ],
)
def test_scratch_memory_that_will_not_do(driver, workspace, got):
    said = driver.do(cuda_lab.call, sums(), rows(100, 500, workspace))
    assert "sums: argument 'workspace': expected " in said.error and got in said.error
    assert "of at least 52800 bytes without gaps, aligned to 256" in said.error or "of its own" in said.error
    assert not said.launches()


@pytest.mark.parametrize(
    "workspace",
    [Array((52800,), 1 << 20, "uint8"), Array((100, 132), 1 << 20), Array((1, 60000), 1 << 20, "int8", (7, 1))],
)
def test_scratch_memory_of_any_dtype_and_size(driver, workspace):
    assert driver.do(cuda_lab.call, sums(), rows(100, 500, workspace)).error is None


def test_scratch_memory_that_this_call_does_not_need(driver):
    assert len(driver.do(cuda_lab.call, sums(), rows(100, 5, Array((1,), 3, "uint8"))).launches()) == 1
    assert "got an int" in driver.do(cuda_lab.call, sums(), rows(100, 5, 7)).error
    said = driver.do(cuda_lab.call, axpy(), [*vectors()[:3], Array((1,)), 1.0])
    assert "expected None, for this kernel needs no workspace" in said.error


@pytest.mark.parametrize("arguments", [vectors(0), matrices(0, 5), matrices(5, 0), rows(0, 500)])
def test_no_elements_no_launch(driver, arguments):
    library = {3: sums, 4: scale, 5: axpy}[len(arguments)]()
    said = driver.do(cuda_lab.call, library, arguments)
    assert said.error is None and said.calls == []


def test_a_device_that_is_not_there(driver):
    said = driver.do(cuda_lab.call, axpy(), vectors(device=9), device=9)
    assert said.error.startswith("RuntimeError: axpy: cuDeviceGet failed")
    said = driver.do(cuda_lab.call, axpy(), vectors(device=1000), device=0)
    assert said.error == "RuntimeError: axpy: device cuda:1000 is not among the first 64"


def test_arrays_on_two_devices_are_refused(driver):
    a, b, c, *rest = vectors()
    said = driver.do(cuda_lab.call, axpy(), [a, Array(b.shape, b.address, device=1), c, *rest])
    assert "argument 'b': expected an array on cuda:0 like 'a', got one on cuda:1" in said.error and not said.calls


@pytest.mark.parametrize(
    ("library", "arguments", "text"),
    [
        (
            scale,
            matrices(8 * 65536, 32),
            "launch scale_tiles on a grid of (2, 65536, 1) blocks; there may be from 1 to (2147483647, 65535, 65535)",
        ),
        (scale, matrices(1 << 31, 1, strides=(1, 1)), "scale_plain on a grid of (2147483648, 1, 1) blocks"),
        (axpy, vectors((1 << 31) + 5), "parameter 4 of axpy would be 2147483653, which does not fit its type"),
    ],
)
def test_sizes_that_cannot_be_launched(driver, library, arguments, text):
    apart = [replace(a, address=i << 50) if isinstance(a, Array) else a for i, a in enumerate(arguments, 1)]
    said = driver.do(cuda_lab.call, library(), apart)
    assert said.error.startswith("ValueError: ") and text in said.error and not said.calls


def test_nothing_is_launched_before_all_launches_were_checked(driver):
    """The first launch would do, the second has too large a grid."""
    said = driver.do(cuda_lab.call, cuda_lab.build("cuda_programs:two", cuda_lab.AXPY).linked, vectors(1 << 17))
    assert "on a grid of (1, 131072, 1) blocks" in said.error and not said.calls


def test_a_sum_of_nothing_is_launched(driver):
    assert driver.do(cuda_lab.call, sums(), rows(5, 0)).launch["kernel"] == "whole"


def test_two_threads_make_ready_once(fresh):
    names = [c["call"] for c in fresh().do(cuda_lab.call_at_once, axpy(), vectors(), 4)]
    assert names.count("cuLaunchKernelEx") == 200
    assert all(names.count(once) == 1 for once in ("cuInit", "cuLibraryLoadData", "cuDevicePrimaryCtxRetain"))


def test_a_fork_before_any_call(fresh):
    assert fresh().do(cuda_lab.call_in_fork, axpy(), vectors()) == 0


def test_loading_touches_no_driver(fresh):
    process = fresh()
    assert process.do(cuda_lab.load_alone, axpy()) == []
