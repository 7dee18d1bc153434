"""The program compiles for every kind of CPU, in a process of its own, as in a worker."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tlhub import problem
from tlhub_attention.contract import ATTENTION
from tlhub_attention.cpu import FLASH, configs
from tlhub_cpu import TARGET

MACHINES = {"x86-64-v2": 62, "x86-64-v4": 62, "aarch64": 183}  # as an ELF header numbers them

_BUILD = """
import json, sys
sys.modules["torch"] = None
import tvm
from tlhub.specs import Problem
from tlhub_attention.cpu_program import program

request = json.load(sys.stdin)
fields = {k: tuple(map(tuple, v)) if isinstance(v, list) else v for k, v in request["problem"].items()}
module = program(Problem(**fields), request["config"], request["arch"])
tvm.tirx.build(module, target=tvm.target.Target(request["target"])).write_to_file(request["path"], "o")
"""


@pytest.mark.tvm
@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_it_compiles_for(arch: str, dtype: str, tmp_path: object) -> None:
    made = problem.make(ATTENTION, {d.name: d.name for d in ATTENTION.dims}, dtype, {"causal": True, "lse": True})
    made = problem.generalise(made, FLASH.symbolic)
    facts = TARGET.facts(f"cpu:{arch}")
    x86 = arch.startswith("x86")
    request = {
        "problem": {
            "kernel": made.kernel,
            "revision": made.revision,
            "dims": made.dims,
            "dtypes": made.dtypes,
            "options": made.options,
        },
        "config": dict(configs(made, facts)[0]),
        "arch": facts.arch,
        "target": {"kind": "llvm", "mcpu": arch} if x86 else {"kind": "llvm", "mtriple": "aarch64-linux-gnu"},
        "path": f"{tmp_path}/program.o",
    }
    script = f"import sys; sys.path[:] = {sys.path!r}\n{_BUILD}"
    done = subprocess.run([sys.executable, "-c", script], input=json.dumps(request), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    with open(f"{tmp_path}/program.o", "rb") as file:
        header = file.read(20)
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == MACHINES[arch]
