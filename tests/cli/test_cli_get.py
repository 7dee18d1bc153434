"""get, explain and bench from a shell: processes of their own, on a real kernel that is built."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys

import pytest

from tlhub.cache import stats

GEMM = ("gemm", "1024,1024,1024", "--dtype", "float32")
FIELDS = "kernel dims dtype dtypes options arch schedule config origin match entry key".split()


def shell(*args, env=None, **kwargs):
    """Run ``tlhub`` as a process, as its console script does."""
    program = "from tlhub.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        **kwargs,
    )


def test_built_then_found_by_another_process(tmp_path):
    env = {"TLHUB_CACHE_DIR": str(tmp_path / "a b'c$x")}  # A55: no shell sees it
    first, second = (shell("get", *GEMM, "--json", env=env) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    one, two = json.loads(first.stdout), json.loads(second.stdout)
    assert list(one) == FIELDS
    assert (one["origin"], two["origin"]) == ("built", "cache")
    assert one["entry"] == two["entry"] and one["key"] == two["key"] and os.path.isdir(one["entry"])
    assert one["kernel"] == "gemm" and one["dims"] == {"B": 1, "M": 1024, "N": 1024, "K": 1024}
    assert one["dtype"] == "float32" and one["options"]["trans_a"] is False and one["arch"].startswith("cpu:")
    # the command line never imports the compilers or torch into its own process, and says nothing besides
    assert second.stderr == ""


def test_get_for_people(tlhub):
    outcome = tlhub("get", *GEMM)
    assert outcome.code == 0, outcome.stderr
    lines = dict(line.split(None, 1) for line in outcome.stdout.splitlines())
    assert lines["kernel"] == "gemm" and lines["dims"] == "B=1 M=1024 N=1024 K=1024"
    assert "trans_a=false" in lines["options"] and len(lines["key"]) == 64


def test_symbols_are_served_and_shown(tlhub):
    found = tlhub("get", "gemm", "M,64,M", "--dtype", "float32", "--json").json
    assert found["dims"] == {"B": 1, "M": "?0", "N": 64, "K": "?0"}
    assert "M=?0 N=64 K=?0" in tlhub("get", "gemm", "M,64,M", "--dtype", "float32").stdout
    assert "M=? N=64 K=?" in tlhub("get", "gemm", "M,64,K", "--dtype", "float32").stdout


def test_options_and_dtype_mappings_reach_the_kernel(tlhub):
    found = tlhub("get", "gemm", "8,8,8", "--dtype", "a=float32,b=float32", "-o", "trans_b=true", "--json").json
    assert found["options"]["trans_b"] is True and found["dtypes"]["b"] == "float32"


def test_explain_before_and_after(tlhub, cold_cache):
    before = tlhub("explain", *GEMM, "--json").json
    assert before["outcome"] == "build" and before["hit"] is None and before["candidates"]
    assert not os.path.exists(os.path.join(cold_cache, "v1", before["arch"].replace(":", "-")))
    assert tlhub("get", *GEMM).code == 0
    after = tlhub("explain", *GEMM, "--json").json
    assert after["outcome"] == "served" and after["hit"]
    text = tlhub("explain", *GEMM)
    assert text.code == 0 and "served from" in text.stdout


def test_explain_works_for_an_arch_that_is_not_here(tlhub):
    found = tlhub("explain", *GEMM, "--arch", "cpu:x86-64-v2", "--json").json
    assert found["arch"] == "cpu:x86-64-v2" and found["candidates"]


def test_nothing_prebuilt(tlhub, cold_cache, monkeypatch):
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    outcome = tlhub("get", *GEMM)
    assert outcome.code == 1 and outcome.stdout == ""
    assert "TLHUB_COMPILE=never" in outcome.stderr and "hint: tlhub explain gemm" in outcome.stderr
    hint = outcome.stderr.rpartition("hint: tlhub ")[2].split()
    assert tlhub(*hint).code == 0  # it works when it is pasted


def test_no_schedule_says_why_each_does_not(tlhub):
    outcome = tlhub("get", "gemm", "8,8,8", "--dtype", "float16", "--option", "accum=float16")
    assert outcome.code == 1
    assert "no schedule serves gemm" in outcome.stderr and "hint: tlhub schedules gemm" in outcome.stderr


def test_bench_checks_then_times_against_the_library(tlhub):
    outcome = tlhub("bench", "gemm", "65,63,64", "--dtype", "float32", "--threads", "1", "--repeat", "1", "--json")
    assert outcome.code == 0, outcome.stderr
    found = outcome.json
    assert found["check"]["passed"] is True and 0 < found["check"]["worst"] <= 1
    assert found["threads"] == 1 and found["flops"] >= 2 * 65 * 63 * 64
    assert found["tlhub"]["gflops"] > 0 and found["peers"]["numpy"]["ratio"] > 0
    assert found["schedule"] and len(found["key"]) == 64


def test_bench_of_a_wrong_kernel_fails_and_times_nothing(tlhub, monkeypatch):
    from tlhub.bench import measure
    from tlhub.bench.side import Side

    class Wrong(Side):
        def ask(self, what, **arguments):
            if what == "check":
                raise AssertionError("c[0, 3, 4] is 1.0, expected 2.0 within 1e-06")
            assert what == "prepare"
            return super().ask(what, **arguments)

    monkeypatch.setattr(measure, "Side", Wrong)
    outcome = tlhub("bench", "gemm", "8,8,8", "--dtype", "float32", "--json")
    assert outcome.code == 1
    assert outcome.json["check"]["passed"] is False and "c[0, 3, 4]" in outcome.json["check"]["fault"]
    assert outcome.json["tlhub"] is None and outcome.json["peers"] == {}


def test_bench_for_an_arch_that_nothing_here_runs_builds_nothing(tlhub, cold_cache, monkeypatch):
    monkeypatch.setattr("tlhub.hub.get", lambda *_, **__: pytest.fail("it was looked up"))
    elsewhere = "cpu:x86-64-v2" if platform.machine() == "aarch64" else "cpu:aarch64"
    outcome = tlhub("bench", "gemm", "8,8,8", "--dtype", "float32", "--arch", elsewhere)
    assert outcome.code == 1 and "cannot be timed" in outcome.stderr and "hint: tlhub targets" in outcome.stderr


def test_a_peer_that_is_not_installed_is_left_out_and_named(tlhub, monkeypatch):
    from tlhub.bench import measure
    from tlhub.bench.side import LeftOut, Side

    class Without(Side):
        def ask(self, what, **arguments):
            if self.name == "numpy":
                raise LeftOut("numpy is not installed")
            return super().ask(what, **arguments)

    monkeypatch.setattr(measure, "Side", Without)
    args = ("bench", "gemm", "8,8,8", "--dtype", "float32", "--repeat", "1", "--peer", "numpy")
    assert tlhub(*args, "--json").json["peers"] == {"numpy": {"missing": "numpy is not installed"}}
    text = tlhub(*args)
    assert text.code == 0 and "left out: numpy (numpy is not installed)" in text.stdout


# -- what must stay quiet --------------------------------------------------------------------------


def test_ctrl_c_is_quiet(tlhub, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tlhub.hub.explain", interrupted)
    outcome = tlhub("get", *GEMM)
    assert outcome.code == 130 and "Traceback" not in outcome.stderr and outcome.stdout == ""


def test_ctrl_c_ends_a_measurement_and_its_processes():
    """The whole process group gets the signal, as from a terminal."""
    args = ("bench", "gemm", "64,64,64", "--dtype", "float32", "--repeat", "1000")
    # a shell has what it starts in the background ignore the signal, and these tests may be that
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{listen}; from tlhub.cli import main; main()", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said = ""
    while "timing" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    os.killpg(process.pid, signal.SIGINT)
    out, rest = process.communicate(timeout=30)
    assert process.returncode == 130 and out == "" and "Traceback" not in rest
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_fault_of_ours_is_one_line_unless_debugging(tlhub, monkeypatch):
    def odd(**_):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("tlhub.hub.explain", odd)
    outcome = tlhub("get", *GEMM)
    assert outcome.code == 1
    assert outcome.stderr.splitlines() == [
        "error: ZeroDivisionError: by zero",
        "hint: TLHUB_DEBUG=1 shows where it comes from",
    ]
    monkeypatch.setenv("TLHUB_DEBUG", "1")
    assert "Traceback" in tlhub("get", *GEMM).stderr
    monkeypatch.setenv("TLHUB_DEBUG", "")  # empty counts as unset
    assert "Traceback" not in tlhub("get", *GEMM).stderr


def test_what_prints_meanwhile_goes_to_stderr(tlhub, monkeypatch):
    from tlhub import hub

    real = hub.explain

    def chatty(*args, **kwargs):
        print("a library prints")
        return real(*args, **kwargs)

    monkeypatch.setattr(hub, "explain", chatty)
    outcome = tlhub("get", *GEMM, "--json")
    assert outcome.json["kernel"] == "gemm" and "a library prints" in outcome.stderr


@pytest.mark.light
def test_a_reader_that_leaves_is_no_traceback():
    program = "from tlhub.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "kernels", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.light
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("explain gemm 8,8,8 --dtype float32 >&-", "error: stdout is closed\n"),
        ("kernels >/dev/full", "error: stdout cannot be written: No space left on device\n"),
        ("kernels --json >/dev/full", "error: stdout cannot be written: No space left on device\n"),
        ("cache path >/dev/full", "error: stdout cannot be written: No space left on device\n"),
    ],
)
def test_a_stdout_that_takes_nothing_is_one_line(command, said):
    program = f'{sys.executable} -c "from tlhub.cli import main; main()" {command}'
    done = subprocess.run(program, shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.light
@pytest.mark.parametrize("command", [(), ("cache",)])
def test_a_group_alone_shows_its_help(tlhub, command):
    outcome = tlhub(*command)
    assert "Usage: tlhub" in outcome.stdout + outcome.stderr and "error:" not in outcome.stderr
    assert "Commands:" in outcome.stdout + outcome.stderr


@pytest.mark.light
@pytest.mark.parametrize("command", [("--help",), ("get", "--help"), ("cache", "--help"), ("cache", "prune", "-h")])
def test_help_is_on_stdout(command):
    done = shell(*command)
    assert done.returncode == 0 and done.stdout.startswith("Usage: ") and done.stderr == ""


@pytest.mark.light
def test_listings_load_nothing_heavy():
    program = (
        "import sys, io\n"
        "from tlhub.cli import cli\n"
        "try: cli(['schedules', '--json'])\n"
        "except SystemExit as error: assert error.code == 0\n"
        "heavy = {'numpy', 'tvm_ffi', 'tvm', 'tilelang', 'torch', 'jax', 'rich', 'filelock'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_get_uses_what_it_finds_as_a_program_does(store, tlhub, tmp_path, monkeypatch):
    monkeypatch.setenv("TLHUB_STORES", f"{store}?backfill")
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / "cold"))
    look = ("get", "gemm", "8,8,8", "--dtype", "float32", "--json")
    stats.flush()  # what this process counted before
    first, second = tlhub(*look).json, tlhub(*look).json
    assert (first["origin"], second["origin"]) == ("site", "cache")
    assert first["entry"] == second["entry"] and first["entry"].startswith(str(tmp_path / "cold"))
    stats.flush()  # as at the end of a process
    assert tlhub("cache", "stats", "--json").json["hits"] == {"cache": 1, "site": 1}
