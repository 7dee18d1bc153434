"""The plugin host: each plugin is loaded on its own, and one that is broken costs nobody else anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pluggy
import pytest

import tlhub.catalog
import tlhub.plugins
from tlhub.errors import PluginError, UnknownName
from tlhub.hooks import Hooks, hookimpl

pytestmark = pytest.mark.light

GOOD = """
@hookimpl
def tlhub_kernels():
    return [kernel("good_op")]

@hookimpl
def tlhub_schedules():
    return [schedule("good_op")]
"""

BROKEN = {
    "missing import": (
        "import no_such_module_anywhere",
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    ),
    "syntax": ("def f(:", "SyntaxError"),
    "exit": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "raises": ("raise RuntimeError('no device')", "RuntimeError: no device"),
    "an error without words": (
        "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd",
        "Odd",
    ),
    "an error of its own root": ("class Stop(BaseException):\n    pass\nraise Stop('no luck')", "Stop: no luck"),
    "recursion": ("def f(): return f()\nf()", "RecursionError"),
    "mistyped hook": ("@hookimpl\ndef tlhub_kernel():\n    return []", "tlhub_kernel"),
    "hook with an argument": ("@hookimpl\ndef tlhub_kernels(config):\n    return []", "config"),
    "mistyped hook, and one with an argument": (
        "@hookimpl\ndef tlhub_kernel():\n    return []\n@hookimpl\ndef tlhub_schedules(config):\n    return []",
        "tlhub_kernel",
    ),
    "hook raises": ("@hookimpl\ndef tlhub_kernels():\n    raise KeyError('table')", "KeyError: 'table'"),
    "hook raises half way": (
        "@hookimpl\ndef tlhub_kernels():\n    yield kernel('half_op')\n    raise OSError('disk')",
        "OSError: disk",
    ),
    "a later hook raises": (
        "@hookimpl\ndef tlhub_kernels():\n    return [kernel('half_op')]\n"
        "@hookimpl\ndef tlhub_schedules():\n    raise ValueError('no table')",
        "ValueError: no table",
    ),
    "hook raises an error of its own root": (
        "@hookimpl\ndef tlhub_kernels():\n    raise GeneratorExit('half way')",
        "GeneratorExit: half way",
    ),
    "hook exits": ("@hookimpl\ndef tlhub_kernels():\n    raise SystemExit(3)", "SystemExit: 3"),
    "returns None": ("@hookimpl\ndef tlhub_kernels():\n    return 7", "returned 7; it returns Kernel records"),
    "returns names": (
        "@hookimpl\ndef tlhub_kernels():\n    return ['half_op']",
        "'half_op'; it returns Kernel records",
    ),
    "returns another record": (
        "@hookimpl\ndef tlhub_targets():\n    return [kernel('half_op')]",
        "it returns Target records",
    ),
    "returns a mapping": ("@hookimpl\ndef tlhub_kernels():\n    return {'half_op': kernel('half_op')}", "'half_op'"),
    "future interface": ("TLHUB_API = 99", "wants TLHUB_API 99; this tlhub speaks 1"),
    "interface that is no number": ("TLHUB_API = 'next'", "wants TLHUB_API 'next'; this tlhub speaks 1"),
}


def found() -> dict[str, tlhub.plugins.Plugin]:
    return {p.name: p for p in tlhub.plugins.find()}


def test_built_ins_are_found_as_third_parties_are() -> None:
    core = [p for p in tlhub.plugins.find() if p.core]
    assert {p.name for p in core} >= {"cpu", "gemm", "attention"}
    assert [p.error for p in core] == [None] * len(core)


def test_good_plugin_is_served(site: Any) -> None:
    site.add("good", GOOD, version="1.4")
    plugin = found()["good"]
    assert (plugin.status, plugin.distribution, plugin.version, plugin.editable) == ("ok", "good", "1.4", False)
    catalog = tlhub.catalog.assemble(tlhub.plugins.find())
    assert catalog.kernel("good_op").name == "good_op"
    assert [s.name for s in catalog.schedules["good_op"]] == ["plain"]
    assert catalog.owner(catalog.schedules["good_op"][0]).distribution == "good"


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_plugin_is_listed_and_the_rest_works(site: Any, kind: str) -> None:
    source, reason = BROKEN[kind]
    site.add("a-broken", source)
    site.add("good", GOOD)
    site.add("z-broken", source)
    plugins = found()
    for name in ("a-broken", "z-broken"):
        assert plugins[name].status == "failed"
        assert reason in (plugins[name].error or "")
        assert not (plugins[name].kernels or plugins[name].schedules or plugins[name].targets)
    assert plugins["good"].status == "ok"
    assert plugins["gemm"].status == "ok"
    catalog = tlhub.catalog.assemble(tuple(plugins.values()))
    assert "half_op" not in catalog.kernels
    assert catalog.kernel("good_op").name == "good_op"


def test_a_plugin_whose_hook_exits_is_not_registered() -> None:
    class Leaves:
        @hookimpl
        def tlhub_kernels(self) -> None:
            raise SystemExit(3)

    manager = pluggy.PluginManager("tlhub")
    manager.add_hookspecs(Hooks)
    with pytest.raises(SystemExit):
        tlhub.plugins._collect(manager, Leaves(), "leaves")
    assert not manager.has_plugin("leaves")


def test_message_names_plugin_and_both_interfaces(site: Any) -> None:
    site.add("newer", "TLHUB_API = 99")
    error = found()["newer"].error or ""
    assert "'newer'" in error and "99" in error and "speaks 1" in error
    assert error.endswith("hint: pip install --upgrade tlhub-core newer")


def test_entry_point_to_nothing_is_listed(site: Any) -> None:
    site.list("hollow", "hollow = no_such_module_anywhere")
    site.list("attribute", "attribute = json:no_such_attribute")
    site.list("garbled", "garbled = not a module!")
    plugins = found()
    for name in ("hollow", "attribute", "garbled"):
        assert plugins[name].status == "failed", name
    assert plugins["gemm"].status == "ok"


def test_missing_kernel_mentions_broken_plugins(site: Any) -> None:
    site.add("a-broken", "import no_such_module_anywhere")
    catalog = tlhub.catalog.assemble(tlhub.plugins.find())
    with pytest.raises(UnknownName, match=r"a-broken failed to load"):
        catalog.kernel("half_op")


@pytest.mark.parametrize("kind", ["missing import", "mistyped hook", "hook raises half way", "future interface"])
def test_debug_switch_raises(site: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    site.add("a-broken", BROKEN[kind][0])
    monkeypatch.setenv("TLHUB_DEBUG", "1")
    with pytest.raises((ImportError, OSError)) as caught:
        tlhub.plugins.find()
    assert isinstance(caught.value, PluginError) == (kind in ("mistyped hook", "future interface"))


@pytest.mark.parametrize("value", ["", "0"])
def test_debug_switch_off(site: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    site.add("a-broken", "raise RuntimeError")
    monkeypatch.setenv("TLHUB_DEBUG", value)
    assert found()["a-broken"].status == "failed"


def test_interrupt_is_not_a_broken_plugin(site: Any) -> None:
    site.add("a-broken", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        tlhub.plugins.find()


def test_what_a_plugin_prints_stays_off_stdout(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    site.add("chatty", "print('at import')\n@hookimpl\ndef tlhub_kernels():\n    print('in a hook')\n    return []")
    assert found()["chatty"].status == "ok"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "at import" in shown.err and "in a hook" in shown.err


def test_same_entry_point_twice_is_one_plugin(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install lists its entry points in two dist-info folders, and may list one twice in one file."""
    source = "calls = []\n@hookimpl\ndef tlhub_kernels():\n    calls.append(1)\n    return [kernel('good_op')]"
    module = site.add("twice", source, points="twice = fake_twice\ntwice = fake_twice")
    second = tmp_path / "second"
    site.list("twice", "twice = fake_twice", folder=second)
    monkeypatch.syspath_prepend(str(second))
    plugins = [p for p in tlhub.plugins.find() if p.name == "twice"]
    assert [p.status for p in plugins] == ["ok"]
    assert sys.modules[module].calls == [1]
    catalog = tlhub.catalog.assemble(plugins)
    assert list(catalog.kernels) == ["good_op"]
    assert plugins[0].refused == []


