"""benchmarks/attention_gpu.py: what it takes for the truth, and its lines; the rest of it needs a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tlhub import catalog
from tlhub.problem import make
from tlhub.testing.data import default_scalars, function, inputs

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "attention_gpu.py"
GROUPED = {"H": 4, "D": 8, "H_kv": 2, "D_v": 16}


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("name", "dims", "options"),
    [
        ("attention", {"B": 2, "S": 5, "S_kv": 9}, {"causal": False}),
        ("attention", {"B": 2, "S": 5, "S_kv": 9}, {"causal": True}),
        ("attention_bwd", {"B": 2, "S": 7}, {"causal": True}),
        ("attention_bwd", {"B": 2, "S": 5, "S_kv": 3}, {"causal": False}),
        ("attention_varlen", {"T": 20, "N1": 4}, {"causal": True}),
        ("attention_decode", {"B": 2, "S": 3, "S_kv": 9}, {}),
        ("attention_decode", {"B": 2, "S": 3, "P": 9, "page": 2, "L": 4}, {"paged": True}),
    ],
)
def test_the_truth_is_the_contracts(script: Any, name: str, dims: Any, options: Any, monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(script, "LOGITS", 30)  # several steps
    kernel = catalog.load().kernel(name)
    problem = make(kernel, {**GROUPED, **dims}, "float64", options)
    arrays, scalars = inputs(kernel, problem, seed=1, whole=True), default_scalars(kernel, problem)
    wanted = function(kernel.reference)(problem, arrays, scalars)
    found = [torch.from_numpy(np.asarray(x, np.float64)) for x in (wanted if isinstance(wanted, tuple) else [wanted])]
    given = {key: torch.from_numpy(x) for key, x in arrays.items()}
    assert script.error(problem, given, scalars["scale"], found) < 1e-6  # lse is float32
    found[-1] = found[-1].clone()
    found[-1][-1] += 1e-3  # of the last sequence
    assert script.error(problem, given, scalars["scale"], found) > 1e-5


def test_a_line_has_what_was_found_and_blanks_for_what_was_not(script: Any) -> None:
    row = {
        "problem": "attention(S=9)",
        "seconds": {"tlhub": 2e-6, "torch-flash": 3e-6},
        "errors": {"tlhub": 3e-3, "torch-flash": 2e-3},
        "memory": 3 << 20,
        "repeats": True,
        "runs": 5,
        "same": 4,
    }
    assert script.line(row) == "| attention(S=9) | 2.0 us |  | 1.50 |  | 3.0e-03, 1.50 | 3.0 MiB | 4 of 5 |"
    alone = {**row, "seconds": {"tlhub": 2e-6}, "errors": {"tlhub": 3e-3}, "repeats": False}
    assert script.line(alone) == "| attention(S=9) | 2.0 us |  |  |  | 3.0e-03 | 3.0 MiB |  |"
    assert script.line({"problem": "p", "fault": "no GPU"}) == "| p | no GPU | | | | | | |"


def test_what_is_measured_is_of_the_suites(script: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["attention_gpu.py", "attention_bwd", "--deterministic"])
    asked = []
    monkeypatch.setattr(script, "table", lambda requests, rounds, runs: asked.extend(requests) or [])
    assert script.main() == 0
    assert {r["kernel"] for r in asked} == {"attention_bwd"} and all(r["deterministic"] for r in asked)
    monkeypatch.setattr("sys.argv", ["attention_gpu.py", "attentoin"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
