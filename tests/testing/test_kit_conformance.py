"""The conformance kit on plugins that keep the rules and on plugins that break one each."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tlhub import catalog, plugins, testing
from tlhub.build.frontends import FRONTENDS
from tlhub.specs import DeviceFacts, Target
from tlhub.testing.modules import unnamed_sources

pytestmark = pytest.mark.light

GOOD = """
from __future__ import annotations
from tlhub.hooks import hookimpl
from tlhub.specs import Arg, Dim, Kernel, Option, Schedule

@hookimpl
def tlhub_kernels():
    return [Kernel(
        name="twice", revision=1, dims=(Dim("M"),), inputs=(Arg("x", ("M",)),), outputs=(Arg("y", ("M",)),),
        dtypes=("float32",), options=(Option("fast", (False, True), default=False),),
        reference="PLUGIN:reference", tolerance="PLUGIN:tolerance", flops=lambda dims: 1.0 * dims["M"])]

@hookimpl
def tlhub_schedules():
    return [Schedule(name="plain", kernel="twice", kernel_revision=1, revision=1, targets=("nowhere",),
                     toolchain="tvm", program="PLUGIN:program")]

def reference(problem, inputs, scalars):
    return (2.0 * inputs["x"],)

def tolerance(problem, inputs, scalars, outputs):
    return (1e-6 * abs(outputs[0]),)

