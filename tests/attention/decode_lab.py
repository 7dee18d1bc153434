"""What the tests of decoding on GPUs share: problems, binaries, and calls of the arrays that they take."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import cuda_lab
from cuda_array import Array

from tlhub import problem
from tlhub.specs import DeviceFacts, Schedule
from tlhub_attention.contracts.decode import DECODE

SCRATCH = Array((1 << 26,), 1 << 47, "uint8")
_ROOM = {False: ("S_kv",), True: ("P", "page", "L")}


def make(d=128, d_v=None, dtype="float16", page="page", **options):
    """Make a problem with all dims but the channels, and perhaps the page, symbolic."""
    names = ("B", "S", "H", "H_kv", *_ROOM[options.get("paged", False)])
    dims = {**{name: name for name in names}, "D": d, "D_v": d_v or d}
    return problem.make(DECODE, {**dims, "page": page} if "page" in dims else dims, dtype, options)


@functools.cache
def build(schedule: Schedule, facts: DeviceFacts, d=128, d_v=None, dtype="float16", page="page", **options):
    """Build the binary of ``make``'s problem."""
    made = make(d, d_v, dtype, page, **options)
    (config,) = schedule.configs(made, facts)
    return cuda_lab.build(
        schedule.program, DECODE, made.dim, dtype=dtype, config=config, options=options, arch=facts.arch
    )


def call(
    driver,
    built: SimpleNamespace,
    s=1,
    *,
    batch=3,
    heads=8,
    kv_heads=2,
    room=1000,
    pool=50,
    page=32,
    scratch=SCRATCH,
    **arrays,
):
    """Call a paged kernel of float16 with arrays in C order; *arrays* replace what those have."""
    pages = -(-room // page)
    shapes = {
        "q": ((batch, s, heads, 128), "float16"),
        "k": ((pool, page, kv_heads, 128), "float16"),
        "v": ((pool, page, kv_heads, 128), "float16"),
        "lengths": ((batch,), "int32"),
        "table": ((batch, pages), "int32"),
        "o": ((batch, s, heads, 128), "float16"),
        "lse": ((batch, heads, s), "float32"),
    }
    given = [
        Array(shape, **{"address": (i + 1) << 40, "dtype": dtype, **arrays.get(name, {})})
        for i, (name, (shape, dtype)) in enumerate(shapes.items())
    ]
    return driver.do(cuda_lab.call, built.linked, [*given, scratch, 0.1, 0, 0.0])
