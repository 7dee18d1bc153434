"""What may be published: facts read from bytes, and what each wrong library is refused for."""

from __future__ import annotations

import platform
import subprocess

import lab
import pytest

from tlhub.build import check, shim
from tlhub.errors import BuildError

MACHINE = platform.machine()
GOOD = ["-Wl,-z,now", "-Wl,-z,noexecstack"]
SOURCE = "int __tvm_ffi_main(void) { return 0; }\n"


def link(folder, source, *flags):
    (folder / "x.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "x.c", "-o", "x.so", *flags], cwd=folder, check=True)
    return (folder / "x.so").read_bytes()


def test_a_built_library_says_what_it_is():
    _, _, data = lab.linked("add")
    library = check.check(data, MACHINE, shim.EXPORTS)
    assert library.machine == MACHINE and library.bind_now and not library.run_path
    assert library.exports == {*shim.EXPORTS, *shim.POOL_EXPORTS}
    assert "libtvm_ffi.so" in library.needed
    assert tuple(map(int, library.glibc.split("."))) >= (2, 2)
    assert {name for name, version, _ in library.undefined if name.startswith("TVMFFI")} <= set(shim.TVM_FFI)


def test_what_is_right_passes(tmp_path):
    check.check(link(tmp_path, SOURCE, *GOOD), MACHINE, ["__tvm_ffi_main"])


@pytest.mark.parametrize(
    ("source", "flags", "reason"),
    [
        ("int other(void) { return 0; }", GOOD, "does not export __tvm_ffi_main"),
        (SOURCE + "extern int far(void); int f(void) { return far(); }", GOOD, "symbol 'far' is undefined"),
        (SOURCE, ["-Wl,-z,lazy", "-Wl,-z,noexecstack"], "not linked with -z now"),
        (SOURCE, [*GOOD, "-Wl,-rpath,/somewhere"], "has a run path, '/somewhere'"),
        (SOURCE, [*GOOD, "-Wl,--no-as-needed", "-lgcc_s"], "needs libgcc_s.so.1"),
        (SOURCE, ["-Wl,-z,now", "-Wl,-z,execstack"], "executable stack"),
    ],
)
def test_what_is_wrong_is_refused(tmp_path, source, flags, reason):
    with pytest.raises(BuildError, match=reason):
        check.check(link(tmp_path, source, *flags), MACHINE, ["__tvm_ffi_main"])


def test_another_machine_is_refused():
    _, _, data = lab.linked("add")
    other = data[:18] + (243).to_bytes(2, "little") + data[20:]
    with pytest.raises(BuildError, match=f"it is for machine 243, not for {MACHINE}"):
        check.check(other, MACHINE, shim.EXPORTS)


def test_a_program_is_no_library(tmp_path):
    (tmp_path / "x.c").write_text("int main(void) { return 0; }\n")
    subprocess.run(["cc", "-no-pie", "x.c", "-o", "x"], cwd=tmp_path, check=True)
    with pytest.raises(BuildError, match="no shared library"):
        check.read((tmp_path / "x").read_bytes())
    with pytest.raises(BuildError, match="no 64-bit"):
        check.read(b"#!/bin/sh\n")


def test_torn_and_altered_bytes_never_raise_anything_else():
    _, _, data = lab.linked("add")
    for end in [*range(0, 4096, 61), *range(4096, len(data), 997)]:
        with pytest.raises(BuildError):
            check.check(data[:end], MACHINE, shim.EXPORTS)
    for at in range(0, 4096, 3):
        altered = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
        try:
            check.check(altered, MACHINE, shim.EXPORTS)
        except BuildError:
            pass


def test_symbols_of_an_object(tmp_path):
    (tmp_path / "x.c").write_text("int far(void); __attribute__((weak)) int w; int f(void) { return far() + w; }\n")
    subprocess.run(["cc", "-c", "-fPIC", "x.c", "-o", "x.o"], cwd=tmp_path, check=True)
    symbols = check.object_symbols((tmp_path / "x.o").read_bytes())
    assert symbols["f"] and symbols["w"] and symbols["far"] is False
    with pytest.raises(BuildError, match="no sound object file"):
        check.object_symbols(b"\x7fELF" + bytes(10))
