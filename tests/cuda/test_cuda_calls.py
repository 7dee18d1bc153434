"""Calls of a library for NVIDIA GPUs: what the driver is asked for, and what is refused before it is."""

from __future__ import annotations

import functools
from dataclasses import replace

import cuda_lab
import pytest
from cuda_lab import Array, number

KIB = 1 << 10


@functools.cache
def axpy():
    return cuda_lab.build("cuda_programs:axpy", cuda_lab.AXPY).linked


@functools.cache
def scale():
    return cuda_lab.build("cuda_programs:scale", cuda_lab.SCALE).linked


@functools.cache
def sums():
    return cuda_lab.build("cuda_programs:sums", cuda_lab.SUM).linked


def vectors(n=1000, **fields):
    """Arguments of axpy: a, b, c, no workspace, alpha."""
    return [*(Array((n,), (i + 1) << 20, **fields) for i in range(3)), None, 2.5]


def matrices(m, n, alpha=1.0, **a):
    """Arguments of scale: a, with its fields, then c, no workspace, alpha."""
    return [Array((m, n), **{"address": 1 << 30, **a}), Array((m, n), 1 << 40), None, alpha]


def rows(m, n, workspace=None):
    """Arguments of sums."""
    return [Array((m, n), 1 << 30), Array((m,), 1 << 40), workspace]


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


def test_arrays_without_a_driver(fresh):
    """Arguments are looked at first, and then the driver: that there is none is one line."""
    process = fresh("/var/empty")
    wrong = process.do(cuda_lab.call, axpy(), vectors(dtype="float16"))
    assert wrong.error.startswith("TypeError: axpy: argument 'a': expected dtype float32, got float16")
    host = process.do(cuda_lab.call, axpy(), vectors(device_type=1))
    assert host.error.endswith("argument 'a': expected an array on cuda, got one on cpu")
    for _ in range(2):
        right = process.do(cuda_lab.call, axpy(), vectors())
        assert right.error == "RuntimeError: axpy: no CUDA driver: libcuda.so.1 was not found"
    assert process.do(cuda_lab.call, axpy(), vectors(0)).error is None
    assert process.do(cuda_lab.call, sums(), rows(0, 500), name="tlhub_workspace").result == 0


def test_a_driver_that_is_too_old(fresh):
    said = fresh(FAKE_LACKS="cuLibraryLoadData").do(cuda_lab.call, axpy(), vectors())
    assert said.error == (
        "RuntimeError: axpy: the CUDA driver is too old: it has no cuLibraryLoadData; "
        "a driver for CUDA 12 or later has it"
    )


def test_a_driver_that_cannot_be_asked(fresh, tmp_path):
    """cuGetProcAddress_v2 came with CUDA 12: of one before it nothing else is known."""
    made = cuda_lab.compiled_driver(str(tmp_path), "-DcuGetProcAddress_v2=cuGetProcAddress")
    said = fresh(made).do(cuda_lab.call, axpy(), vectors())
    assert said.error == (
        "RuntimeError: axpy: the CUDA driver is too old: it has no cuGetProcAddress_v2; "
        "a driver for CUDA 12 or later has it"
    )


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("cuInit", 3, "scale: cuInit failed: CUDA_ERROR_NOT_INITIALIZED (initialization error)"),
        ("cuDevicePrimaryCtxRetain", 2, "cuDevicePrimaryCtxRetain failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"),
        ("cuLibraryLoadData", 200, "cuLibraryLoadData failed: error 200, which the driver has no name for"),
        ("cuKernelGetFunction", 2, "cuKernelGetFunction of scale_tiles failed"),
        ("cuKernelSetAttribute", 1, "cuKernelSetAttribute (shared memory) of scale_tiles failed"),
        (
            "cuTensorMapEncodeTiled",
            1,
            "cuTensorMapEncodeTiled for parameter 0 of scale_tiles failed: CUDA_ERROR_INVALID_VALUE (invalid argument)"
            ": address 0x40000000, dims (64, 16), strides in bytes (256,)",
        ),
        ("cuLaunchKernelEx", 1, "cuLaunchKernelEx of scale_tiles failed: CUDA_ERROR_INVALID_VALUE (invalid argument)"),
    ],
)
def test_what_the_driver_refuses(fresh, call, code, text):
    process = fresh()
    said = process.do(cuda_lab.call, scale(), matrices(16, 64), fail=(call, 0, code))
    assert said.error.startswith("RuntimeError: scale: ") and text in said.error and "\n" not in said.error
    after = process.do(cuda_lab.call_in_context, scale(), matrices(16, 64), 3)
    assert after[0].error is None and after[0].launches() and after[1] == 3


