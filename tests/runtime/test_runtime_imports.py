"""tilelang, torch, tvm_ffi and tlhub in one process, imported in any order, with calls in between."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys

import lab
import pytest

_PARTS = ("tilelang", "torch", "tvm_ffi", "tlhub")
_ORDERS = tuple(itertools.permutations(_PARTS))
# tlhub last and first; importing each part takes seconds, so that `make test-all` runs the other 22.
_QUICK = (0, 23)

_CODE = """
import sys
import numpy as np
loaded = None
def call():
    a = np.ones((3, 5), "float32"); c = np.zeros_like(a)
    loaded.module["main"](a, a, c, None, None)
    assert (c == 2).all()
    if "torch" in sys.modules:
        import torch
        t = torch.ones(3, 5); out = torch.zeros(3, 5)
        loaded.module["main"](t, t, out, None, 1.5)
        assert (out == 3).all()
for part in sys.argv[2:]:
    if part == "tlhub":
        from tlhub.runtime import load_library
        loaded = load_library(open(sys.argv[1], "rb").read(), "x")
    else:
        __import__(part)
    if loaded:
        call()
loaded = load_library(open(sys.argv[1], "rb").read(), "y")
call()
print("right")
"""


def _run(order):
    for part in order:
        if importlib.util.find_spec(part) is None:
            pytest.skip(f"{part} is not installed")
    made, _, _ = lab.linked("add")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", _CODE, f"{made.folder}/kernel.so", *order], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.split()[-1:] == ["right"], done.stderr[-2000:]


@pytest.mark.parametrize("order", [_ORDERS[i] for i in _QUICK], ids="-".join)
def test_orders(order):
    _run(order)


@pytest.mark.slow
@pytest.mark.parametrize("order", [o for i, o in enumerate(_ORDERS) if i not in _QUICK], ids="-".join)
def test_all_other_orders(order):
    _run(order)


def test_apache_tvm_beside_a_kernel():
    """A user's own TVM in the process: its runtime fills in hooks of what is loaded after it, and finds none."""
    _run(["tlhub", "tvm"])  # the library is loaded once before TVM, and once after it
