"""The back end of NVIDIA GPUs: what is built and told, and what is refused before or after nvcc ran."""

from __future__ import annotations

import functools
import os
import re
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import cuda_array
import cuda_lab
import cuda_programs
import pytest

import tlhub_cuda
from tlhub.build import check, compiler, pool, shim
from tlhub.build.program import Branch, DeviceProgram, Parameter, TensorMap
from tlhub.errors import BuildError
from tlhub.problem import make, signature
from tlhub_cuda import backend, image, launches, nvcc
from tlhub_cuda.nvcc import Usage

ARCHS = ("sm_75", "sm_80", "sm_90a", "compute_80")


@functools.cache
def axpy(arch="sm_90a"):
    return cuda_lab.build("cuda_programs:axpy", cuda_lab.AXPY, arch=f"cuda:{arch}")


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_published(arch):
    made = axpy(arch)
    data = Path(made.linked).read_bytes()
    found = check.check(data, made.built.machine, shim.EXPORTS)
    assert all(name.startswith(("libtvm_ffi", "libc.so")) for name in found.needed)
    assert found.exports == set(shim.EXPORTS)
    assert len(data) < (64 << 10) + len(cuda_lab.device_code(made.linked))
    assert made.built.resources["library"] == len(data)
    assert sorted(os.listdir(made.folder)) == ["kernel.so", "program.cu"] == sorted(made.built.members)
    assert "__global__ void axpy" in Path(made.folder, "program.cu").read_text()


@pytest.mark.parametrize("arch", ARCHS)
def test_the_device_code_is_for_the_arch(arch):
    code = cuda_lab.device_code(axpy(arch).linked)
    assert image.parameters(code) == {"axpy": (8, 8, 8, 4, 4)}
    if arch.startswith("compute"):
        assert b".target sm_80" in code
    else:
        number = int(arch.strip("sm_a"))
        flags = int.from_bytes(code[48:52], "little")
        assert number in (flags & 0xFF, flags >> 8 & 0xFF)


def test_what_is_told():
    built = axpy().built
    assert built.resources["registers"] >= 8 and built.resources["spills"] == built.resources["shared_memory"] == 0
    assert built.toolchain["nvcc"] == nvcc.find().version and built.toolchain["cc"]
    assert built.least_driver == nvcc.least_driver(nvcc.find().release, "sm_90a") and built.warnings == ()
    assert axpy("compute_80").built.resources.keys() == built.resources.keys()


def test_each_kernel_of_several_is_told():
    used = cuda_lab.build("cuda_programs:scale", cuda_lab.SCALE).built.resources
    assert {k.partition(".")[2] for k in used if k.startswith("scale_tiles.")} == {
        "registers",
        "spills",
        "shared_memory",
    }
    assert used["shared_memory"] == used["scale_tiles.shared_memory"] >= 100 << 10
    assert used["scale_plain.shared_memory"] == 0
    assert used["registers"] == max(used["scale_tiles.registers"], used["scale_plain.registers"])


def test_a_library_that_may_need_scratch_memory_says_so():
    data = Path(cuda_lab.build("cuda_programs:sums", cuda_lab.SUM).linked).read_bytes()
    assert check.read(data).exports == {*shim.EXPORTS, shim.WORKSPACE_EXPORT}


def test_spills_and_warnings():
    built = cuda_lab.build("cuda_programs:warns", cuda_lab.AXPY).built
    assert built.resources["spills"] > 0 and built.resources["registers"] <= 64
    (warning,) = built.warnings
    assert 'variable "unused" was declared but never referenced' in warning and warning.startswith("program.cu(")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("no_program", "a program of toolchain 'cuda' returns a CudaProgram; this one returned str"),
        ("unknown_strides", "axpy: strides of 'q' are given; the contract has a, b, c"),
        ("broken", r'failed:\n(.*\n)*.*program.cu\(1\): error: identifier "no" is undefined'),
        ("mangled", "the device code has no function 'axpy'; it has _Z4axpy.*: is it extern \"C\" __global__"),
        ("other", r"the device code has no function 'axpy'; it has saxpy \(did you mean 'saxpy'\?\)"),
        ("longer", r"'axpy' takes parameters of \(8, 8, 8, 4, 8\) bytes, and a launch passes \(8, 8, 8, 4, 4\)"),
        ("greedy", "'axpy' would have 233472 bytes of shared memory a block; sm_90a has at most 232448"),
    ],
)
def test_programs_that_are_refused(program, text):
    with pytest.raises(BuildError, match=text):
        cuda_lab.build(f"cuda_programs:{program}", cuda_lab.AXPY)


