"""The kernels that tests call, and their arguments."""

from __future__ import annotations

import functools

import cuda_lab
from cuda_array import Array


@functools.cache
def axpy():
    return cuda_lab.build("cuda_programs:axpy", cuda_lab.AXPY).linked


@functools.cache
def scale():
    return cuda_lab.build("cuda_programs:scale", cuda_lab.SCALE).linked


@functools.cache
def sums():
    return cuda_lab.build("cuda_programs:sums", cuda_lab.SUM).linked


def vectors(n=1000, **fields):
    """Arguments of axpy: a, b, c, no workspace, alpha."""
    return [*(Array((n,), (i + 1) << 20, **fields) for i in range(3)), None, 2.5]


def matrices(m, n, alpha=1.0, **a):
    """Arguments of scale: a, with its fields, then c, no workspace, alpha."""
    return [Array((m, n), **{"address": 1 << 30, **a}), Array((m, n), 1 << 40), None, alpha]


def rows(m, n, workspace=None):
    """Arguments of sums."""
    return [Array((m, n), 1 << 30), Array((m,), 1 << 40), workspace]
