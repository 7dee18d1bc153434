"""How a problem is typed, and what mistyping gets: one line, a hint, exit code 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tlhub.cli.command import parse_dims, parse_dtype, parse_options, show
from tlhub.errors import ArgumentError
from tlhub.quantity import age, parse_age, parse_size, size
from tlhub.specs import Kernel, Option

pytestmark = pytest.mark.light

GEMM = ("gemm", "64,64,64", "--dtype", "float32")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("1024,1024,1024", (1024, 1024, 1024)),
        ("M, 4096 ,4096", ("M", 4096, 4096)),
        ("M=1024,N=n,K=3", {"M": 1024, "N": "n", "K": 3}),
        (" -1,2,3", (-1, 2, 3)),
        ("1.5,2,3", ("1.5", 2, 3)),
        ("1_0,2", ("1_0", 2)),
        ("64", (64,)),
        ("", ("",)),
    ],
)
def test_dims(typed, meant):
    assert parse_dims(typed) == meant


@pytest.mark.parametrize("typed", ["M=1,2", "M=1,M=2", "M=,N=1", "=1"])
def test_dims_that_say_nothing(typed):
    with pytest.raises(ArgumentError):
        parse_dims(typed)


def test_dtypes():
    assert parse_dtype("float32") == "float32"
    assert parse_dtype("a=float8_e4m3fn, b=float8_e5m2") == {"a": "float8_e4m3fn", "b": "float8_e5m2"}
    with pytest.raises(ArgumentError):
        parse_dtype("float32,float16")


OPTIONS = Kernel(
    "k", 1, (), (), (), ("float32",), "m:f", "m:f", lambda dims: 0.0,
    options=(
        Option("flag", (False, True)),
        Option("tri", (None, True, False)),
        Option("size", (64, 128)),
        Option("word", ("none", "relu")),
        Option("either", (None, "none")),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("flag=true", True),
        ("flag=False", False),
        ("tri=none", None),
        ("tri=true", True),
        ("size=128", 128),
        ("word=none", "none"),
        ("word=relu", "relu"),
        ("either=none", "none"),
        ("other=7", "7"),
    ],
)
def test_options_become_the_choice_that_is_written_so(typed, value):
    name = typed.partition("=")[0]
    found = parse_options(OPTIONS, [typed])
    assert found == {name: value} and type(found[name]) is type(value)


@pytest.mark.parametrize("typed", [["flag"], ["flag=true", "flag=false"]])
def test_options_without_a_value_or_given_twice(typed):
    with pytest.raises(ArgumentError):
        parse_options(OPTIONS, typed)


def test_an_option_that_is_no_choice_names_them_as_they_are_typed():
    with pytest.raises(ArgumentError, match="option flag is '1'; allowed: false, true\nhint: --option flag=true$"):
        parse_options(OPTIONS, ["flag=1"])
    with pytest.raises(ArgumentError, match="hint: --option tri=false$"):
        parse_options(OPTIONS, ["tri=Off"])
    with pytest.raises(ArgumentError, match="hint: --option word=none$"):  # relu is near to true, not to on
        parse_options(OPTIONS, ["word=on"])
    with pytest.raises(ArgumentError, match="allowed: none, true, false\nhint: --option tri=true$"):
        parse_options(OPTIONS, ["tri=tru"])
    with pytest.raises(ArgumentError, match="option word is 'a=b'; allowed: none, relu"):
        parse_options(OPTIONS, ["word=a=b"])


def test_every_choice_survives_being_shown_and_typed():
    for option in OPTIONS.options[:4]:
        for choice in option.choices:
            assert parse_options(OPTIONS, [f"{option.name}={show(choice)}"]) == {option.name: choice}


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("gemm", "M=8,N=8,K=8,N_2=4", "--dtype", "float32"), "--option glu=true"),
        (("gemm", "8,8,8", "--dtype", "a=float8_e4m3fn,b=float8_e5m2,c=int8"), "--dtype a=float8_e4m3fn,b=float8_e5m2"),
        (("attention_decode", "B=1,S=1,H=1,D=8,S_kv=8,P=2", "--dtype", "float32"), "--option paged=true"),
        (("gemm_w4a16", "M=1,N=8,K=128,G=4", "--dtype", "float16"), "--option group=32"),
    ],
)
def test_a_hint_is_what_is_typed(tlhub, args, hint):
    """Of what ``tlhub.get`` says by its keywords."""
    outcome = tlhub("explain", *args)
    assert outcome.code == 2 and outcome.stderr.endswith(f"\nhint: {hint}\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("get", "gem", "64,64,64", "--dtype", "float32"), ["'gem'", "did you mean 'gemm'"]),
        (("get", "gemm", "64,64,64", "--dtype", "flot32"), ["'flot32'", "did you mean 'float32'"]),
        (("get", "gemm", "64,64,64"), ["--dtype is missing", "float32"]),
        (("get", "gemm", "64,64", "--dtype", "float32"), ["2 dims", "M, N, K"]),
        (("get", "gemm", "-1,2,3", "--dtype", "float32"), ["dim M is -1", "from 0"]),
        (("get", "gemm", "64,1.5,3", "--dtype", "float32"), ["dim N is '1.5'"]),
        (("get", "gemm", "\u0663,64,64", "--dtype", "float32"), ["dim M is '\u0663'"]),
        (("get", "gemm", "64,,3", "--dtype", "float32"), ["dim N is ''"]),
        (("get", "gemm", "M=64,Q=3", "--dtype", "float32"), ["no dim 'Q'"]),
        (("get", *GEMM, "--option", "trans_c=true"), ["no option 'trans_c'", "did you mean 'trans_"]),
        (
            ("get", *GEMM, "--option", "trans_a=maybe"),
            ["trans_a is 'maybe'; allowed: false, true", "hint: --option trans_a="],
        ),
        (("get", *GEMM, "--option", "device=cpu"), ["no option 'device'"]),
        (("get", *GEMM, "--option", "alpha=2"), ["alpha is a scalar"]),
        (("get", *GEMM, "--arch", "cpu:x86-64-v33"), ["unknown arch 'cpu:x86-64-v33'", "did you mean"]),
        (("get", *GEMM, "--arch", "gpu:x"), ["unknown target 'gpu'"]),
        (("get", *GEMM, "--device", "cpi"), ["unknown device 'cpi'", "did you mean 'cpu'"]),
        (("get", *GEMM, "--schedule", "nothing"), ["unknown schedule 'nothing'"]),
        (("get", *GEMM, "--dtpye", "x"), ["no option '--dtpye'", "did you mean --dtype?"]),
        (("get", *GEMM, "surplus"), ["surplus"]),
        (("get",), ["KERNEL is missing", "tlhub get --help"]),
        (("package", "build"), ["--from is missing", "tlhub package build --help"]),
        (("explain", "gemm", "-1,2,3", "--dtype", "float32"), ["dim M is -1"]),
        (
            ("bench", "gemm", "M,64,64", "--dtype", "float32"),
            ["dim M is symbolic", "hint: tlhub bench gemm M=64,N=64,K=64 --dtype float32"],
        ),
        (("bench", *GEMM, "--peer", "nmpy"), ["unknown peer 'nmpy'", "--peer numpy"]),
        (("bench", *GEMM, "--peer", "xyzzy"), ["unknown peer 'xyzzy'", "hint: tlhub kernels gemm"]),
        (("bench", *GEMM, "--threads", "0"), ["--threads"]),
        (("bench",), ["a problem or a suite", "hint: tlhub bench --suite gemm"]),
        (("bench", "--suite", "gem"), ["unknown suite 'gem'", "did you mean 'gemm'"]),
        (("bench", *GEMM, "--suite", "gemm"), ["KERNEL is given too", "hint: tlhub bench --suite gemm"]),
        (("gett",), ["no command 'gett'", "hint: tlhub get"]),
        (("cache", "lss"), ["no command 'lss'", "hint: tlhub cache ls"]),
        (("cache", "info", "zzzz"), ["'zzzz' is no key"]),
        (("cache", "info", "0123456789abcdef"), ["no entry '0123456789abcdef'", "hint: tlhub cache ls"]),
        (("cache", "prune"), ["what to remove"]),
        (("cache", "prune", "--older-than", "soon"), ["'soon' is not an age", "30d"]),
        (("cache", "prune", "--max-size", "2 cats"), ["'2 cats' is not a size", "2GiB"]),
        (("cache", "prune", "--arch", "cpu:pentium9"), ["unknown arch"]),
        (("cache", "prewarm"), ["a problem or a workload"]),
        (
            ("cache", "prewarm", "--from", "no/such.toml"),
            ["'no/such.toml'", "No such file", "hint: printf", "> no/such.toml"],
        ),
        (("cache", "ls", "--kernel", "gem"), ["unknown kernel 'gem'", "did you mean 'gemm'"]),
        (("cache", "prune", "--kernel", "gem"), ["unknown kernel 'gem'", "did you mean 'gemm'"]),
        (("kernels", "gem"), ["did you mean 'gemm'"]),
        (("schedules", "gem"), ["did you mean 'gemm'"]),
        (("plugin", "new", "Not A Name"), ["'Not A Name'"]),
        (
            ("plugin", "new", "mine", "--into", "no/such folder"),
            ["'no/such folder'", "hint: mkdir -p 'no/such folder'"],
        ),
    ],
)
def test_what_is_typed_wrongly(wrong, args, said):
    text = wrong(*args)
    for part in said:
        assert part in text, text


def test_the_same_answer_when_it_is_warm(tlhub, wrong):
    first = wrong("explain", "gemm", "-1,2,3", "--dtype", "float32")
    assert tlhub("explain", *GEMM).code == 0
    assert wrong("explain", "gemm", "-1,2,3", "--dtype", "float32") == first


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (688844, "672.7 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (3 * 1024**3, "3.0 GiB"),
        (1024**5, "1024.0 TiB"),
    ],
)
def test_sizes_are_written_one_way(count, text):
    assert size(count) == text


def test_sizes_and_ages_as_typed():
    assert [parse_size(s) for s in ("0", "2GiB", "1.5 kib", "10MB", "7b")] == [0, 2 << 30, 1536, 10_000_000, 7]
    assert [parse_age(s) for s in ("30d", "12h", "90min", "45s", "1w")] == [2592000, 43200, 5400, 45, 604800]
    for bad in ("", "GiB", "-1d", "3", "1e9s"):
        with pytest.raises(ArgumentError):
            parse_age(bad)
    assert [age(s) for s in (-5, 59, 61, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]


def test_plugin_new_writes_once(tlhub, wrong, tmp_path):
    made = tlhub("plugin", "new", "my-kernels", "--into", str(tmp_path))
    assert made.code == 0, made.stderr
    project = tmp_path / "tlhub-plugin-my-kernels"
    assert made.stdout == f"{project}\n"
    assert [line.split()[0] for line in made.stderr.splitlines()] == ["next:", "pip", "tlhub", "pytest"]
    assert f"pip install -e {project}'[test]'" in made.stderr
    assert "tlhub-plugin-my-kernels" in (project / "pyproject.toml").read_text()
    before = {f.name: f.read_bytes() for f in project.iterdir()}
    assert "is there already" in wrong("plugin", "new", "my-kernels", "--into", str(tmp_path))
    assert {f.name: f.read_bytes() for f in project.iterdir()} == before


def test_python_m():
    done = subprocess.run([sys.executable, "-m", "tlhub", "kernels", "gem"], capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean 'gemm'" in done.stderr