MAP = TensorMap("float16", "DATA(a)", ("N",), (), (64,))


def change(**fields):
    return (Branch((replace(cuda_programs.AXPY_LAUNCH, **fields),)),)


def passing(*parameters):
    return change(parameters=parameters)


@pytest.mark.parametrize(
    ("branches", "text"),
    [
        ((), "axpy: the program has no branch"),
        ((Branch(()),), "branch 0: it has no launch"),
        (change() * 2, "branch 0: it has no condition, so that no call comes to those after it"),
        ((replace(change()[0], when="M > 3"),), "condition 'M > 3': it names 'M'; there are N, alpha"),
        ((replace(change()[0], workspace="4 * SIZE"),), "workspace '4 \\* SIZE': it names 'SIZE'"),
        (change(kernel="ns::axpy"), "launch of 'ns::axpy': this is no name of an extern \"C\" function"),
        (change(grid=("N", 1)), r"grid \('N', 1\); it has three sizes"),
        (change(grid=("CEIL_DIV(n, 2)", 1, 1)), r"grid 'CEIL_DIV\(n, 2\)': it names 'n'"),
        (change(block=(33, 32, 1)), r"block \(33, 32, 1\); it has three sizes of at least 1.* at most 1024 in all"),
        (change(block=(1, 1, 65)), r"block \(1, 1, 65\)"),
        (change(block=(0, 1, 1)), r"block \(0, 1, 1\)"),
        (change(cluster=(8, 4, 1)), r"cluster \(8, 4, 1\)"),
        (passing(Parameter("half", "alpha")), "parameter 0: type 'half'; it may be a pointer, or bool"),
        (passing(Parameter("int", "beta")), "parameter 0: 'beta': it names 'beta'"),
        (passing(Parameter("void *", "WORKSPACE")), "'WORKSPACE': it names WORKSPACE where the branch has none"),
        ((replace(change()[0], workspace="N", when="WORKSPACE != 0"),), "it names WORKSPACE where the branch has none"),
        (passing(Parameter("void *", "DATA(q)")), r"parameter 0: 'DATA\(q\)': DATA\(q\) names no array .* a, b, c"),
        (passing(Parameter("int", "STRIDE(a, 1)")), r"STRIDE\(a, 1\): 'a' has 1 dims"),
        (passing(Parameter("int", "EXTENT(a)")), r"EXTENT\(a\): 'a' has 1 dims"),
        (passing(replace(MAP, dtype="float4")), "a tensor map of 'float4'; it may be of bool"),
        (passing(replace(MAP, strides=(2,))), "a tensor map with 1 dims, 1 strides and a box of 1; of n dims"),
        (passing(replace(MAP, dims=("N",) * 6, strides=("N",) * 5, box=(8,) * 6)), "6 dims, 5 strides"),
        (passing(replace(MAP, swizzle=16)), "swizzle 16 and promotion 256; they may be 0, 32, 64, 128"),
        (passing(replace(MAP, box=(257,), swizzle=0)), r"box \(257,\) of float16, 514 bytes a row"),
        (passing(replace(MAP, box=(65,), swizzle=0)), r"box \(65,\) of float16, 130 bytes a row"),
        (passing(replace(MAP, box=(128,))), r"box \(128,\) of float16, 256 bytes a row.* do not exceed the swizzle"),
        (passing(replace(MAP, address="DATA(b) + Q")), "it names 'Q'"),
    ],
)
def test_launches_that_are_refused(branches, text):
    with pytest.raises(BuildError, match=text):
        _check(branches)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"N": 1}, "value 'N': that is the name of something else"),
        ({"a": 1}, "value 'a': that is the name of something else"),
        ({"SMS": 1}, "value 'SMS': that is the name of something else"),
        ({"DATA": 1}, "value 'DATA': that is the name of something else"),
        ({"_x": 1}, "value '_x': that is no name of a value"),
        ({"tlhub_x": 1}, "value 'tlhub_x': that is no name of a value"),
        ({"x y": 1}, "value 'x y': that is no name of a value"),
        ({"x": "y", "y": 1}, "value 'x': 'y': it names 'y'; there are N, alpha"),
        ({"x": "WORKSPACE != 0"}, "it names WORKSPACE where the branch has none"),
    ],
)
def test_values_that_are_refused(values, text):
    with pytest.raises(BuildError, match=text):
        _check(change(), values=values)