def program(problem, config, arch):
    pass
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Write a plugin of one module, or a package of several, and let the catalog be of that plugin alone."""
    monkeypatch.syspath_prepend(str(tmp_path))
    counter = iter(range(100))

    def write(source: str | dict[str, str], targets=()) -> str:
        name = f"kit_{tmp_path.name.replace('-', '_')}_{next(counter)}"
        files = {"__init__": source} if isinstance(source, str) else source
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / f"{file}.py").write_text(textwrap.dedent(text).replace("PLUGIN", name))
        point = plugins.metadata.EntryPoint(name, name, "tlhub")
        made = catalog.assemble([*plugins.find([point]), *targets])
        monkeypatch.setattr(catalog, "load", lambda: made)
        return name

    yield write
    for module in [m for m in sys.modules if m.startswith("kit_")]:
        del sys.modules[module]


def test_a_plugin_that_keeps_the_rules(plugin):
    report = testing.conformance(plugin(GOOD))
    states = {f.subject.rpartition(" on ")[0] or f.subject: f.state for f in report.findings}
    assert states.pop("schedule twice/plain") == "skipped"  # its target has no device here
    assert set(states.values()) == {"ok"} and len(states) >= 5


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def reference(", "def other(", "PLUGIN:reference"),
        ('"PLUGIN:tolerance"', '"PLUGIN.nowhere:tolerance"', "import PLUGIN.nowhere:tolerance"),
        ("def program(problem, config, arch):\n    pass", "program = 3", "program is not callable"),
        ('inputs=(Arg("x", ("M",)),)', 'inputs=(Arg("x", ("Q",)),)', "'x' has dim 'Q'"),
        ('Arg("y", ("M",))', 'Arg("y", ("M",), "as:z")', "'y' has dtype 'as:z', which names no input"),
        (
            'reference="',
            'prepare="PLUGIN:late", reference="',
            "PLUGIN:late: late is not callable|has no attribute 'late'",
        ),
        ("default=False", "default=None", "option 'fast' has no valid default"),
        ('dims["M"]', 'dims["N"]', "flops\\(\\) failed"),
        ('Option("fast"', 'Option("M"', "'M' is declared twice"),
        ('Arg("y", ("M",))', 'Arg("y", ("M",), when={"slow": True})', "'y' exists when slow=True"),
        ('Dim("M")', 'Dim("M", when={"slow": True})', "'x' has dim 'M', which exists when slow=True"),
        ('Dim("M")', 'Dim("M"), Dim("N", when={"slow": True})', "'N' exists when slow=True"),
        ("return [Kernel(", "return [3, Kernel(", "returned 3"),
        ("def tlhub_kernels", "def tlhub_kernel", "unknown hook"),
        ("from __future__", "import nonsense_module\nfrom __future__", "SyntaxError|nonsense_module"),
    ],
)
def test_a_broken_rule_is_named(plugin, old, new, said):
    assert old in GOOD
    name = plugin(GOOD.replace(old, new))
    with pytest.raises(AssertionError, match=said.replace("PLUGIN", name)) as caught:
        testing.conformance(name)
    assert "failed" in str(caught.value)


def test_a_plugin_that_is_not_installed(plugin):
    name = plugin(GOOD)
    with pytest.raises(AssertionError, match=f"'elsewhere' is no installed plugin; those that are: {name}"):
        testing.conformance("elsewhere")


def test_a_toolchain_that_there_is_not(plugin):
    with pytest.raises(AssertionError, match="no toolchain 'nvcc'; those that are: cuda, tilelang, tvm"):
        testing.conformance(plugin(GOOD.replace('toolchain="tvm"', 'toolchain="nvcc"')))


def test_targets_that_are_one_string(plugin):
    name = plugin(GOOD.replace('targets=("nowhere",)', 'targets="nowhere"'))
    with pytest.raises(AssertionError, match="schedule 'plain' of twice: targets is 'nowhere'; it is a tuple of names"):
        testing.conformance(name)


def test_a_missing_toolchain_is_no_fault_of_the_plugin(plugin, monkeypatch):
    monkeypatch.setitem(FRONTENDS, "no_such_toolchain", "no_such_frontend")
    source = GOOD.replace('toolchain="tvm"', 'toolchain="no_such_toolchain"').replace(
        'program="PLUGIN:program"', 'program="PLUGIN.heavy:program"'
    )
    name = plugin({"__init__": source, "heavy": "import no_such_toolchain\ndef program(*_): pass"})
    report = testing.conformance(name)
    (found,) = [f for f in report.findings if f.subject == f"import {name}.heavy:program"]
    assert (found.state, found.detail) == ("skipped", "no_such_toolchain is not installed")


def test_a_source_that_is_not_named(plugin):
    files = {
        "__init__": GOOD.replace('program="PLUGIN:program"', 'program="PLUGIN.cpu:program"'),
        "cpu": "import math\nfrom . import tiles\ndef program(*_):\n    from PLUGIN.late import x",
        "tiles": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from PLUGIN import typed\n",
        "late": "from .deep import y\nx = 1",
        "deep": "y = 1",
        "typed": "",
        "other": "",
    }
    name = plugin(files)
    with pytest.raises(AssertionError, match=f"imports {name}.deep, {name}.late, {name}.tiles; name it in sources"):
        testing.conformance(name)
    named = [f"{name}.{m}" for m in ("cpu", "tiles", "late", "deep")]
    assert unnamed_sources(f"{name}.cpu", named, name) == ()
    assert unnamed_sources(f"{name}.cpu", named[:2], name) == (f"{name}.deep", f"{name}.late")


def test_a_name_taken_from_the_package_itself_is_a_source(plugin):
    files = {"__init__": GOOD + "\nTILE = 8", "cpu": "from . import TILE\ndef program(*_): pass"}
    name = plugin(files)
    assert unnamed_sources(f"{name}.cpu", [f"{name}.cpu"], name) == (name,)


def _target(**changes):
    facts = DeviceFacts("toy:one", "a toy", 0)
    record = {
        "name": "toy",
        "rank": 1,
        "device_type": 1,
        "archs": ("one",),
        "canonical": lambda name: name if name == "one" else None,
        "devices": lambda: (facts,),
        "facts": lambda arch: facts,
        "runs": lambda arch, facts: None,
        "assemble": "json:dumps",
    }
    return Target(**{**record, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"archs": ("one", "two")}, r"canonical\('two'\) is None"),
        ({"runs": lambda arch, facts: "it is broken"}, "does not run its own arch"),
        ({"devices": lambda: (DeviceFacts("other:one", "x", 0),)}, "'other:one', which is not of the target"),
    ],
)
def test_targets(plugin, monkeypatch, changes, said):
    brings = plugins.Plugin("toys", "toys", "toys", "1", targets=(_target(**changes),))
    monkeypatch.setattr(catalog, "load", lambda: catalog.assemble([brings]))
    with pytest.raises(AssertionError, match=said):
        testing.conformance("toys")


def test_a_schedule_that_serves_no_small_problem(plugin, monkeypatch):
    toys = plugins.Plugin("toys", "toys", "toys", "1", targets=(_target(),))
    source = GOOD.replace('("nowhere",)', '("toy",)').replace(
        "toolchain=", "supports=lambda problem, facts: 'only on Sundays', toolchain="
    )
    with pytest.raises(AssertionError, match="serves no small problem: only on Sundays"):
        testing.conformance(plugin(source, targets=[toys]))


@pytest.mark.parametrize("module", ["tlhub_gemm", "tlhub_mixed", "tlhub_cpu"])
def test_the_built_in_plugins_keep_the_rules(module):
    testing.conformance(module, build=False)


# -- dtypes and options, one by one ----------------------------------------------------------------

SUM = """
from __future__ import annotations
import numpy as np
from tlhub.hooks import hookimpl
from tlhub.specs import Arg, Dim, Kernel, Option, Schedule

def check(problem):
    return "wide is for float32" if problem.option["wide"] and problem.dtype != "float32" else None

