from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from registry_lab import Daemon, Fault, Proxy, find_registry

from tlhub.cache.store import Store


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A registry for the session; each test has repositories of its own."""
    if find_registry() is None:
        pytest.skip("no docker-registry: apt-get install docker-registry")
    with Daemon(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def proxy(daemon: Daemon) -> Iterator[Proxy]:
    """What stands between a test and the registry, and can be told to misbehave."""
    with Proxy(daemon.port, Fault()) as running:
        yield running


@pytest.fixture
def source(tmp_path: Path) -> Store:
    return Store("source", tmp_path / "source")


@pytest.fixture
def settle() -> bool:
    """Tell whether a push waits for others that push: only a test of just that has any."""
    return False


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here outlives a loss of power, which is all that waiting for the disk is for."""
    monkeypatch.setattr("tlhub.cache.staging.sync", lambda path: None)


@pytest.fixture(autouse=True)
def _alone(settle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not settle:
        monkeypatch.setattr("tlhub.remote.sync._SETTLE", 0.0)


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without credentials, keys or notes."""
    from tlhub.cache import vouching

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home/state"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "home/.docker"))
    monkeypatch.setattr(vouching, "_unkept", set())


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return Store("target", tmp_path / "target")
