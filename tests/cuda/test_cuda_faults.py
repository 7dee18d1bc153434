"""What the driver lacks or refuses: what a call says of it, and what it leaves behind."""

from __future__ import annotations

import cuda_lab
import pytest
from cuda_calls import axpy, matrices, rows, scale, sums, vectors


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
