"""The decision: who serves, in which order, and why the others do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tlhub.errors import UnknownName
from tlhub.resolve import resolve
from tlhub.specs import DeviceFacts, Problem, Schedule

pytestmark = pytest.mark.light

FACTS = DeviceFacts("cpu:x86-64-v3", "a processor")
PROBLEM = Problem("k", 2, (("M", 8),), (("a", "float32"),), ())
BASE = Schedule("base", "k", 2, 1, ("cpu",), "tvm", "nowhere:program")


def broken(*_: Any) -> Any:
    raise RuntimeError("half way")


def leaves(*_: Any) -> Any:
    raise SystemExit(9)


class Wordless(BaseException):
    def __str__(self) -> str:
        raise ValueError


def wordless(*_: Any) -> Any:
    raise Wordless


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_priority_then_name_and_the_order_given_never_matters() -> None:
    schedules = [replace(BASE, name="b"), replace(BASE, name="c", priority=5), replace(BASE, name="a")]
    for order in (schedules, schedules[::-1]):
        assert [c.schedule.name for c in resolve(order, PROBLEM, FACTS).candidates] == ["c", "a", "b"]


def test_each_rejection_has_its_reason() -> None:
    schedules = [
        replace(BASE, name="elsewhere", targets=("cuda",)),
        replace(BASE, name="old", kernel_revision=1),
        replace(BASE, name="picky", supports=lambda p, f: "M is even"),
        replace(BASE, name="raises", supports=broken),
        replace(BASE, name="raises_later", configs=broken),
        replace(BASE, name="leaves", supports=leaves),
        replace(BASE, name="wordless", supports=wordless),
        replace(BASE, name="empty", configs=lambda p, f: ()),
        replace(BASE, name="yes", supports=lambda p, f: True),  # type: ignore[arg-type,return-value]
        replace(BASE, name="gone"),
        BASE,
    ]
    found = resolve(schedules, PROBLEM, FACTS, broken=lambda s: "no source" if s.name == "gone" else None)
    assert [c.schedule.name for c in found.candidates] == ["base"]
    reasons = {r.schedule: r.reason for r in found.rejected}
    assert reasons["elsewhere"] == "for cuda, not cpu"
    assert reasons["old"] == "for revision 1 of k, which is at 2"
    assert reasons["picky"] == "M is even"
    assert "half way" in reasons["raises"] and "half way" in reasons["raises_later"]
    assert "SystemExit: 9" in reasons["leaves"]
    assert reasons["wordless"].startswith("its plugin failed: Wordless (")
    assert reasons["empty"] == "no config fits"
    assert reasons["yes"] == "its plugin failed: supports() is True, no reason"
    assert reasons["gone"] == "no source"


def test_asked_for_by_name() -> None:
    found = resolve([BASE, replace(BASE, name="other", priority=9)], PROBLEM, FACTS, asked="base")
    assert [c.schedule.name for c in found.candidates] == ["base"]
    assert found.candidates[0].reason == "asked for"
    with pytest.raises(UnknownName, match="did you mean 'other'"):
        resolve([BASE, replace(BASE, name="other")], PROBLEM, FACTS, asked="othre")


def test_a_name_that_is_no_text_is_unknown() -> None:
    with pytest.raises(UnknownName, match="unknown schedule 3 of k; known: base"):
        resolve([BASE], PROBLEM, FACTS, asked=3)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match=r"unknown schedule \['base'\] of k; known: base"):
        resolve([BASE], PROBLEM, FACTS, asked=["base"])  # type: ignore[arg-type]


def test_an_interrupt_is_not_a_broken_plugin() -> None:
    with pytest.raises(KeyboardInterrupt):
        resolve([replace(BASE, supports=interrupted)], PROBLEM, FACTS)


def test_the_first_config_is_taken() -> None:
    schedule = replace(BASE, configs=lambda p, f: ({"tile": 8}, {"tile": 4}))
    assert resolve([schedule], PROBLEM, FACTS).candidates[0].config == {"tile": 8}


def test_who_serves_by_name_is_told_where_it_ranks_before_who_serves_unasked() -> None:
    served = replace(BASE, name="served", priority=5)

    def by_name(*priorities: int, asked: str | None = None) -> str | None:
        named = (replace(BASE, name=f"of {p}", priority=p, experimental=True) for p in priorities)
        return resolve([served, *named], PROBLEM, FACTS, asked=asked).by_name

    assert by_name(6, 9, 7) == "of 9"
    assert by_name(4) is None
    assert by_name(9, asked="of 9") is None