def _check(branches, arch="sm_90a", contract=cuda_lab.AXPY, values=None):
    problem = make(contract, tuple(d.name for d in contract.dims), "float32", {})
    program = DeviceProgram("program.cu", "tlhub_program", (), "program.cu", {}, branches=branches, values=values or {})
    launches.check(program, problem, signature(contract, problem), arch)


@pytest.mark.parametrize(
    "value", ["N", "alpha * 2.5e3f", "(int64_t)N + 0x1Full", "N > 3 ? SMS : 4", "STRIDE( a ,0)", 7]
)
def test_launches_that_are_fine(value):
    _check(passing(Parameter("int64_t", value), Parameter("const void *", "(char *)DATA(a) + 16"), MAP))
    _check(change(cluster=(16, 1, 1), programmatic=True))
    _check(change(grid=("y", 1, 1)), values={"x": value, "y": "MAX(x, 1)"})


@pytest.mark.parametrize("fields", [{"cluster": (2, 1, 1)}, {"programmatic": True}, {"parameters": (MAP,)}])
@pytest.mark.parametrize("arch", ["sm_75", "sm_89", "compute_80"])
def test_what_came_with_hopper(fields, arch):
    with pytest.raises(BuildError, match=f"need sm_90 or later, and this is {arch}"):
        _check(change(**fields), arch)


@pytest.mark.parametrize(
    ("registers", "threads", "fits"),
    [(255, 256, True), (65, 1024, False), (64, 1024, True), (168, 384, True), (169, 384, False)],
)
def test_registers_of_a_block(registers, threads, fits):
    program = DeviceProgram("", "", (), "", {}, branches=change(block=(threads, 1, 1)))
    used = {"axpy": Usage(registers, 0, 0)}
    if fits:
        return launches.check_code(program, "axpy", {"axpy": (8, 8, 8, 4, 4)}, used, "sm_90a")
    with pytest.raises(BuildError, match=rf"{registers} registers in each of {threads} threads.*__launch_bounds__"):
        launches.check_code(program, "axpy", {"axpy": (8, 8, 8, 4, 4)}, used, "sm_90a")


def test_a_torn_cubin():
    code = cuda_lab.device_code(axpy().linked)
    with pytest.raises(BuildError, match="nvcc wrote no sound cubin"):
        image.parameters(code[:60])


def test_a_cubin_that_leaves_a_parameter_out():
    """The record of the second of five, which the driver would need too."""
    code = cuda_lab.device_code(axpy().linked)
    record = struct.pack("<BBHIHH", 4, 0x17, 12, 0, 1, 8)
    assert code.count(record) == 1
    with pytest.raises(BuildError, match="nvcc wrote no sound cubin"):
        image.parameters(code.replace(record, struct.pack("<BBHIHH", 4, 0x17, 12, 0, 9, 8)))


def test_parameters_of_ptx():
    text = """
.visible .entry one(
	.param .align 64 .b8 one_param_0[128],
	.param .u64 .ptr .align 1 one_param_1,
	.param .f32 one_param_2
)
.maxntid 256, 1, 1
{
.entry two()
{
"""
    assert image.parameters(text.encode()) == {"one": (128, 8, 4), "two": ()}


def test_a_folder_of_any_name(tmp_path):
    folder = tmp_path / "a b'c$x"
    folder.mkdir()
    made = cuda_lab.build("cuda_programs:axpy", cuda_lab.AXPY, folder=str(folder))
    assert sorted(os.listdir(folder)) == ["kernel.so", "program.cu"] and made.built.resources["library"]


@pytest.mark.slow
def test_another_c_compiler_takes_the_device_code(monkeypatch):
    """zig remembers what it compiled by the text, and the device code is in another file."""
    pytest.importorskip("ziglang", reason="ziglang is not installed")
    cuda_lab.needs_nvcc()
    home = Path(nvcc.find().command).parent.parent
    for name, value in (("CUDA_HOME", str(home)), ("NVCC_CCBIN", shutil.which("gcc") or ""), ("PATH", ""), ("CC", "")):
        monkeypatch.setenv(name, value)
    builder = pool.Pool(size=1)
    try:
        code = []
        for number in (3, 4, 3):
            config = {"source": cuda_programs.AXPY.replace("b[i]", f"{number} * b[i]")}
            made = cuda_lab.build("cuda_programs:axpy", cuda_lab.AXPY, config=config, builder=builder)
            assert made.built.toolchain["cc"].startswith("zig ")
            code.append(cuda_lab.device_code(made.linked)[:4096])
    finally:
        builder.close()
    assert code[0] != code[1] and code[0] == code[2]


