"""The program compiles for every kind of CPU, in a process of its own, as in a worker."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tlhub import problem
from tlhub.specs import Kernel, Schedule
from tlhub_attention.contracts.backward import ATTENTION_BWD
from tlhub_attention.contracts.decode import DECODE
from tlhub_attention.contracts.forward import ATTENTION
from tlhub_attention.contracts.varlen import VARLEN
from tlhub_attention.cpu.schedules import FLASH, FLASH_BWD, FLASH_DECODE, FLASH_VARLEN, configs
from tlhub_cpu import TARGET

MACHINES = {"x86-64-v2": 62, "x86-64-v4": 62, "aarch64": 183}  # as an ELF header numbers them

_BUILD = """
import json, sys
sys.modules["torch"] = None
import tvm
from tlhub.specs import Problem
from tlhub.testing.data import function

request = json.load(sys.stdin)
program = function(request["program"])
fields = {k: tuple(map(tuple, v)) if isinstance(v, list) else v for k, v in request["problem"].items()}
module = program(Problem(**fields), request["config"], request["arch"])
tvm.tirx.build(module, target=tvm.target.Target(request["target"])).write_to_file(request["path"], "o")
"""


@pytest.mark.tvm
@pytest.mark.parametrize(
    "arch", ["x86-64-v2", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("x86-64-v4", "aarch64"))]
)
@pytest.mark.parametrize(
    ("kernel", "schedule", "dtype", "options"),
    [
        (ATTENTION, FLASH, "float16", {"causal": True, "lse": True}),
        (ATTENTION, FLASH, "float64", {"causal": True, "lse": True}),
        (ATTENTION_BWD, FLASH_BWD, "float16", {"causal": True}),
        (DECODE, FLASH_DECODE, "bfloat16", {"paged": True}),
        (VARLEN, FLASH_VARLEN, "bfloat16", {"lse": True}),
    ],
    ids=["float16", "float64", "backward", "decode", "varlen"],
)
def test_it_compiles_for(
    arch: str, kernel: Kernel, schedule: Schedule, dtype: str, options: dict[str, bool], tmp_path: object
) -> None:
    made = problem.make(kernel, problem.symbols(kernel, dtype, options), dtype, options)
    made = problem.generalise(made, schedule.symbolic)
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
        "program": schedule.program,
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
