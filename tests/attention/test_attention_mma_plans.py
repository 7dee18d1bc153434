"""Plans of attention by mma.sync: what they follow from, and that they fit."""

from __future__ import annotations

import itertools

import pytest

from tlhub import problem
from tlhub.errors import BuildError
from tlhub_attention.contracts.forward import ATTENTION
from tlhub_attention.mma.forward import MMA
from tlhub_attention.mma.forward_plan import Plan, Room, plan
from tlhub_cuda import TARGET

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "compute_80")


@pytest.mark.parametrize("arch", ARCHS)
def test_every_plan_fits_what_an_sm_has(arch):
    memory = TARGET.facts(f"cuda:{arch}").shared_memory
    for d, d_v in itertools.product(range(8, 257, 8), repeat=2):
        chosen = plan(d, d_v, Room.of(f"cuda:{arch}", memory))
        for each in (chosen, chosen.finished(d_v)):
            assert each.shared(d, d_v) <= memory and each.blocks * each.threads <= 256
            assert each.queries in (16 * each.warps, 32 * each.warps) and each.keys % 16 == 0 < each.keys


@pytest.mark.parametrize(
    ("channels", "arch", "text"),
    [
        ((64, 64), "sm_80", "128x64x4x2"),
        ((64, 64), "sm_86", "128x64x4x2"),
        ((128, 128), "sm_80", "128x48x4x2"),
        ((128, 128), "compute_80", "128x48x4x2"),
        ((128, 128), "sm_86", "128x64x8x1"),
        ((128, 128), "sm_90a", "128x64x4x2"),
        ((192, 128), "sm_80", "128x64x8x1"),
        ((256, 256), "sm_80", "128x48x8x1"),
        ((256, 256), "sm_89", "64x32x4x1"),
    ],
)
def test_tiles_follow_from_channels_and_from_shared_memory(channels, arch, text):
    dims = {**{x.name: x.name for x in ATTENTION.dims}, "D": channels[0], "D_v": channels[1]}
    made = problem.make(ATTENTION, dims, "float16", {})
    assert MMA.configs(made, TARGET.facts(f"cuda:{arch}")) == ({"plan": text},)


def test_a_plan_is_written_as_it_is_read():
    assert Plan.parse("128x64x4x2") == Plan(128, 64, 4, 2) and str(Plan(128, 64, 4, 2)) == "128x64x4x2"
    with pytest.raises(BuildError, match="'128' is no plan; it is the queries of a tile, the keys of a block, warps"):
        Plan.parse("128")
