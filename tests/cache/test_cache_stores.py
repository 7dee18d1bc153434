from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import pytest
from cache_help import FOREIGN, lookup, make_manifest, publish, serves

from tlhub import stores
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError

pytestmark = pytest.mark.light


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def users(environ: dict[str, str]) -> Store:
    """Return the user's store in a process of that environment, which asks for the first time."""
    with mock.patch.dict(os.environ, environ):
        for name in {"TLHUB_CACHE_DIR", "XDG_CACHE_HOME", "HOME"} - set(environ):
            os.environ.pop(name, None)
        stores._user.cache_clear()
        return stores.user_store()


def quietly(environ: dict[str, str]) -> Store:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return users(environ)


def test_the_named_folder_wins(tmp_path: Path) -> None:
    store = quietly({"TLHUB_CACHE_DIR": str(tmp_path / "x"), "HOME": "/nonexistent"})
    assert store.root == str(tmp_path / "x")
    assert (store.name, store.origin, store.writable) == ("cache", "cache", True)


@pytest.mark.parametrize("named", ["", None])
def test_empty_is_unset(tmp_path: Path, named: str | None) -> None:
    environ = {"HOME": str(tmp_path)} if named is None else {"HOME": str(tmp_path), "TLHUB_CACHE_DIR": named}
    root = quietly(environ).root
    assert root is not None and root.startswith(str(tmp_path)) and root.endswith("tlhub")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the XDG rule is Linux's")
@pytest.mark.parametrize("xdg", [None, "", "absolute"])
def test_the_rule_is_that_of_platformdirs(tmp_path: Path, xdg: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TLHUB_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg and str(tmp_path / "xdg"))
    assert stores.user_store().root == platformdirs.user_cache_dir("tlhub", appauthor=False)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "HOME is not set"),
        ({"HOME": ""}, "HOME is not set"),
        ({"HOME": "", "XDG_CACHE_HOME": ""}, "HOME is not set"),
        ({"HOME": "relative"}, "HOME is not set"),
        ({"HOME": "/dev/null"}, "/dev/null is not a folder"),
        ({"HOME": "", "TLHUB_CACHE_DIR": ""}, "HOME is not set"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="HOME is not what Windows asks")
def test_without_a_home_a_private_temporary_folder(environ: dict[str, str], says: str, temporary: Path) -> None:
    found = []
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=says) as caught:
            found.append(users(environ))
        assert len(caught) == 1 and "\nhint: export TLHUB_CACHE_DIR=" in str(caught[0].message)
    root = Path(str(found[0].root))
    assert root.parent == temporary and stat.S_IMODE(root.stat().st_mode) == 0o700
    publish(found[0])
    assert serves(found[1]), "the next process finds it again"


def test_a_read_only_home(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **kw: path != str(tmp_path) and real(path, mode, **kw))
    with pytest.warns(RuntimeWarning, match="read-only"):
        store = users({"HOME": str(tmp_path)})
    assert str(store.root).startswith(str(temporary))
    assert not (tmp_path / ".cache").exists()


@pytest.mark.parametrize("trap", ["file", "link", "open", "foreign"])
def test_a_trap_in_the_temporary_folder_is_not_used(
    temporary: Path, tmp_path: Path, trap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = temporary / f"tlhub-{os.geteuid()}"
    if trap == "file":
        where.write_text("x")
    elif trap == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        where.symlink_to(tmp_path / "elsewhere")
    elif trap == "open":
        where.mkdir()
        where.chmod(0o777)
    else:
        where.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(where, FOREIGN, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: FOREIGN)
            where.rename(temporary / f"tlhub-{FOREIGN}")
    with pytest.warns(RuntimeWarning, match="in memory"):
        store = users({})
    assert store.root is None
    publish(store)
    assert serves(store)


def test_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "one", tmp_path / "two words"
    text = os.pathsep.join([f"{first}?shared&owner=root&owner=7&match=exact", "", str(second)])
    monkeypatch.setenv("TLHUB_STORES", text)
    one, two = stores.site_stores()
    assert (one.root, one.origin, one.writable, one.match) == (str(first), "site", False, "exact")
    assert one.policy.shared and one.policy.owners == {0, 7}
    assert (two.root, two.match, two.policy.shared) == (str(second), "revision", False)
    monkeypatch.setenv("TLHUB_STORES", "")
    assert stores.site_stores() == ()
    monkeypatch.delenv("TLHUB_STORES")
    assert stores.site_stores() == ()


@pytest.mark.parametrize("policy", ["open", "owner=", "shared=yes", "match=loose", "owners=root"])
def test_a_policy_that_is_not_one(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLHUB_STORES", f"/opt/kernels?{policy}")
    with pytest.raises(ArgumentError, match="allowed are"):
        stores.site_stores()


def test_match_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stores.match_policy() is None
    for text, policy in (("", None), ("exact", "exact")):
        monkeypatch.setenv("TLHUB_MATCH", text)
        assert stores.match_policy() == policy
    monkeypatch.setenv("TLHUB_MATCH", "compatable")
    with pytest.raises(ArgumentError, match="TLHUB_MATCH is 'compatable'; allowed are exact, compatible") as caught:
        stores.match_policy()
    assert caught.value.hint == "export TLHUB_MATCH=compatible"


def test_a_plugins_folder_is_trusted_as_its_code_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed by another user, with a umask of 002: its entries serve; what everyone may write does not."""
    root = tmp_path / "site-packages" / "prebuilt"
    folder = publish(Store("build", root)).folder
    for path in (root, *root.rglob("*")):
        path.chmod(path.stat().st_mode | 0o020)
        if os.geteuid() == 0:
            os.chown(path, FOREIGN, -1)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + FOREIGN + 1)
    store = stores.prebuilt_store("xyz", str(root))
    assert (store.origin, store.writable) == ("prebuilt", False)
    assert serves(store)
    os.chmod(str(folder), 0o777)
    assert not serves(store)
    assert lookup(stores.prebuilt_store("gone", str(tmp_path / "gone"))) == ((), ())


def test_importing_the_cache_stays_light() -> None:
    code = (
        "import sys\n"
        "heavy = {'numpy', 'tvm_ffi', 'torch', 'filelock', 'platformdirs', 'click', 'rich', 'socket', 'tempfile'}\n"
        "heavy |= {'sqlite3', 'dbm'}\n"
        "import tlhub.cache.chain, tlhub.cache.prune\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "import tlhub.stores\n"
        "tlhub.stores.user_store()\n"
        "print(sorted(heavy & set(sys.modules) - {'socket', 'tempfile'}))"  # what finds the plugins imports those
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["[]", "[]"]


def test_a_manifest_made_here_is_found_there(tmp_path: Path) -> None:
    """Two processes' view: the same variable, another object, found by digest alone."""
    environ = {"TLHUB_CACHE_DIR": str(tmp_path / "a b'c$x")}
    publish(quietly(environ))
    assert lookup(quietly(environ), make_manifest()).entries
