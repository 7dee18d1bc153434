"""Measuring: a kernel against the platform's library, each in a process of its own, in alternation."""

from __future__ import annotations

from tlhub.bench.measure import bench
from tlhub.bench.report import Peer, Report, Timing

__all__ = ["Peer", "Report", "Timing", "bench"]
