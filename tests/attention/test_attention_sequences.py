"""Decoding and sequences end to end: what the contracts declare and refuse, and the references against plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tlhub import problem, testing
from tlhub.errors import ArgumentError
from tlhub.specs import Problem
from tlhub_attention.contracts.backward import ATTENTION_BWD
from tlhub_attention.contracts.decode import DECODE
from tlhub_attention.contracts.varlen import VARLEN
from tlhub_attention.contracts.varlen_backward import VARLEN_BWD
from tlhub_attention.cpu.schedules import FLASH_DECODE, FLASH_VARLEN, FLASH_VARLEN_BWD
from tlhub_attention.references import backward as backward_reference
from tlhub_attention.references import decode as decode_reference
from tlhub_attention.references import varlen as varlen_reference
from tlhub_attention.references import varlen_backward as varlen_backward_reference

pytestmark = pytest.mark.light

Array = np.ndarray[Any, Any]
PAGES = {"P": 9, "page": 16, "L": 2}


def decode(dtype: Any = "float64", **given: Any) -> Problem:
    dims = {"B": 3, "S": 2, "H": 4, "D": 3, "H_kv": 2, "D_v": 5}
    dims |= PAGES if given.get("paged") else {"S_kv": 20}
    options = {k: v for k, v in given.items() if k[0].islower() and k != "page"}
    return problem.make(DECODE, dims | {k: v for k, v in given.items() if k not in options}, dtype, options)


def varlen(dtype: Any = "float64", **given: Any) -> Problem:
    dims = {"T": 12, "H": 4, "D": 3, "N1": 4, "H_kv": 2, "T_kv": 15, "D_v": 5}
    options = {k: v for k, v in given.items() if k[0].islower()}
    return problem.make(VARLEN, dims | {k: v for k, v in given.items() if k not in options}, dtype, options)


# -- contracts -------------------------------------------------------------------------------------


def test_keys_lie_in_arrays_of_their_own_or_on_pages() -> None:
    shapes = {t.name: (t.extents, t.dtype) for t in problem.signature(DECODE, decode("bfloat16")).inputs}
    assert shapes == {
        "q": ((3, 2, 4, 3), "bfloat16"),
        "k": ((3, 20, 2, 3), "bfloat16"),
        "v": ((3, 20, 2, 5), "bfloat16"),
        "lengths": ((3,), "int32"),
    }
    paged = {t.name: (t.extents, t.dtype) for t in problem.signature(DECODE, decode("bfloat16", paged=True)).inputs}
    assert paged == shapes | {
        "k": ((9, 16, 2, 3), "bfloat16"),
        "v": ((9, 16, 2, 5), "bfloat16"),
        "table": ((3, 2), "int32"),
    }
    assert decode().option["causal"] and not varlen().option["causal"]


def test_dims_by_position_are_those_of_the_option() -> None:
    assert problem.make(DECODE, (2, 1, 8, 64, 4096), "float16", {}).dim["S_kv"] == 4096
    paged = problem.make(DECODE, (2, 1, 8, 64, 100, 16, 7), "float16", {"paged": True})
    assert [paged.dim[n] for n in ("P", "page", "L", "H_kv")] == [100, 16, 7, 8] and "S_kv" not in paged.dim
    assert problem.make(VARLEN, (100, 8, 64, 5), "float16", {}).dim["T_kv"] == 100


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (decode, {"S": 17}, "S=17 queries .* at most 16"),
        (decode, {"H": 3}, "H=3 .*H_kv=2"),
        (decode, {"P": 3}, "no dim 'P' but with paged=True"),
        (decode, {"paged": True, "S_kv": 3}, "no dim 'S_kv' but with paged=False"),
        (decode, {"paged": True, "page": 0}, "page=0"),
        (varlen, {"H_kv": 3}, "H=4 .*H_kv=3"),
        (varlen, {"N1": 0}, "N1=0"),
    ],
)
def test_what_cannot_exist_is_refused(make: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make(**given)


def test_outputs_are_laid_out_as_queries() -> None:
    for made, shapes in ((decode(lse=True), ((3, 2, 4, 5), (3, 4, 2))), (varlen(lse=True), ((12, 4, 5), (4, 12)))):
        outputs = problem.signature({"attention_decode": DECODE}.get(made.kernel, VARLEN), made).outputs
        assert [t.extents for t in outputs] == list(shapes) and outputs[1].dtype == "float32"


def test_flops_are_those_of_the_longest_sequences_and_of_equal_ones() -> None:
    pair = 2 * (3 + 5)
    assert DECODE.flops({**decode().dim, "causal": True}) == 3 * 2 * 4 * 20 * pair
    assert DECODE.flops(decode(paged=True).dim) == 3 * 2 * 4 * 32 * pair
    assert VARLEN.flops(varlen().dim) == 4 * 12 * 15 / 3 * pair
    assert VARLEN.flops({**varlen().dim, "causal": True}) == 4 * 12 * 15 / 3 * pair / 2


def test_one_binary_serves_every_size() -> None:
    assert set(FLASH_DECODE.symbolic) == {d.name for d in DECODE.dims}
    assert set(FLASH_VARLEN.symbolic) == set(FLASH_VARLEN_BWD.symbolic) == {d.name for d in VARLEN.dims}


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
def test_lengths_fit_the_room_and_pages_the_pool(paged: bool) -> None:
    made = decode(paged=paged, B=400)
    arrays = testing.inputs(DECODE, made, seed=1)
    room = 32 if paged else 20
    assert arrays["lengths"].dtype == np.int32 and set(arrays["lengths"]) == set(range(room + 1))
    assert (testing.inputs(DECODE, made, whole=True)["lengths"] == room).all()
    if paged:
        assert arrays["table"].shape == (400, 2) and set(arrays["table"].ravel()) == set(range(9))
        enough = testing.inputs(DECODE, decode(paged=True, P=7))["table"]
        assert len(set(enough.ravel())) == 6 and (enough.ravel() != sorted(enough.ravel())).any()
        empty = testing.inputs(DECODE, decode(paged=True, P=0))
        assert (empty["lengths"] == 0).all()


def test_starts_never_decrease() -> None:
    arrays = testing.inputs(VARLEN, varlen(T=100, N1=60), seed=1)
    assert (np.diff(arrays["starts"]) >= 0).all() and 0 <= arrays["starts"][0] and arrays["starts"][-1] <= 100
    assert (np.diff(arrays["starts"]) == 0).any() and arrays["starts_kv"].max() <= 15
    assert testing.inputs(VARLEN, varlen(), whole=True)["starts"].tolist() == [0, 4, 8, 12]


# -- references ------------------------------------------------------------------------------------


def attend(query: Array, keys: Array, values: Array, place: int, how: dict[str, Any]) -> tuple[Array, float]:
    """Attention of one query, which stands at key *place*, one key at a time."""
    weights = {}
    for j, key in enumerate(keys):
        if (how["causal"] or how["window"]) and j > place or how["window"] and j <= place - how["window"]:
            continue
        logit = how["scale"] * sum(float(x) * float(y) for x, y in zip(query, key, strict=True))
        weights[j] = math.exp(how["softcap"] * math.tanh(logit / how["softcap"]) if how["softcap"] else logit)
    total = sum(weights.values())
    o = sum((w / total * values[j] for j, w in weights.items()), np.zeros(values.shape[1]))
    return o, math.log(total) if weights else -math.inf


HOW = [(0, 0.0, 0.3), (2, 0.0, -0.7), (0, 1.5, 1.0), (3, 0.4, 0.3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "softcap", "scale"), HOW)
@pytest.mark.parametrize("paged", [False, True])
def test_decoding_is_attention_to_the_valid_keys(
    causal: bool, window: int, softcap: float, scale: float, paged: bool
) -> None:
    made = decode(causal=causal, lse=True, paged=paged)
    arrays = testing.inputs(DECODE, made, seed=2)
    arrays["lengths"] = np.array([1, 0, 18], np.int32)
    given = {"scale": scale, "window": window, "softcap": softcap}
    o, lse = decode_reference.reference(made, arrays, given)
    for b, i, h in np.ndindex(3, 2, 4):
        length = arrays["lengths"][b]
        at = [(arrays["table"][b, j // 16], j % 16) if paged else (b, j) for j in range(length)]
        keys, values = ([arrays[n][page, j, h // 2] for page, j in at] for n in "kv")
        keys, values = np.reshape(keys, (-1, 3)), np.reshape(values, (-1, 5))
        want = attend(arrays["q"][b, i, h], keys, values, i + length - 2, {**given, "causal": causal})
        np.testing.assert_allclose(o[b, i, h], want[0], rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(lse[b, h, i], want[1], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "softcap", "scale"), HOW)
def test_sequences_end_to_end_are_attention_of_each(causal: bool, window: int, softcap: float, scale: float) -> None:
    made = varlen(causal=causal, lse=True, N1=6)
    arrays = testing.inputs(VARLEN, made, seed=2)
    arrays["starts"], arrays["starts_kv"] = np.int32([1, 4, 4, 7, 9, 11]), np.int32([0, 2, 5, 5, 12, 14])
    given = {"scale": scale, "window": window, "softcap": softcap}
    o, lse = varlen_reference.reference(made, arrays, given)
    for t, h in np.ndindex(12, 4):
        n = int(np.searchsorted(arrays["starts"], t, side="right")) - 1
        end, keys = (arrays["starts"][n + 1], slice(*arrays["starts_kv"][n : n + 2])) if 0 <= n < 5 else (t, slice(0))
        k, v = (arrays[name][keys, h // 2] for name in "kv")
        want = attend(arrays["q"][t, h], k, v, t - end + len(k), {**given, "causal": causal})
        np.testing.assert_allclose(o[t, h], want[0], rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(lse[h, t], want[1], rtol=1e-13, atol=1e-14)


def test_bounds_are_those_of_attention_to_the_same_keys() -> None:
    from tlhub_attention.contracts.forward import ATTENTION
    from tlhub_attention.references.forward import reference, tolerance

    made = decode("bfloat16", lse=True, B=1)
    arrays = testing.inputs(DECODE, made, whole=True)
    same = problem.make(ATTENTION, (1, 2, 4, 3, 2, 20, 5), "bfloat16", {"causal": True, "lse": True})
    scalars = testing.default_scalars(DECODE, made)
    outputs = decode_reference.reference(made, arrays, scalars)
    bounds = decode_reference.tolerance(made, arrays, scalars, outputs)
    for got, want in zip(bounds, tolerance(same, arrays, scalars, reference(same, arrays, scalars)), strict=True):
        np.testing.assert_array_equal(got, want)
    ends = varlen("bfloat16", lse=True, N1=2, T=2, T_kv=20, causal=True)
    flat = {n: arrays[n][0] for n in "qkv"} | {"starts": np.int32([0, 2]), "starts_kv": np.int32([0, 20])}
    o, lse = varlen_reference.reference(ends, flat, scalars)
    np.testing.assert_array_equal(o, outputs[0][0])
    np.testing.assert_array_equal(lse, outputs[1][0])
    for got, want in zip(varlen_reference.tolerance(ends, flat, scalars, (o, lse)), bounds, strict=True):
        np.testing.assert_array_equal(got, want[0])


def test_gradients_of_sequences_end_to_end_are_those_of_each() -> None:
    dims = {"T": 12, "H": 4, "D": 3, "N1": 4, "H_kv": 2, "T_kv": 15, "D_v": 5}
    made = problem.make(VARLEN_BWD, dims, "bfloat16", {"causal": True})
    scalars = testing.default_scalars(VARLEN_BWD, made, {"softcap": 0.7})
    arrays = testing.inputs(VARLEN_BWD, made, seed=3, scalars=scalars)
    ends, ends_kv = arrays["starts"], arrays["starts_kv"]
    assert ends[0] < ends[-1] and (np.isinf(arrays["lse"]).any(axis=0) >= (np.arange(12) < ends[0])).all()
    found = varlen_backward_reference.reference(made, arrays, scalars)
    bounds = varlen_backward_reference.tolerance(made, arrays, scalars, found)
    want, most = ([np.zeros(x.shape) for x in found] for _ in range(2))
    for n in range(3):
        rows, keys = slice(*ends[n : n + 2]), slice(*ends_kv[n : n + 2])
        one = {name: arrays[name][keys if name in "kv" else rows][None] for name in ("dout", "q", "k", "v", "o")}
        one["lse"] = arrays["lse"][:, rows][None]
        shape = {
            "B": 1,
            "S": rows.stop - rows.start,
            "H": 4,
            "D": 3,
            "H_kv": 2,
            "S_kv": keys.stop - keys.start,
            "D_v": 5,
        }
        alone = problem.make(ATTENTION_BWD, shape, "bfloat16", {"causal": True})
        given = testing.inputs(ATTENTION_BWD, alone, scalars=scalars)
        assert {name: x.shape for name, x in given.items()} == {name: x.shape for name, x in one.items()}
        gradients = backward_reference.reference(alone, one, scalars)
        limits = backward_reference.tolerance(alone, one, scalars, gradients)
        for i, at in enumerate((rows, keys, keys)):
            want[i][at], most[i][at] = gradients[i][0], limits[i][0]
    for got, expected in zip((*found, *bounds), (*want, *most), strict=True):
        np.testing.assert_array_equal(got, expected)
