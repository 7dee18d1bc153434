"""What ``tlhub.explain`` tells is what ``get`` then does."""

from __future__ import annotations

import json

import pytest

import tlhub

pytestmark = pytest.mark.tvm

SIZE = (64, 48, 32)


def test_explain_tells_what_get_will_do(cold_cache: str) -> None:
    before = tlhub.explain("gemm", SIZE, "float32")
    assert before.outcome == "build" and "the first candidate would be built" in str(before)
    kernel = tlhub.get("gemm", SIZE, "float32")
    after = tlhub.explain("gemm", SIZE, "float32")
    assert after.outcome == "served" and after.hit.entry.manifest.build_digest == kernel.key
    document = json.loads(json.dumps(after.to_json()))
    assert document["outcome"] == "served" and document["candidates"][0]["schedule"] == kernel.schedule
    assert document["obstacle"] is None
    refused = tlhub.explain("gemm", SIZE, "float32", compute="tf32", device="cpu")
    assert refused.outcome == "no schedule" and "tf32" in str(refused)


def test_explain_tells_what_keeps_it_from_being_built(cold_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlhub.build.compiler._candidates", lambda machine: [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ziglang" else object())
    found = tlhub.explain("gemm", SIZE, "float32", device="cpu")
    assert found.outcome == "build" and found.to_json()["obstacle"].startswith("no C compiler for Linux")
    assert "the first candidate would be built, but no C compiler" in str(found)
    assert 'hint: pip install "tlhub-core[cc]"' in str(found)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "but apache-tvm is not installed" in str(tlhub.explain("gemm", SIZE, "float32", device="cpu"))
