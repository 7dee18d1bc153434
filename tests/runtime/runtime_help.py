"""Arrays of numbers in a row, and calls that must be refused."""

from __future__ import annotations

import numpy as np
import pytest

from tlhub.errors import ArgumentError


def rows(*shape, dtype="float32"):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def wrong(kernel, *inputs, match, argument, **named):
    """Call, expect an ArgumentError that names *argument*, and return it."""
    with pytest.raises(ArgumentError, match=match) as caught:
        kernel(*inputs, **named)
    assert caught.value.argument == argument
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, TypeError)
    return caught.value
