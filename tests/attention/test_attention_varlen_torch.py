"""``tlhub.torch.attention_varlen``: each sequence is attention of its own, with its gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tlhub.errors import ArgumentError

torch = pytest.importorskip("torch")

from torch import library  # noqa: E402 - it may be missing

import tlhub.torch  # noqa: E402 - it needs PyTorch

attention, attention_varlen = tlhub.torch.attention, tlhub.torch.attention_varlen
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
STARTS, STARTS_KV = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [0, 4, 6, 9]))


def qkv(t: int = 8, t_kv: int = 9, h: int = 4, h_kv: int = 2, d: int = 3, d_v: int = 2) -> list[Any]:
    how: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    made = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=made, **how) for shape in ((t, h, d), (t_kv, h_kv, d), (t_kv, h_kv, d_v))]


def test_each_sequence_is_attention_of_its_own() -> None:
    how: dict[str, Any] = {"causal": True, "alibi_slopes": SLOPES}
    q, k, v = inputs = qkv()
    o = attention_varlen(*inputs, STARTS, STARTS_KV, **how)
    pairs = zip(*([slice(*pair) for pair in x.unfold(0, 2, 1).tolist()] for x in (STARTS, STARTS_KV)), strict=True)
    want = torch.cat([attention(q[None, a], k[None, b], v[None, b], **how)[0] for a, b in pairs])
    assert torch.allclose(o, want, rtol=1e-12)
    dout = torch.randn_like(o)
    for got, right in zip(*(torch.autograd.grad(x, inputs, dout) for x in (o, want)), strict=True):
        assert torch.allclose(got, right, rtol=1e-10, atol=1e-12)


def test_keys_lie_as_queries_do_unless_said_otherwise() -> None:
    q, k, v = qkv(t_kv=8)
    assert torch.equal(attention_varlen(q, k, v, STARTS), attention_varlen(q, k, v, STARTS, STARTS.clone()))


@pytest.mark.parametrize("how", [{}, {"causal": True, "window": 2, "softcap": 0.7, "alibi_slopes": SLOPES}])
def test_gradients_are_the_numerical_ones(how: dict[str, Any]) -> None:
    assert torch.autograd.gradcheck(lambda q, k, v: attention_varlen(q, k, v, STARTS, STARTS_KV, **how), qkv())


def test_the_operators_keep_pytorchs_rules() -> None:
    others, numbers = (STARTS, STARTS_KV, SLOPES), (True, None, 3, 0.5, False, None, None)
    inputs = qkv()
    library.opcheck(torch.ops.tlhub.attention_varlen.default, (*inputs, *others, *numbers))
    plain = [x.detach() for x in inputs]
    o, lse = torch.ops.tlhub.attention_varlen(*plain, *others, *numbers)
    given = (torch.ones_like(o), *plain, o, lse, *others, *numbers)
    library.opcheck(torch.ops.tlhub.attention_varlen_bwd.default, given)


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic: bool) -> None:
    def layer(q: Any, k: Any, v: Any, starts: Any) -> Any:
        return attention_varlen(q * 2, k, v.sin(), starts, causal=True, alibi_slopes=SLOPES).cos()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens, starts in ((8, [0, 3, 8]), (12, [1, 2, 2, 9])):
        inputs = qkv(tokens, tokens)
        places = torch.tensor(starts, dtype=torch.int32)
        o, want = compiled(*inputs, places), layer(*inputs, places)
        assert torch.equal(o, want)
        dout = torch.randn_like(want)
        for got, right in zip(*(torch.autograd.grad(x, inputs, dout) for x in (o, want)), strict=True):
            assert torch.equal(got, right)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v, s: (q[None], k, v, s), r"'q': expected dims \(tokens, heads, channels\).*\n.*q.flatten"),
        (lambda q, k, v, s: (q, k, v, s.tolist()), "attention_varlen: argument 'starts': expected a tensor of PyTorch"),
        (lambda q, k, v, s: (q, k, v, s.long()), "argument 'starts': expected .*int32"),
        (lambda q, k, v, s: (q, k, v, s, s[:2]), "argument 'starts_kv': expected shape \\(N1=4,\\), got \\(2,\\)"),
        (lambda q, k, v, s: (q, k, v, s[:0]), "N1=0"),
        (lambda q, k, v, s: (q, k, v, s[None]), r"argument 'starts': expected one dim, got shape \(1, 4\)"),
        (lambda q, k, v, s: (q, k, v, s.flip(0)), "argument 'starts': expected numbers that never decrease"),
        (lambda q, k, v, s: (q, k, v, s, s + 2), "argument 'starts_kv': expected numbers that never decrease, within"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        attention_varlen(*change(*qkv(), STARTS))