@pytest.mark.parametrize(
    ("call", "code", "nothing"),
    [
        ("cuLibraryLoadData", 209, True),  # no code for the GPU
        ("cuLibraryLoadData", 222, True),  # PTX of a later toolkit
        ("cuLibraryGetKernel", 500, True),
        ("cuKernelGetFunction", 209, True),
        ("cuKernelSetAttribute", 1, True),  # too much shared memory
        ("cuLaunchKernelEx", 701, True),  # too many registers
        ("cuLaunchKernelEx", 1, True),
        ("cuLibraryLoadData", 2, False),  # out of memory: whose code it is does not matter
        ("cuLaunchKernelEx", 2, False),
        ("cuDeviceGet", 1, False),
        ("cuTensorMapEncodeTiled", 1, False),  # the arrays' fault
    ],
)
def test_what_other_code_may_do_better_is_said(fresh, call, code, nothing):
    said = fresh().do(cuda_lab.call, scale(), matrices(16, 64), fail=(call, 0, code))
    assert said.error.endswith("; nothing was launched") == nothing


def test_after_a_launch_nothing_is_tried_in_its_place(fresh):
    process = fresh()
    process.do(cuda_lab.call, axpy(), vectors())
    for device in (0, 1):
        fail = ("cuLaunchKernelEx" if device == 0 else "cuKernelGetFunction", 0, 1)
        said = process.do(cuda_lab.call, axpy(), vectors(device=device), device=device, fail=fail)
        assert "INVALID_VALUE" in said.error and "nothing was launched" not in said.error


@pytest.mark.parametrize("code", [214, 700, 715, 716, 719])
def test_faults_after_which_the_process_must_restart(fresh, code):
    said = fresh().do(cuda_lab.call, scale(), matrices(16, 64), fail=("cuLaunchKernelEx", 0, code))
    assert said.error.endswith("the GPU's context is lost by a fault of some kernel, and this process must restart")


def test_a_capture_mode_that_cannot_be_set_is_left_alone(fresh):
    process, exchange = fresh(), "cuThreadExchangeStreamCaptureMode"
    said, after = process.do(cuda_lab.call_in_context, axpy(), vectors(), 3, fail=(exchange, 0, 2))
    assert said.error.startswith(f"RuntimeError: axpy: {exchange} failed: CUDA_ERROR_OUT_OF_MEMORY") and after == 3
    assert said.names.count(exchange) == 1 and "cuLibraryLoadData" not in said.names
    said = process.do(cuda_lab.call, axpy(), vectors())
    assert said.error is None and [c["mode"] for c in said.calls if c["call"] == exchange] == [2, 0]


def test_a_capture_mode_that_cannot_be_set_back_is_told(fresh):
    exchange = "cuThreadExchangeStreamCaptureMode"
    said, after = fresh().do(cuda_lab.call_in_context, axpy(), vectors(), 3, fail=(exchange, 1, 2))
    assert said.error.startswith(f"RuntimeError: axpy: {exchange} failed") and after == 3 and not said.launches()


@pytest.mark.parametrize("skip", [0, 1])
def test_a_context_that_cannot_be_left_is_told(fresh, skip):
    """Once after what is made ready, once after the launch."""
    said = fresh().do(cuda_lab.call, axpy(), vectors(), fail=("cuCtxPopCurrent", skip, 1))
    assert said.error == "RuntimeError: axpy: cuCtxPopCurrent failed: CUDA_ERROR_INVALID_VALUE (invalid argument)"
    assert len(said.launches()) == skip


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