def test_a_dim_of_a_fixed_extent_and_one_seen_through_its_symbol(driver):
    """Names of dims are values in every case: given, or of the first array that has their symbol."""
    made = cuda_lab.build("cuda_programs:scale", cuda_lab.SCALE, (8, "M"))
    said = driver.do(
        cuda_lab.call, made.linked, [cuda_array.Array((8, 48), 1 << 30), cuda_array.Array((8, 48), 1 << 40), None, 1.0]
    )
    assert said.maps()[0]["dims"] == [48, 8]


LAYOUT = """
#include <cuda.h>
#include "cuda_launch.c"
#define SAME(ours, theirs) _Static_assert((ours) == (theirs), #ours)
SAME(sizeof(config_t), sizeof(CUlaunchConfig));
SAME(offsetof(config_t, block), offsetof(CUlaunchConfig, blockDimX));
SAME(offsetof(config_t, shared), offsetof(CUlaunchConfig, sharedMemBytes));
SAME(offsetof(config_t, stream), offsetof(CUlaunchConfig, hStream));
SAME(offsetof(config_t, attributes), offsetof(CUlaunchConfig, attrs));
SAME(offsetof(config_t, count), offsetof(CUlaunchConfig, numAttrs));
SAME(sizeof(attribute_t), sizeof(CUlaunchAttribute));
SAME(offsetof(attribute_t, value), offsetof(CUlaunchAttribute, value));
SAME(ATTRIBUTE_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(ATTRIBUTE_CLUSTER, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(ATTRIBUTE_PROGRAMMATIC, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(RELAXED_CAPTURE, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(MULTIPROCESSOR_COUNT, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(MAX_DYNAMIC_SHARED_SIZE, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(NON_PORTABLE_CLUSTER, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
SAME(sizeof(tlhub_map), sizeof(CUtensorMap));
SAME(_Alignof(tlhub_map), 64);
"""


def test_structs_and_numbers_are_the_drivers(tmp_path):
    """What the launches take the driver's interface for is what cuda.h says, where there is one."""
    cuda_lab.needs_nvcc()
    include = Path(os.path.realpath(nvcc.find().command)).parent.parent / "include"
    if not (include / "cuda.h").exists():
        said = subprocess.run([nvcc.find().command, "--dryrun", "x.cu"], capture_output=True, text=True, check=False)
        tops = [line.partition("TOP=")[2] for line in said.stderr.splitlines() if "TOP=" in line]
        include = Path(tops[0] if tops else "/", "include")
    if not (include / "cuda.h").exists():
        pytest.skip("no cuda.h beside nvcc")
    numbers = "".join(
        f"SAME({ours}, {theirs});\n"
        for ours, theirs in [
            *((n, f"CU_TENSOR_MAP_DATA_TYPE_{t}") for t, n in _map_types()),
            *((n, f"CU_TENSOR_MAP_SWIZZLE_{b or 'NONE'}{'B' if b else ''}") for b, n in launches.SWIZZLES.items()),
            *((n, f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{b}B' if b else 'NONE'}") for b, n in launches.PROMOTIONS.items()),
        ]
    )
    launch_c = Path(backend.__file__).with_name("cuda_launch.c").read_text()
    errors = re.findall(r"^  ([A-Z_]+) = \d+,$", launch_c, re.MULTILINE)
    assert len(errors) == 27
    numbers += "".join(f"SAME({name}, CUDA_ERROR_{name});\n" for name in errors)
    (tmp_path / "layout.c").write_text(LAYOUT + numbers)
    folders = [Path(backend.__file__).parent, Path(shim.__file__).parent, include]
    compiler.find(compiler.here()).run(
        str(tmp_path), [*(f"-I{f}" for f in folders), "-std=c11", "-fsyntax-only", "layout.c"], include=True
    )


def _map_types():
    """Yield the driver's name of each dtype of a tensor map that has one of its own, and our number."""
    for dtype in ("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "tfloat32"):
        yield dtype.upper(), launches.MAP_TYPES[dtype][0]
    yield "BFLOAT16", launches.MAP_TYPES["bfloat16"][0]


def test_what_is_needed_is_asked_for_by_name():
    assert backend.identity("cuda:sm_90a").keys() == {"nvcc", "cc", "host"}
    assert tlhub_cuda.TARGET.assemble == "tlhub_cuda.backend:assemble"
