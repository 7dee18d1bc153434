"""Every test gets a cache of its own; those that only read share one that stays warm for the session."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache folder that lives as long as the session, so that each kernel is compiled once for all."""
    base = tmp_path_factory.getbasetemp()
    return str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache" / "tlhub")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, shared_cache: str) -> None:
    for name in (
        "TLHUB_COMPILE",
        "TLHUB_DEVICE",
        "TLHUB_MATCH",
        "TLHUB_PINS",
        "TLHUB_RECORD",
        "TLHUB_STORES",
        "TLHUB_SIGNED",
        "TLHUB_OFFLINE",
        "TLHUB_DISABLE_PLUGINS",
        "TLHUB_CACHE_SIZE",
        "TLHUB_DEBUG",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TLHUB_CACHE_DIR", shared_cache)
    monkeypatch.setenv("XDG_STATE_HOME", os.path.join(os.path.dirname(shared_cache), "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the processor is the default device, wherever tests run


@pytest.fixture
def cold_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> str:
    """An empty cache folder for this test, and a process that remembers no lookup."""
    import tlhub.hub

    folder = f"{tmp_path}/cache"
    monkeypatch.setenv("TLHUB_CACHE_DIR", folder)
    tlhub.hub.forget()
    return folder
