"""Programs to libraries: TIR, TE, s_tir; what a wrong one gets; what a build leaves behind."""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import replace

import lab
import numpy as np
import pytest

from tlhub.build import check, compiler, library, shim
from tlhub.build.frontends import tvm as frontend
from tlhub.build.program import ANY, Buffer, DeviceProgram
from tlhub.errors import BuildError
from tlhub.problem import make, signature
from tlhub.specs import Scalar

A = np.random.default_rng(0).standard_normal((6, 8), "float32")


def test_a_module_may_have_helpers():
    kernel = lab.compiled("helped")
    np.testing.assert_array_equal(kernel(A, A, alpha=3.0), 3 * (A + A))


@pytest.mark.parametrize("program", ["te", "scheduled"])
def test_te_and_scheduled_programs(program):
    kernel = lab.compiled(program, "add", (1, 6, 8))
    np.testing.assert_array_equal(kernel(A, A, alpha=3.0), 3 * (A + A))
    np.testing.assert_array_equal(kernel(A[None], A), 2 * A[None])
    with pytest.raises(ValueError, match="argument 'a'"):
        kernel(A.T, A.T)


def test_what_a_build_leaves(tmp_path):  # A55
    folder = tmp_path / "a b'c$x \"ü"
    folder.mkdir()
    made = lab.build("add", folder=folder)
    assert sorted(os.listdir(folder)) == ["kernel.so", "program.tir"] == sorted(made.built.members)
    assert "T.prim_func" in (folder / "program.tir").read_text()
    assert made.built.machine == platform.machine() and made.built.glibc and made.built.seconds > 0
    assert {"apache-tvm", "llvm", "cc"} <= set(made.built.toolchain)
    assert made.built.abi == "tvm-ffi 0.1"
    assert made.built.resources["library"] == (folder / "kernel.so").stat().st_size < 100_000


def test_the_same_program_gives_the_same_bytes(tmp_path):
    first = lab.read(lab.build("add"))
    lab.build("moments", lab.MOMENTS)
    assert lab.read(lab.build("add", folder=tmp_path)) == first
    assert str(tmp_path).encode() not in first and os.getcwd().encode() not in first


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("nothing", "returned int"),
        ("two", "IRModule with 2 such among 2"),
        ("calls_out", "only TVM's runtime has"),
        ("wrong_scalar", "parameter 'alpha' for scalar 'alpha' is float32, not float64"),
        ("wrong_dtype", "argument 'b' has dtype 'int32'; the contract asks for 'float32'"),
        ("wrong_rank", r"argument 'a' has 2 dims; the contract gives it 3: \(B, M, N\)"),
        ("claims", "argument 'a' has 64 in dim N; the problem asks for any extent"),
        ("raises", r"lab_programs:raises failed: RuntimeError: no tile of this size\n.*lab_programs.py:\d+ in raises"),
        ("missing", "no callable 'missing'"),
    ],
)
def test_a_wrong_program_is_told_what_is_wrong(program, reason):
    with pytest.raises(BuildError, match=reason) as caught:
        lab.build(program)
    assert os.path.isfile(caught.value.log)
    os.unlink(caught.value.log)


def test_a_hint_of_the_workers_comes_last():
    with pytest.raises(BuildError, match="parameter 'a' for argument 'a' is no buffer") as caught:
        lab.build("no_array")
    assert caught.value.hint.startswith("T.match_buffer(a, ")
    assert str(caught.value).splitlines()[-1] == f"hint: {caught.value.hint}"


def test_a_program_with_too_few_parameters():
    kernel = replace(lab.ADD, scalars=(*lab.ADD.scalars, Scalar("beta")))
    with pytest.raises(BuildError, match=r"4 parameters \(.*\); the contract asks for 5: a, b, c, alpha, beta"):
        lab.build("add", kernel)


def test_modules_that_cannot_be_imported():
    with pytest.raises(BuildError, match="'no_such_module:f' cannot be imported: No module named"):
        lab.build(lab.schedule("f", module="no_such_module"))
    with pytest.raises(BuildError, match="no front end for toolchain 'tvn'.*\nhint: did you mean 'tvm'"):
        lab.build(lab.schedule("add", toolchain="tvn"))


def test_without_apache_tvm_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match="apache-tvm is not installed") as caught:
        frontend.prepare()
    assert caught.value.hint == 'pip install "tlhub-core[tvm]"'


# -- the compiler ------------------------------------------------------------------------------------


