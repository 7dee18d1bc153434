"""What is fixed when the program of a product is made. Imported in workers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlhub.cpu.elements import Element
from tlhub.cpu.ir import Expr, bind
from tlhub.specs import Problem
from tlhub_mixed.cpu.entry import Fields

DEPTH = 128
"""Of K that is packed, and added up in registers, at a time: a block of scales, and a multiple of every group."""


@dataclass(frozen=True)
class Plan:
    """A product of one kind.

    ``axes``: the dims of each array, in order. ``acc``: the dtype of sums, float32 or int32. ``lanes``: of it in a
    vector register. ``mr``, ``nr``: the register tile. ``mc``, ``nc``: the most rows and columns that a task takes.
    ``rescale``: the sums of each DEPTH along K have scales of their own; ``closing``: those of all of K have.
    """

    problem: Problem
    axes: Mapping[str, Sequence[str]]
    half: bool
    acc: str
    lanes: int
    mr: int
    nr: int
    mc: int
    nc: int
    rescale: bool
    closing: bool

    @classmethod
    def of(
        cls,
        problem: Problem,
        axes: Mapping[str, Sequence[str]],
        config: Mapping[str, Any],
        acc: str,
        rescale: bool = False,
        closing: bool = False,
    ) -> Plan:
        """Return the plan for *config*, whose knobs are described in ``tlhub_mixed.cpu.schedules``."""
        knobs = {knob: int(config[knob]) for knob in ("lanes", "mr", "nr", "mc", "nc")}
        return cls(problem, axes, bool(config["half"]), acc, rescale=rescale, closing=closing, **knobs)

    @property
    def glu(self) -> bool:
        return bool(self.problem.option["glu"])

    def element(self, name: str) -> Element:
        return Element(dict(self.problem.dtypes)[name], self.half)

    @property
    def fields(self) -> Fields:
        """Dims, places and strides: ``M``, ``a_at``, ``a_K``; how tasks are cut; the bits of ``out_scale``."""
        dims = dict.fromkeys(axis for names in self.axes.values() for axis in names)
        arrays = [f"{name}_{part}" for name, dims in self.axes.items() for part in ("at", *dims)]
        return Fields([*dims, *arrays, "columns", "wide", "across", "out_scale"])

    @property
    def pointers(self) -> list[tuple[str, str]]:
        """The parameters of a function that takes all arrays and the numbers: those of ``Function``."""
        arrays = [(name, f"*{self.element(name).storage}") for name in self.axes]
        return [*arrays, ("call", "*int64")]

    def place(self, call: Expr, name: str, **index: Expr) -> Expr:
        """Return the place of an element of array *name* by its index in each dim; in those not given, 0."""
        used = [axis for axis in self.axes[name] if axis in index]
        at, *steps = self.fields.read(call, f"{name}_at", *(f"{name}_{axis}" for axis in used))
        for axis, step in zip(used, steps, strict=True):
            at = at + index[axis] * step
        return bind(at)

    def step(self, call: Expr, name: str, axis: str) -> Expr | None:
        """Return the stride of array *name* along *axis*, None where it has no such dim."""
        if axis not in self.axes[name]:
            return None
        (step,) = self.fields.read(call, f"{name}_{axis}")
        return step