@pytest.mark.parametrize("named", ["good", "some-dist", " other , good "])
def test_disabled_plugins_are_not_imported(site: Any, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    module = site.add("some-dist", GOOD, points="good = fake_some_dist")
    monkeypatch.setenv("TLHUB_DISABLE_PLUGINS", named)
    plugins = found()
    assert "good" not in plugins and module not in sys.modules
    assert plugins["gemm"].status == "ok"


# -- clashes of names ------------------------------------------------------------------------------


def test_core_keeps_its_kernel(site: Any) -> None:
    site.add("a-rival", '@hookimpl\ndef tlhub_kernels():\n    return [kernel("gemm", 9), kernel("rival_op")]')
    plugins = tlhub.plugins.find()
    catalog = tlhub.catalog.assemble(plugins)
    rival = next(p for p in plugins if p.name == "a-rival")
    assert catalog.kernel("gemm").revision != 9
    assert catalog.kernel("rival_op")
    assert rival.status == "partly refused"
    assert rival.refused == ["kernel 'gemm': tlhub-core has it already"]


def test_third_parties_share_no_bare_name(site: Any) -> None:
    source = '@hookimpl\ndef tlhub_kernels():\n    return [kernel("shared_op")]\n'
    own = '@hookimpl\ndef tlhub_schedules():\n    return [schedule("shared_op")]\n'
    site.add("first", source + own)
    site.add("second", source + own)
    plugins = tlhub.plugins.find()
    catalog = tlhub.catalog.assemble(plugins)
    assert {"first:shared_op", "second:shared_op"} <= set(catalog.kernels)
    assert catalog.owner(catalog.schedules["second:shared_op"][0]).distribution == "second"
    with pytest.raises(UnknownName, match=r"first:shared_op, second:shared_op"):
        catalog.kernel("shared_op")
    refused = {p.name: p.refused for p in plugins}
    assert refused["first"] == ["kernel name 'shared_op': second declares it too; served as 'first:shared_op'"]
    assert refused["second"] == ["kernel name 'shared_op': first declares it too; served as 'second:shared_op'"]


def test_order_of_finding_never_matters(site: Any) -> None:
    source = '@hookimpl\ndef tlhub_kernels():\n    return [kernel("shared_op")]\n'
    for name in ("b-side", "a-side", "c-side"):
        site.add(name, source)
    from importlib import metadata

    points = list(metadata.entry_points(group="tlhub"))
    one = tlhub.catalog.assemble(tlhub.plugins.find(points))
    other = tlhub.catalog.assemble(tlhub.plugins.find(reversed(points)))
    assert list(one.kernels) == list(other.kernels)
    assert [p.to_json() for p in one.plugins] == [p.to_json() for p in other.plugins]


def test_schedule_for_somebody_elses_kernel(site: Any) -> None:
    site.add("extra", '@hookimpl\ndef tlhub_schedules():\n    return [schedule("gemm", "extra_way")]')
    catalog = tlhub.catalog.assemble(tlhub.plugins.find())
    names = [s.name for s in catalog.schedules["gemm"]]
    assert "extra_way" in names and len(names) > 1


# -- in a process of its own -----------------------------------------------------------------------


def test_listing_survives_broken_plugins(site: Any) -> None:
    site.add("exits", "import sys; sys.exit(3)")
    site.add("breaks", "import no_such_module_anywhere")
    site.add("chatty", "import os\nprint('noise')\nos.write(1, b'raw noise\\n')")
    site.add("good", GOOD)
    done = subprocess.run(
        [sys.executable, "-c", "from tlhub.cli import main; main()", "plugins", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    import json

    listed = {p["name"]: p for p in _plugins(json.loads(done.stdout))}
    assert listed["good"]["status"] == "ok"
    assert listed["exits"]["status"] == listed["breaks"]["status"] == "failed"
    assert "no_such_module_anywhere" in listed["breaks"]["error"]
    assert "noise" in done.stderr


def _plugins(document: Any) -> list[dict[str, Any]]:
    return document["plugins"] if isinstance(document, dict) else document


def test_finding_plugins_imports_nothing_heavy(site: Any) -> None:
    site.add("good", GOOD)
    code = (
        "import sys, tlhub.catalog; tlhub.catalog.load();"
        "heavy = {'numpy', 'tvm_ffi', 'tvm', 'tilelang', 'torch', 'jax', 'click', 'rich', 'filelock', 'platformdirs'};"
        "print(sorted(heavy & set(sys.modules)), 'good' in [p.name for p in tlhub.catalog.load().plugins])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\n"