def test_the_variable_comes_first(monkeypatch):
    monkeypatch.setenv("CC", "gcc -pipe")
    found = compiler.find(platform.machine())
    assert found.command == ("gcc", "-pipe") and "gcc" in found.version.lower()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiler.find(platform.machine()).command != ("no-such-compiler",)


def test_without_a_compiler_everything_looked_for_is_named(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError) as caught:
        compiler.find("x86_64")
    for name in ("no-such-compiler -O2", "cc", "gcc", "clang", "python -m ziglang"):
        assert name in str(caught.value)
    assert caught.value.hint == 'pip install "tlhub-core[cc]"'


def test_what_the_compiler_says_is_told(tmp_path):
    (tmp_path / "bad.c").write_text("int f( {\n")
    with pytest.raises(BuildError, match="bad.c:1"):
        compiler.find(platform.machine()).run(str(tmp_path), ["-c", "bad.c"])


def test_a_compiler_is_its_version_and_not_where_it_was_found(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    first = compiler.find(platform.machine())
    (tmp_path / first.command[0]).symlink_to(shutil.which(first.command[0]))
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path), os.environ["PATH"])))
    again = compiler.find(platform.machine())
    assert shutil.which(again.command[0]).startswith(str(tmp_path)) and again.version == first.version


def test_zig_is_the_last_resort(monkeypatch):
    pytest.importorskip("ziglang", reason="ziglang is not installed")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    for machine in ("x86_64", "aarch64"):
        found = compiler.find(machine)
        assert found.command[1:] == ("-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.2.17")
        assert re.match(r"zig \d+\.\d+", found.version)


@pytest.mark.slow
def test_another_machine_is_compiled_for(tmp_path):
    """Slow for its first run only: zig compiles the C library's start files."""
    pytest.importorskip("ziglang", reason="ziglang is not installed")
    other = "cpu:aarch64" if platform.machine() == "x86_64" else "cpu:x86-64-v2"
    made = lab.build("add", arch=other, folder=tmp_path)
    library = check.read(lab.read(made))
    assert made.built.machine == library.machine != platform.machine()
    assert {*shim.EXPORTS, *shim.POOL_EXPORTS} <= library.exports and library.bind_now


# -- the contract -------------------------------------------------------------------------------------


def contract(problem=None, **changes):
    problem = problem or make(lab.ADD, (3, "N"), "float32", {})
    sign = signature(lab.ADD, problem)._replace(**changes)
    program = DeviceProgram("program.o", "f", tuple(Buffer(n, "float32", 3, ANY) for n in "abc"), "x", {})
    return shim.contract(problem, sign, program, 1)


def test_names_and_numbers_survive_c():
    text = contract(
        scalars=(Scalar('a"\\\n?é', default=0.1), Scalar("n", "int", 2**62), Scalar("i", default=float("inf")))
    )
    assert '"a\\042\\134\\012\\077\\303\\251"' in text
    assert (0.1).hex() in text and str(2**62) in text and "__builtin_inf()" in text
    assert '{"M", 3, -1, 0}' in text and '{"N", -1, -1, 0}' in text


def test_a_default_that_is_no_rule_is_refused():
    for default in ("1/sqrt(Q)", "2*M"):
        with pytest.raises(BuildError, match="may be a number or '1/sqrt"):
            contract(scalars=(Scalar("s", default=default),))


def test_what_the_shim_cannot_hold_is_refused():
    sign = signature(lab.ADD, make(lab.ADD, (3, 4), "float32", {}))
    with pytest.raises(BuildError, match="takes 3 arrays, and the contract names 2"):
        contract(inputs=sign.inputs[:1])
    with pytest.raises(BuildError, match="26 arrays; the host shim takes at most 24"):
        contract(inputs=sign.inputs[:1] * 25)
    wide = sign.inputs[0]._replace(dims=("M",) * 9, extents=(3,) * 9)
    with pytest.raises(BuildError, match="9 dims in argument 'a'; the host shim takes at most 8"):
        contract(inputs=(wide, sign.inputs[1]))


def test_the_identity_of_a_library_names_the_code_that_all_have():
    """A host shim that was mended makes other libraries, though the program is what it was."""
    machine = compiler.here()
    first, again = (library.Base({"a.c": "int a;\n"}).identity(machine) for _ in range(2))
    assert first == again and first.keys() == {"cc", "host"}
    assert library.Base({"a.c": "int a = 1;\n"}).identity(machine)["host"] != first["host"]
    assert library.Base({"a.c": "int a;\n"}, writers=(compiler,)).identity(machine)["host"] != first["host"]
