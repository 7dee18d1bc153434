"""Hints of refused calls: each mends what was wrong."""

from __future__ import annotations

import lab
import numpy as np
import pytest
from runtime_help import rows, wrong

from tlhub.errors import ArgumentError


@pytest.mark.parametrize(
    ("made", "hint"),
    [
        (lambda a: a.astype("float64"), "b.astype('float32')"),
        (lambda a: a.astype(object), "b.astype('float32')"),
        (lambda a: np.ones((3, 5), "float32"), "tlhub.get_for('add', a, b)"),
        (lambda a: np.ones(4, "float32"), "tlhub.get_for('add', a, b)"),
        (lambda a: [1.0], "numpy.asarray(...) makes one of most things"),
        (lambda a: np.zeros(49, np.uint8)[1:].view("float32").reshape(3, 4), "b.copy()"),
    ],
)
def test_a_wrong_input_gets_a_hint_that_mends_it(add, made, hint):
    a = rows(3, 4)
    for named in ({}, {"out": a.copy()}):  # both ways into the library
        with pytest.raises(ArgumentError) as caught:
            add(a, made(a), **named)
        assert caught.value.argument == "b" and caught.value.hint == hint
        assert str(caught.value).endswith(f"\nhint: {hint}")


def test_the_hint_for_bits_in_integers_is_a_view():
    kernel = lab.compiled("bits", "bits", dtype="bfloat16")
    with pytest.raises(ArgumentError) as caught:
        kernel(np.ones(4, "uint16"))
    assert caught.value.hint == "a.view(ml_dtypes.bfloat16)"
    with pytest.raises(ArgumentError) as caught:
        kernel(np.ones(4, "float32"))
    assert caught.value.hint == "a.astype(ml_dtypes.bfloat16)"


def test_torch_is_told_in_its_own_words(add):
    torch = pytest.importorskip("torch")
    a = torch.ones(3, 4)
    with pytest.raises(ArgumentError) as caught:
        add(a, a.double())
    assert caught.value.hint == "b.to(torch.float32)"


def test_errors_of_the_output_name_it_as_the_caller_did(add):
    a = rows(3, 4)
    frozen = a.copy()
    frozen.flags.writeable = False
    for out, fresh in ((a, True), (frozen, True), (rows(4, 4), False), (a.astype("float64"), False), ([1.0], False)):
        error = wrong(add, a, a, out=out, match=r"^add: argument 'c' \(out\): expected", argument="c")
        assert error.hint.endswith("leave out= away: the result is a new array")
        assert error.hint.startswith("out=numpy.empty_like(out)") == fresh
    with pytest.raises(ArgumentError, match=r"^moments: argument 'count' \(out\): expected dtype int64"):
        lab.compiled("moments", "moments")(np.ones((3, 4)), out=(np.empty(3), np.empty(3)))


def test_arrays_passed_by_name(add):
    a = rows(3, 4)
    for inputs, named in (((), {"a": a, "b": a}), ((a,), {"b": a}), ((), {"a": a, "b": a, "out": a.copy()})):
        with pytest.raises(ArgumentError) as caught:
            add(*inputs, **named)
        assert "is an input, and was passed by name" in str(caught.value)
        assert caught.value.hint == "inputs go by position: kernel(a, b)"
    error = wrong(add, a, a, c=a.copy(), match="'c' is an output", argument="c")
    assert error.hint == "outputs are passed as out=: kernel(a, b, out=c)"


def test_other_wrong_arguments_get_a_hint(add):
    a = rows(3, 4)
    assert wrong(add, a, match="got 1", argument="b").hint == "kernel(a, b)"
    assert wrong(add, a, a, zzz=1.0, match="no scalar 'zzz'", argument="zzz").hint == "tlhub kernels add"
    assert wrong(add, a, a, alpha="2", match="expected a float", argument="alpha").hint == "alpha=float(...)"
    assert wrong(add, a, a, workspace=3, match="workspace", argument="workspace").hint == "leave workspace= away"
    assert wrong(add, a, a, stream=3, match="stream", argument="stream").hint == "leave stream= away"
