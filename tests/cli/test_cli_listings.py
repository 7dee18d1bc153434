"""Listings: a table for people, one JSON document for programs, and nothing else on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.light

COMMANDS = [("kernels",), ("kernels", "gemm"), ("schedules",), ("schedules", "gemm"), ("targets",), ("plugins",),
            ("cache", "ls"), ("cache", "verify"), ("trust", "ls")]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_json_is_one_document(tlhub, command):
    outcome = tlhub(*command, "--json")
    assert outcome.code == 0, outcome.stderr
    assert isinstance(outcome.json, (list, dict))


def test_kernels(tlhub):
    rows = {k["name"]: k for k in tlhub("kernels", "--json").json}
    assert {"gemm", "attention"} <= set(rows)
    gemm = rows["gemm"]
    assert [d["name"] for d in gemm["dims"]] == ["B", "M", "N", "K", "N_2"] and gemm["dims"][0]["default"] == 1
    assert "float32" in gemm["dtypes"] and "trans_a" in [o["name"] for o in gemm["options"]]
    shown = tlhub("kernels").stdout.splitlines()
    assert shown[0].split()[0] == "kernel" and {"gemm", "attention"} <= {line.split()[0] for line in shown[1:]}


def test_a_contract_shows_every_option_with_its_choices(tlhub):
    options = tlhub("kernels", "gemm", "--json").json["options"]
    text = tlhub("kernels", "gemm").stdout
    for option in options:
        line = next(line for line in text.splitlines() if line.startswith(option["name"] + " "))
        for choice in option["choices"]:
            assert str(choice).lower() in line.lower()


def test_arguments_that_differ_in_dtype_alone_are_shown_once(tlhub):
    inputs = next(line for line in tlhub("kernels", "gemm").stdout.splitlines() if line.startswith("inputs"))
    assert inputs.endswith(
        "residual(B, M, N) if residual=true and glu=false; residual(B, M, N_2) if residual=true and glu=true"
    )
    assert inputs.count("bias(N) if bias=true;") == 1 and "out_dtype" not in inputs


def test_schedules_say_who_brings_them(tlhub):
    found = tlhub("schedules", "gemm", "--json").json
    assert found and all(s["kernel"] == "gemm" for s in found)
    assert {s["distribution"] for s in found} == {"tlhub-core"}


def test_a_schedule_whose_binaries_are_for_what_was_asked_says_so(tlhub):
    fixed = {s["name"] for s in tlhub("schedules", "gemm", "--json").json if not s["symbolic"]}
    lines = {line.split()[1]: line for line in tlhub("schedules", "gemm").stdout.splitlines()}
    assert "hopper" in fixed and all(
        ("as asked" in lines[name]) == (name in fixed) for name in lines.keys() - {"schedule"}
    )


def test_targets_name_this_machine(tlhub):
    cpu = next(t for t in tlhub("targets", "--json").json if t["name"] == "cpu")
    assert cpu["devices"][0]["device"] == "cpu:0" and cpu["native"] in cpu["archs"]
    assert "cpu:0" in tlhub("targets").stdout


def test_plugins_lists_the_built_in_ones_as_any(tlhub):
    found = {p["name"]: p for p in tlhub("plugins", "--json").json}
    assert {"cpu", "gemm", "attention"} <= set(found)
    assert all(found[n]["status"] == "ok" for n in ("cpu", "gemm", "attention"))


def test_a_broken_plugin_that_prints_is_listed_and_harmless(tmp_path):
    """Through the real entry points of a process of its own: stdout stays one document (A40, A58)."""
    for name, body in (
        ("noisy", "import os\nprint('hello from a plugin')\nos.write(1, b'straight to the descriptor\\n')\n"),
        ("broken", "raise ImportError('no module named nonsense')\n"),
        ("[markup]", ""),
    ):
        info = tmp_path / f"{name.strip('[]')}_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.strip('[]')}-plugin\nVersion: 1.0\n")
        module = f"{name.strip('[]')}_plugin_module"
        (info / "entry_points.txt").write_text(f"[tlhub]\n{name} = {module}\n")
        (tmp_path / f"{module}.py").write_text(body)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from tlhub.cli import doctor, main; "
    program += "doctor._LOOKS = (doctor._plugins, doctor._environment); main()"

    def run(*args):
        return subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True)

    listed = run("plugins", "--json")
    assert listed.returncode == 0, listed.stderr
    found = {p["name"]: p for p in json.loads(listed.stdout)}
    assert found["broken"]["status"] == "failed" and "nonsense" in found["broken"]["error"]
    assert found["noisy"]["status"] == "ok" and found["gemm"]["status"] == "ok"
    assert "hello from a plugin" in listed.stderr and "straight to the descriptor" in listed.stderr
    table = run("plugins")
    assert "broken of broken-plugin: ImportError: no module named nonsense" in table.stdout
    assert "[markup]" in table.stdout
    assert run("kernels", "--json").returncode == 0
    doctor = run("doctor", "--json")
    assert doctor.returncode == 1
    assert any(c["state"] == "failed" and "nonsense" in c["detail"] for c in json.loads(doctor.stdout)["checks"])


@pytest.fixture
def imports_no_compiler(monkeypatch):
    """What takes doctor seconds is left out: as a whole it runs as the documents have it."""
    from tlhub.cli import doctor

    monkeypatch.setattr(doctor, "_LOOKS", [look for look in doctor._LOOKS if look is not doctor._toolchains])


@pytest.mark.usefixtures("imports_no_compiler")
def test_doctor(tlhub, monkeypatch):
    monkeypatch.setenv("TLHUB_CACHEDIR", "/nowhere")
    outcome = tlhub("doctor", "--json")
    checks = outcome.json["checks"]
    assert outcome.json["ok"] == (outcome.code == 0)
    by_name = {c["name"]: c for c in checks}
    assert {"python", "platform", "tvm-ffi", "cache", "target cpu"} <= set(by_name)
    assert by_name["tvm-ffi"]["state"] == "ok"
    unknown = next(c for c in checks if "TLHUB_CACHEDIR" in c["detail"])
    assert unknown["state"] == "warning" and "TLHUB_CACHE_DIR" in unknown["hint"]
    assert "TLHUB_CACHEDIR" in tlhub("doctor").stdout


@pytest.mark.usefixtures("imports_no_compiler")
@pytest.mark.parametrize(
    ("name", "value", "state", "said", "hint"),
    [
        ("TLHUB_MATCH", "exacd", "failed", "'exacd'", "export TLHUB_MATCH=exact"),
        ("TLHUB_COMPILE", "foo", "failed", "'foo'", "export TLHUB_COMPILE=auto"),
        ("TLHUB_NUM_THREADS", "x", "failed", "'x'", "export TLHUB_NUM_THREADS=2"),
        ("TLHUB_DEVICE", "cpi", "failed", "'cpi'", "did you mean 'cpu'?"),
        ("TLHUB_DISABLE_PLUGINS", "gemmm", "warning", "'gemmm'", "export TLHUB_DISABLE_PLUGINS=gemm"),
        ("TLHUB_STORES", "/no/such/store", "warning", "/no/such/store", "mkdir -p /no/such/store"),
        ("TLHUB_STORES", "/opt?shred", "failed", "'shred'", "export TLHUB_STORES='/opt?shared&owner=USER'"),
    ],
)
def test_doctor_reads_each_variable_as_a_lookup_does(tlhub, monkeypatch, name, value, state, said, hint):
    monkeypatch.setenv(name, value)
    checks = tlhub("doctor", "--json").json["checks"]
    (found,) = (c for c in checks if said in c["detail"])
    assert (found["state"], found["hint"]) == (state, hint)
    assert not any(c["state"] == "ok" and name in c["detail"] for c in checks)


@pytest.mark.usefixtures("imports_no_compiler")
def test_doctor_tells_of_a_store_that_lookups_pass_over(tlhub, monkeypatch, tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir(0o755)
    bad.mkdir()
    bad.chmod(0o777)
    monkeypatch.setenv("TLHUB_STORES", f"{good}{os.pathsep}{bad}")
    outcome = tlhub("doctor", "--json")
    found = [(c["state"], c["hint"]) for c in outcome.json["checks"] if c["name"] == "store"]
    assert outcome.code == 1 and found == [("ok", None), ("failed", f"chmod go-w {bad}")]


@pytest.mark.usefixtures("imports_no_compiler")
def test_doctor_guesses_no_name_that_is_only_alike_in_its_prefix(tlhub, monkeypatch):
    monkeypatch.setenv("TLHUB_FOO", "1")
    (found,) = (c for c in tlhub("doctor", "--json").json["checks"] if "TLHUB_FOO" in c["detail"])
    assert found["state"] == "warning" and "did you mean" not in found["hint"]


@pytest.mark.usefixtures("imports_no_compiler")
def test_doctor_fails_for_a_cache_folder_that_is_a_file(tlhub, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / "file"))
    outcome = tlhub("doctor", "--json")
    assert outcome.code == 1
    cache = next(c for c in outcome.json["checks"] if c["name"] == "cache")
    assert cache["state"] == "failed" and str(tmp_path / "file") in cache["detail"] and cache["hint"]


def test_doctor_fails_for_a_compiler_that_cannot_be_imported(monkeypatch, tmp_path):
    from tlhub.cli import doctor

    (tmp_path / "tilelang.py").write_text("def set_log_level(level): ...")
    (tmp_path / "tvm.py").write_text("raise RuntimeError('half installed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_version", lambda name: "0.25.0")  # installed, whether or not it is here
    found = {c.name: c for c in doctor._toolchains()}["tvm"]
    assert found.state == "failed" and found.detail.endswith("it cannot be imported: RuntimeError: half installed")
    (tmp_path / "tvm.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "_PATIENCE", 1.0)
    found = {c.name: c for c in doctor._toolchains()}["tvm"]
    assert found.state == "failed" and found.detail.endswith("importing it takes longer than 1 seconds")


def test_doctor_fails_for_a_full_disk(monkeypatch, cold_cache):
    from tlhub.cache import staging
    from tlhub.cli import doctor

    monkeypatch.setattr(staging, "_ROOM", 1 << 80)
    (found,) = doctor._cache()
    assert found.state == "failed" and "the disk is full" in found.detail and found.hint


def test_doctor_looks_after_the_cache(monkeypatch, cold_cache):
    from tlhub.cache import mounts
    from tlhub.cli import doctor

    first = {c.name: c for c in doctor._cache()}
    assert list(first) == ["cache", "file system", "locks", "entries", "cache size"]
    assert {c.state for c in first.values()} == {"ok"}
    stray = Path(cold_cache, "v1", "cpu-x86-64-v3", "gemm", "problem", "build")
    stray.mkdir(parents=True)
    (stray / "entry.json").write_bytes(b" " * 2000)
    monkeypatch.setenv("TLHUB_CACHE_SIZE", "1KiB")
    monkeypatch.setattr(mounts, "NETWORK", {first["file system"].detail})
    found = {c.name: c for c in doctor._cache()}
    assert [c.state for c in found.values()] == ["ok", "warning", "ok", "warning", "warning"]
    assert found["entries"].hint == "tlhub cache verify --repair" and "1 not served" in found["entries"].detail
    assert found["cache size"].hint == "tlhub cache prune --max-size 1024"
    layer = f"TLHUB_STORES='{os.path.realpath(cold_cache)}?write&backfill'"
    assert found["file system"].hint == f"export TLHUB_CACHE_DIR=/a/local/folder {layer}"
    monkeypatch.setenv("TLHUB_CACHE_SIZE", "1x")
    (wrong,) = (c for c in doctor._environment() if c.state == "failed")
    assert "'1x'" in wrong.detail and wrong.hint == "export TLHUB_CACHE_SIZE=10GiB"


@pytest.mark.parametrize(
    ("name", "value", "said", "hint"),
    [
        ("TLHUB_OFFLINE", "false", "TLHUB_OFFLINE is 'false'; allowed are 0 and 1", "export TLHUB_OFFLINE=1"),
        ("TLHUB_RECORD", "/dev/null/x", "TLHUB_RECORD: cannot record to '/dev/null/x'", "export TLHUB_RECORD=w"),
    ],
)
def test_doctor_judges_variables_as_they_are_read(monkeypatch, tmp_path, name, value, said, hint):
    from tlhub.cli import doctor

    monkeypatch.setenv(name, value)
    (wrong,) = (c for c in doctor._environment() if c.state == "failed")
    assert said in wrong.detail and wrong.hint.startswith(hint)
    monkeypatch.setenv(name, "1" if name == "TLHUB_OFFLINE" else str(tmp_path / "new" / "workload.toml"))
    assert {c.state for c in doctor._environment()} == {"ok"} and not (tmp_path / "new").exists()


def test_a_check_that_breaks_is_a_failed_one(monkeypatch):
    from tlhub.cli import doctor

    def _odd_thing():
        raise RuntimeError("broken sensor")

    monkeypatch.setattr(doctor, "_LOOKS", (_odd_thing,))
    (found,) = doctor.examine()
    assert (found.name, found.state) == ("odd thing", "failed") and "broken sensor" in found.detail