@hookimpl
def tlhub_kernels():
    return [Kernel(
        name="act", revision=1, dims=(Dim("M"),), inputs=(Arg("x", ("M",)),), outputs=(Arg("y", ("M",)),),
        dtypes=("float64", "float32"), check=check,
        options=(Option("epilogue", ("none", "relu", "negate"), "none"), Option("wide", (False, True), False)),
        reference="PLUGIN:reference", tolerance="PLUGIN:tolerance", flops=lambda dims: 1.0 * dims["M"])]

@hookimpl
def tlhub_schedules():
    return [Schedule(name="plain", kernel="act", kernel_revision=1, revision=1, targets=("toy",), toolchain="tvm",
                     program="PLUGIN:program", supports=supports)]

def supports(problem, facts):
    return None

def reference(problem, inputs, scalars):
    x = inputs["x"].astype("float64")
    return ({"none": x, "relu": np.maximum(x, 0), "negate": -x}[problem.option["epilogue"]],)

def tolerance(problem, inputs, scalars, outputs):
    return (1e-6 * abs(outputs[0]),)

def program(problem, config, arch):
    pass
"""


@pytest.fixture
def served(plugin, monkeypatch):
    """Install a plugin whose kernel is computed by NumPy as told: return its name and what was asked for."""
    from tlhub import hub
    from tlhub.problem import make

    asked = []

    def install(compute, source=SUM):
        name = plugin(source, targets=[plugins.Plugin("toys", "toys", "toys", "1", targets=(_target(),))])
        contract = catalog.load().kernel("act")

        class Compiled:
            def __init__(self, problem):
                self.problem = problem

            def __call__(self, x, out):
                out[...] = compute(self.problem, x)

        def get(kernel, shape, dtype, *, device, schedule, **options):
            assert (kernel, device, schedule) == ("act", "toy:0", "plain")
            asked.append(make(contract, shape, dtype, options))
            return Compiled(asked[-1])

        monkeypatch.setattr(hub, "get", get)
        return name

    install.asked = asked
    return install


def _obey(problem, x):
    return {"none": x, "relu": x.clip(0), "negate": -x}[problem.option["epilogue"]]


def test_each_dtype_and_each_value_of_an_option_is_built_once(served):
    report = testing.conformance(served(_obey))
    asked = [(p.dtype, *p.option.values()) for p in served.asked]
    assert asked == [
        ("float64", "none", False),
        ("float32", "none", False),
        ("float64", "relu", False),
        ("float64", "negate", False),
        ("float32", "none", True),  # a value that the contract has for another dtype only
    ]
    subject = "schedule act/plain on toy"
    shown = [f.subject for f in report.findings if f.subject.startswith(subject)]
    named = ("dtype='float32'", "epilogue='relu'", "epilogue='negate'", "wide=True")
    assert shown == [subject, *[f"{subject}: {name}" for name in named]]


def test_an_option_that_is_accepted_and_ignored_is_named(served):
    name = served(lambda problem, x: x)
    with pytest.raises(AssertionError, match=r"failed +schedule act/plain on toy: epilogue='relu': y\[") as caught:
        testing.conformance(name)
    assert "epilogue='negate'" in str(caught.value) and "wide" not in str(caught.value)
    testing.conformance(name, thorough=False)  # the defaults alone are right


def test_a_dtype_that_is_accepted_and_wrong_is_named(served):
    name = served(lambda problem, x: _obey(problem, x) if problem.dtype == "float64" else 2 * x)
    with pytest.raises(AssertionError, match="schedule act/plain on toy: dtype='float32': y"):
        testing.conformance(name)


def test_an_option_that_is_refused_is_not_built(served):
    refusing = SUM.replace(
        "    return None\n\ndef reference",
        """
    return None if problem.option["epilogue"] == "none" else f"epilogue={problem.option['epilogue']!r} is not served"

def reference""",
    )
    report = testing.conformance(served(lambda problem, x: x, refusing))
    (found,) = [f for f in report.findings if f.subject.endswith("epilogue='relu'")]
    assert (found.state, found.detail) == ("ok", "refused: epilogue='relu' is not served")
    assert {p.option["epilogue"] for p in served.asked} == {"none"}


def test_the_number_of_builds_is_bounded(served):
    many = SUM.replace('("none", "relu", "negate")', 'tuple("none relu negate".split()) + tuple(range(40))')
    many = many.replace('problem.option["epilogue"]],)', 'problem.option["epilogue"]] if False else x,)')
    report = testing.conformance(served(lambda problem, x: x, many))
    assert len(served.asked) == 24
    skipped = [f for f in report.findings if f.state == "skipped" and "on toy" in f.subject]
    assert skipped and all(f.detail == "24 problems were built" for f in skipped)
    served.asked.clear()
    testing.conformance(served(lambda problem, x: x, many), thorough=False)
    assert len(served.asked) == 1
