"""Dims that follow from others, over a number or over an option, rounded up."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tlhub import operands
from tlhub.catalog import load
from tlhub.errors import ArgumentError
from tlhub.problem import make, serves, signature, symbols, typed
from tlhub.specs import Arg, Dim, Kernel, Option

pytestmark = pytest.mark.light

BLOCKS = Kernel(
    name="blocks",
    revision=1,
    dims=(Dim("M"), Dim("K"), Dim("K_4", "K/4"), Dim("G", "K/group")),
    inputs=(Arg("x", ("M", "K")), Arg("scale", ("M", "K_4"))),
    outputs=(Arg("y", ("M", "G")),),
    dtypes=("float32",),
    options=(Option("group", (0, 2, 5), 2),),
    reference="-",
    tolerance="-",
    flops=lambda dims: 0.0,
)


@pytest.mark.parametrize(("group", "groups"), [(2, 4), (5, 2), (0, 1)])
def test_a_dim_that_follows_from_another_is_that_over_a_number_rounded_up(group: int, groups: int) -> None:
    made = make(BLOCKS, (3, 7), "float32", {"group": group})
    assert made.dim == {"M": 3, "K": 7, "K_4": 2, "G": groups}
    assert make(BLOCKS, made.dim, "float32", {"group": group}) == made
    assert typed(BLOCKS, made)[0] == {"M": 3, "K": 7}
    assert signature(BLOCKS, made).parts == {"K_4": ("K", 4), "G": ("K", group)}


def test_a_dim_that_follows_from_a_symbol_is_a_symbol_of_its_own() -> None:
    made = make(BLOCKS, ("M", "K"), "float32", {})
    assert made.dim == {"M": "?0", "K": "?1", "K_4": "?2", "G": "?3"}
    assert make(BLOCKS, symbols(BLOCKS, "float32", {}), "float32", {}) == made
    dims, dtype, options = typed(BLOCKS, made)
    assert make(BLOCKS, dims, dtype, options) == made
    assert serves(made, make(BLOCKS, (3, 7), "float32", {}))


@pytest.mark.parametrize("given", [{"K_4": 3}, {"K_4": "x"}, {"K_4": 0}])
def test_a_dim_that_follows_from_another_is_nothing_else(given: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=r"dim K_4 is .*; it is K/4 rounded up: 2 for K=7") as refused:
        make(BLOCKS, {"M": 3, "K": 7, **given}, "float32", {})
    assert "K_4=2" in (refused.value.hint or "")
    with pytest.raises(ArgumentError, match="3 dims were given; it takes M, K"):
        make(BLOCKS, (3, 7, 2), "float32", {})


@pytest.mark.parametrize(
    ("groups", "hint"), [(2, "group=5"), (1, "group=0"), (3, "leave G away, or G=4"), ("G", "leave G away, or G=4")]
)
def test_the_option_that_a_dim_follows_from_may_be_what_was_forgotten(groups: object, hint: str) -> None:
    with pytest.raises(ArgumentError, match="dim G is .*; it is K/group rounded up: 4 for K=7") as refused:
        make(BLOCKS, {"M": 3, "K": 7, "G": groups}, "float32", {})
    assert refused.value.hint == hint


@pytest.mark.parametrize(("count", "said"), [(0, "no arrays were given"), (1, "1 array was given")])
def test_the_hint_for_arrays_that_are_missing_keeps_the_options(count: int, said: str) -> None:
    with pytest.raises(ArgumentError, match=f"{said}; its inputs are x, scale") as caught:
        operands.read(BLOCKS, (np.ones((3, 7), "float32"),) * count, {"group": 5})
    assert caught.value.hint == "tlhub.get_for('blocks', x, scale, group=5)"


def test_a_part_is_not_the_whole_by_its_symbol() -> None:
    assert make(BLOCKS, {"M": 3, "K": "K", "K_4": "Q"}, "float32", {"group": 5}).dim["K_4"] != "K"
    with pytest.raises(ArgumentError, match="dim K_4 is 'K'; it is K/4 rounded up: 'K/4' for K='K'") as caught:
        make(BLOCKS, {"M": 3, "K": "K", "K_4": "K"}, "float32", {"group": 5})
    assert str(caught.value.hint).startswith("leave K_4 away")


def test_inputs_that_options_add_are_named_where_arrays_are_too_many() -> None:
    gemm = load().kernel("gemm")
    with pytest.raises(ArgumentError, match="3 arrays were given; its inputs are a, b; bias with bias=True; residual "):
        operands.read(gemm, (np.ones((3, 3), "float32"),) * 3, {})


def test_a_form_of_another_option_is_told_by_it_and_how_this_one_was_read() -> None:
    scaled, x, scales = load().kernel("gemm_scaled"), np.ones((5, 256), "int8"), np.ones(5, "float32")
    with pytest.raises(ArgumentError, match=r"argument 'a_scale' with scaling='tensor': expected dims \(\)") as caught:
        operands.read(scaled, (x, x, scales, scales), {"trans_b": True})
    assert caught.value.hint == "tlhub.get_for('gemm_scaled', a, b, a_scale, b_scale, trans_b=True, scaling='row')"


def test_a_form_that_the_other_arrays_have_not_is_no_hint() -> None:
    """(M, 1) looks like the blocks' scales, whose hint would be the one for rows again."""
    scaled, x, scales = load().kernel("gemm_scaled"), np.ones((5, 256), ml_dtypes.float8_e4m3fn), np.ones(5, "float32")
    for scaling in ("row", "block"):
        with pytest.raises(ArgumentError, match="expected dims") as caught:
            operands.read(scaled, (x, x, scales[:, None], scales), {"trans_b": True, "scaling": scaling})
        assert caught.value.hint == "tlhub kernels gemm_scaled"
    blocks = np.ones((5, 2), "float32"), np.ones((1, 2), "float32")
    with pytest.raises(ArgumentError, match="expected dims") as caught:
        operands.read(scaled, (x, x, *blocks), {"trans_b": True})
    assert caught.value.hint == "tlhub.get_for('gemm_scaled', a, b, a_scale, b_scale, trans_b=True, scaling='block')"
