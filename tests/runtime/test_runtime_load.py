"""Loading: from sealed memory or a private copy, once, and only what tlhub built."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import lab
import numpy as np
import pytest

from tlhub.errors import CacheError
from tlhub.runtime import load
from tlhub.runtime.load import load_entry, load_library

A = np.ones((3, 4), "float32")


def run(code, *arguments, torch=False, **env):
    """Run *code* in a fresh interpreter and return what it printed. Importing torch takes a second."""
    hidden = "" if torch else "import sys; sys.modules['torch'] = None\n"
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", hidden + textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def call(library):
    out = np.zeros_like(A)
    library.module["main"](A, A, out, None, None)
    assert (out == 2).all()


def test_a_name_is_loaded_once():
    _, _, data = lab.linked("add")
    first = load_library(data, "once")
    assert load_library(data, "once") is first
    assert load_library(data, "twice") is not first
    call(first)


def test_an_entry_tells_whether_it_was_loaded():
    _, _, data = lab.linked("add")
    reads = []
    entry = SimpleNamespace(
        manifest=SimpleNamespace(build_digest="d" * 64), read=lambda name: reads.append(name) or data
    )
    library, already = load_entry(entry)
    assert not already
    again, already = load_entry(entry)
    assert already and again is library and reads == ["kernel.so"]


def test_the_memory_that_is_loaded_cannot_be_changed():
    if not hasattr(os, "memfd_create"):
        pytest.skip("no memfd on this system")
    _, _, data = lab.linked("add")
    path = load._sealed(data, "sealed")
    with open(path, "rb") as file:
        assert file.read() == data
    with pytest.raises(OSError), open(path, "r+b", buffering=0) as file:
        file.write(b"x")
    with pytest.raises(OSError):
        os.truncate(path, 10)


def test_without_memfd_a_private_copy_is_loaded_and_removed(monkeypatch, tmp_path):
    _, _, data = lab.linked("add")
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    call(load_library(data, "copied"))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_loaded_from_is_named(monkeypatch, tmp_path):  # A54
    made, _, data = lab.linked("add")
    monkeypatch.delattr(os, "memfd_create", raising=False)
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(file))
    with pytest.raises(CacheError, match="noexec") as caught:
        load_library(data, "nowhere")
    assert str(file) in str(caught.value) and "TMPDIR" in str(caught.value) and "TMPDIR" in caught.value.hint


def test_a_noexec_folder_for_temporary_files(tmp_path):  # A54
    made, _, _ = lab.linked("add")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs privileges")
    try:
        code = """
            import os, sys
            import numpy as np
            from tlhub.errors import CacheError
            from tlhub.runtime import load_library
            data = open(sys.argv[1], "rb").read()
            assert load_library(data, "x")
            del os.memfd_create
            try:
                load_library(data, "y")
            except CacheError as error:
                print(error)
        """
        said = run(code, f"{made.folder}/kernel.so", TMPDIR=str(tmp_path))
        assert str(tmp_path) in said and "noexec" in said and "TMPDIR" in said
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_library_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "other.c").write_text("int __tvm_ffi_main(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "other.c", "-o", "other.so"], cwd=tmp_path, check=True)
    with pytest.raises(CacheError, match="does not export __tvm_ffi_tlhub_bind"):
        load_library((tmp_path / "other.so").read_bytes(), "other")
    with pytest.raises(CacheError, match="could not be loaded"):
        load_library(b"no library", "torn")


def test_no_hook_is_left_to_be_filled_in():
    """The pointers that TVM's runtime would set are not visible: they cannot be null nor overwritten."""
    made, _, _ = lab.linked("moments", "moments")
    import tvm_ffi  # noqa: F401 - the library needs it

    handle = ctypes.CDLL(f"{made.folder}/kernel.so")
    for name in ("__TVMBackendParallelLaunch", "__TVMBackendAllocWorkspace", "__TVMBackendFreeWorkspace"):
        with pytest.raises(AttributeError):
            getattr(handle, name)


def test_a_wrong_number_of_threads_is_told_at_the_first_load():
    made, _, _ = lab.linked("add")
    code = """
        import sys
        from tlhub.errors import ArgumentError
        from tlhub.runtime import load_library
        try:
            load_library(open(sys.argv[1], "rb").read(), "x")
        except ArgumentError as error:
            print(error)
    """
    assert "TLHUB_NUM_THREADS is 'two'" in run(code, f"{made.folder}/kernel.so", TLHUB_NUM_THREADS="two")


def test_importing_the_runtime_is_light():
    code = """
        import sys
        import tlhub.runtime, tlhub.build.pool, tlhub_cpu
        tlhub_cpu.TARGET.devices()
        heavy = {"numpy", "tvm_ffi", "tvm", "tilelang", "torch", "subprocess", "tempfile"} & set(sys.modules)
        print(sorted(heavy))
    """
    assert run(code, torch=True).strip() == "[]"


def test_torch_can_be_hidden_from_the_import_of_tvm_ffi():
    pytest.importorskip("torch", reason="torch is not installed")
    made, _, _ = lab.linked("add")
    code = """
        import sys
        from tlhub.runtime import load
        load.hide_torch()
        import numpy as np
        f = load.load_library(open(sys.argv[1], "rb").read(), "x").module["main"]
        a = np.ones((3, 4), "float32"); c = a.copy()
        f(a, a, c, None, None)
        print(sys.modules.get("torch"), (c == 2).all())
    """
    assert run(code, f"{made.folder}/kernel.so", torch=True).split() == ["None", "True"]


@pytest.mark.parametrize("program", ["add", "claims"])
def test_data_at_every_offset(program):
    """Most arrays do not start at 64 bytes: a program that believed so would kill the process."""
    made, _, _ = lab.linked(program, "add", None if program == "add" else ("B", "M", 64))
    code = """
        import sys
        import numpy as np
        from tlhub.runtime import load_library
        f = load_library(open(sys.argv[1], "rb").read(), "x").module["main"]
        memory = [np.zeros(4 * 8 * 64 + 128, np.uint8) for _ in range(3)]
        start = [-m.ctypes.data % 64 for m in memory]
        def at(i, offset):
            return memory[i][start[i] + offset :][: 4 * 8 * 64].view("float32").reshape(8, 64)
        served = refused = 0
        for i in range(64):
            for j in (0, i, 4, 20):
                a, b, c = at(0, i), at(1, j), at(2, (i * 7) % 64 if i % 4 else (i * 5) % 64)
                try:
                    a[:], b[:], c[:] = 1, 2, np.nan
                    f(a, b, c, None, None)
                    assert (c == 3).all()
                    served += 1
                except ValueError as error:
                    assert "aligned to its item size" in str(error)
                    refused += 1
        print(served, refused)
    """
    served, refused = map(int, run(code, f"{made.folder}/kernel.so").split())
    assert served + refused == 256 and served >= 48
    assert refused > 0


def test_a_call_imports_no_masked_arrays():
    """The import would hold a lock in one thread that a fork of another leaves locked in the child for ever."""
    code = """
        import sys, numpy as np, tvm_ffi
        from tlhub.runtime import arrays
        from tlhub.specs import Tensor
        before = "numpy.ma" in sys.modules
        arrays.readable(np.ones(4, "float32"), Tensor("a", ("N",), (4,), "float32", False), "k")
        print(before, "numpy.ma" in sys.modules)
    """
    assert len(set(run(code).split())) == 1
