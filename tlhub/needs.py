"""Needs: beside which versions of distributions a prebuilt store serves. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tlhub.specs import Need, PrebuiltStore


def need(distribution: str, version: str) -> Need:
    """Return what binaries built with that version of a distribution need: it, up to the next that may break them.

    By the rule of semantic versions that is the next minor one before 1.0, and the next major one from then on.
    """
    major, minor, *_ = (*_release(version), 0, 0)
    return Need(distribution, version.partition("+")[0], f"{major + 1}" if major else f"0.{minor + 1}")


def requirement(wanted: Need) -> str:
    """Return *wanted* as pip reads it: ``tlhub-core>=0.1.0,<0.2``."""
    return f"{wanted.distribution}>={wanted.least},<{wanted.below}"


def misfit(store: PrebuiltStore, versions: Mapping[str, str]) -> str | None:
    """Return why *store* may not serve beside the installed *versions* (by distribution), or None.

    pip keeps to the ranges where it may, and says no more than a warning when another install breaks one.
    """
    for wanted in store.needs:
        here = versions.get(wanted.distribution)
        if here is None or not _release(wanted.least) <= _release(here) < _release(wanted.below):
            return f"it needs {requirement(wanted)}, here is {here or 'none'}"
    return None


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what marks it as early or late: 0.2.0rc1 counts as 0.2."""
    found = re.match(r"v?(?:[0-9]+!)?([0-9]+(?:\.[0-9]+)*)", version)
    numbers = [int(part) for part in found[1].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
