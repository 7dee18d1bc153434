from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from types import MappingProxyType

import pytest
from cache_help import ARCH, BUILD, GENERAL, PROBLEM, make_manifest
from hypothesis import given
from hypothesis import strategies as st

from tlhub.cache import key

pytestmark = pytest.mark.light


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None, "é"]}, '{"a":[true,null,"é"],"b":1}'),
        (1.5, '{"$float":"0x1.8000000000000p+0"}'),
        ((1, (2,)), "[1,[2]]"),
        (MappingProxyType({"x": {"y": 0.0}}), '{"x":{"y":{"$float":"0x0.0p+0"}}}'),
        ('"\n', '"\\"\\n"'),
    ],
)
def test_canonical_text(value: object, text: str) -> None:
    assert key.canonical(value) == text.encode()


def test_values_that_python_calls_equal_have_their_own_texts() -> None:
    values = [True, 1, 1.0, "1", "0x1.0000000000000p+0", False, 0, 0.0, -0.0, None, "", [], {}, "é", "e\u0301"]
    assert len({key.canonical(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    "value", [b"x", {1: 2}, {"$float": "0x1p0"}, {1, 2}, object(), 1j, "\ud800", [b"x"], {"a": {"b": object()}}]
)
def test_what_has_no_canonical_form(value: object) -> None:
    with pytest.raises(TypeError):
        key.canonical(value)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def typed(value: object) -> object:
    """Return *value* such that == tells what JSON and floats tell apart."""
    if isinstance(value, dict):
        return {name: typed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


@given(plain, plain)
def test_canonical_is_injective_and_knows_no_order(one: object, other: object) -> None:
    assert (key.canonical(one) == key.canonical(other)) == (typed(one) == typed(other))
    if isinstance(one, dict):
        assert key.canonical(dict(reversed(one.items()))) == key.canonical(one)


def test_digests_do_not_depend_on_the_hash_seed() -> None:
    code = "from tlhub.cache import key\nprint(key.digest({k: {k + 'x': 1.5} for k in {'a', 'b', 'c', 'd', 'e', 'f'}}))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(seen) == 1


def _changes(problem: object, name: str) -> list[object]:
    value = getattr(problem, name)
    if isinstance(value, str):
        return [value + "x", ""]
    if isinstance(value, int):
        return [value + 1]
    changed: list[object] = [value[:-1], value[::-1], (*value, ("extra", 1))]
    for position, (key_name, item) in enumerate(value):
        if type(item) is bool:
            others: tuple[object, ...] = (not item, int(item), str(item))
        elif type(item) is int:
            others = (item + 1, str(item), True) if item == 1 else (item + 1, str(item))
        else:
            others = (item + "x", None)
        for other in others:
            changed.append((*value[:position], (key_name, other), *value[position + 1 :]))
        changed.append((*value[:position], (key_name + "x", item), *value[position + 1 :]))
    return changed


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(PROBLEM)])
def test_each_field_of_the_problem_is_in_its_digest(name: str) -> None:
    changed = [dataclasses.replace(PROBLEM, **{name: value}) for value in _changes(PROBLEM, name)]
    digests = {key.problem_digest(problem, ARCH) for problem in changed}
    assert key.problem_digest(PROBLEM, ARCH) not in digests
    assert len(digests) == len(changed)


def test_the_exact_arch_is_in_the_digest() -> None:
    archs = ["cuda:sm_90", "cuda:sm_90a", "cuda:sm_120", "cuda:sm_121", "cuda-sm_90"]
    assert len({key.problem_digest(PROBLEM, arch) for arch in archs}) == len(archs)


def test_names_of_symbols_reach_no_key_but_their_equality_does() -> None:
    def with_extents(*extents: object) -> str:
        dims = tuple((name, extent) for (name, _), extent in zip(PROBLEM.dims, extents, strict=True))
        return key.problem_digest(dataclasses.replace(PROBLEM, dims=dims), ARCH)

    assert with_extents(1, "M", "N", 32) == with_extents(1, "x", "y", 32) == with_extents(1, "?0", "?1", 32)
    assert with_extents(1, "M", "M", 32) != with_extents(1, "M", "N", 32)
    assert with_extents("M", "M", 3, 4) != with_extents("M", 3, "M", 4)


@pytest.mark.parametrize("name", sorted(BUILD))
def test_each_field_of_the_build_is_in_its_digest(name: str) -> None:
    asked = key.problem_digest(PROBLEM, ARCH)
    value = BUILD[name]
    if isinstance(value, dict):
        others: list[object] = [{**value, "new": "1"}, {}, *({**value, k: f"{v}x"} for k, v in value.items())]
        others += [{k: v for k, v in value.items() if k != gone} for gone in value]
    else:
        others = [value + 1 if isinstance(value, int) else value + "x"]
    digests = {key.build_digest(asked, **{**BUILD, name: other}) for other in others}
    assert key.build_digest(asked, **BUILD) not in digests
    assert len(digests) >= len(others) - (len(value) == 1 if isinstance(value, dict) else 0)
    assert key.build_digest("0" * 64, **BUILD) != key.build_digest(asked, **BUILD)


def test_config_tells_true_from_one() -> None:
    one, true = ({**BUILD, "config": {"pack": value}} for value in (1, True))
    assert key.build_digest("0" * 64, **one) != key.build_digest("0" * 64, **true)


@pytest.mark.parametrize(
    "kernel",
    [
        "gemm",
        "k" * 500,
        "é" * 300,
        "../../etc",
        "a/b\\c:d",
        "",
        ".",
        "..",
        ".hid",
        "con",
        "NUL.txt",
        "-rf",
        "a.",
        "\n",
    ],
)
@pytest.mark.parametrize("arch", ["cpu:x86-64-v3", "cuda:sm_90a", "x" * 200, "../up", ""])
def test_folders_are_short_and_safe(kernel: str, arch: str) -> None:
    folder = key.folder(arch, kernel, "a" * 64, "b" * 64)
    parts = folder.split("/")
    assert len(parts) == 5 and parts[0] == "v1"
    assert len(folder) + len("/") + 24 <= 120  # the longest name of a member
    for part in parts:
        assert part.isascii() and part.strip("._-") and not set(part) & set('/\\:*?"<>|\n ') and part[0] not in ".-"
        assert part.split(".")[0].lower() not in {"con", "nul", "aux", "prn"}


def test_folders_of_different_names_differ() -> None:
    names = ["k" * 500, "k" * 501, "a/b", "a:b", "a_b", "é", "ü", "con", ""]
    assert len({key.folder(ARCH, name, "a" * 64, "b" * 64) for name in names}) == len(names)
    assert key.folder("cuda:sm_90a", "gemm", "a" * 64, "b" * 64) == f"v1/cuda-sm_90a/gemm/{'a' * 16}/{'b' * 16}"


def test_a_manifest_has_the_digests_of_its_problem_and_build() -> None:
    manifest = make_manifest(GENERAL)
    assert manifest.problem == GENERAL
    assert manifest.problem_digest == key.problem_digest(GENERAL, ARCH)
    assert manifest.build_digest == key.build_digest(manifest.problem_digest, **BUILD)
