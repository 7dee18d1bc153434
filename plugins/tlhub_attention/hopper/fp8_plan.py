"""Plans of fp8_hopper.cuh's kernel, and which serves a problem: a choice without a measurement. Pure."""

from __future__ import annotations

from tlhub_attention.hopper import forward_plan
from tlhub_attention.hopper.forward_plan import round_up

_STAGES = 2  # of the rings of keys and of values


class Plan(forward_plan.Plan):
    """A kernel as forward_plan has them, of elements of one byte."""

    @property
    def capped(self) -> Plan:
        return self._replace(queries=min(self.queries, 128))

    def _beside(self, d: int, d_v: int, tiles: int) -> int:
        wide = round_up(d, row(d))
        rings = _STAGES * self.keys * (wide + round_up(d_v, 32))
        return tiles * self.queries * wide + rings + 8 * (2 * tiles + 4 * _STAGES)


def row(d: int) -> int:
    """Return the channels of a box of q and k."""
    return 64 if d <= 64 else 128


def part(d_v: int) -> int:
    """Return the channels of o that a tensor core has the sums of at once."""
    channels = round_up(d_v, 32)
    return channels if channels <= 64 else channels // 2 if channels <= 192 else 32


def plans(d: int, d_v: int, causal: bool) -> tuple[Plan, ...]:
    """Return the plans for heads of *d* channels of q and k, and *d_v* of v, of which a call takes the cheapest; the
    last is for capped logits too."""
    if max(d, d_v) <= 64:
        return (Plan(192, 96),)
    return (Plan(128, 128 if d_v <= 128 else 64),)
