"""``tlhub.torch.attention``: gradients, compiling, and what it refuses; on the CPU, as on any other device."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tlhub.errors import ArgumentError, UnknownName

torch = pytest.importorskip("torch")

from torch import library  # noqa: E402 - it may be missing
from torch.autograd import forward_ad  # noqa: E402

import tlhub.torch  # noqa: E402 - it needs PyTorch

attention = tlhub.torch.attention
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def qkv(s: int = 5, s_kv: int = 7, h: int = 4, h_kv: int = 2, d: int = 6, d_v: int = 3, **how: Any) -> list[Any]:
    how = {"dtype": torch.float64, "requires_grad": True, "generator": torch.Generator().manual_seed(0), **how}
    return [torch.randn(shape, **how) for shape in ((2, s, h, d), (2, s_kv, h_kv, d), (2, s_kv, h_kv, d_v))]


def gradients(o: Any, inputs: list[Any], dout: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(o, inputs, dout)  # type: ignore[no-any-return]


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "causal"), [(torch.float64, False), (torch.float32, True), (torch.float16, False)])
def test_it_is_pytorchs_attention(dtype: Any, causal: bool) -> None:
    inputs = qkv(40, 40, d=16, d_v=16, dtype=dtype)
    o = attention(*inputs, causal)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in wide), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    atol = 1e-2 if dtype == torch.float16 else 1e-5
    assert o.dtype == dtype and torch.allclose(o.double(), want, atol=atol)
    dout = torch.ones_like(o) / 8
    for got, right, x in zip(gradients(o, inputs, dout), gradients(want, wide, dout.double()), inputs, strict=True):
        assert got.dtype == dtype and got.shape == x.shape
        assert torch.allclose(got.double(), right, atol=atol)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"causal": True, "scale": -0.4, "window": 2, "alibi_slopes": SLOPES[:2]},
        {"softcap": 0.7, "deterministic": True},
    ],
)
def test_gradients_are_the_numerical_ones(how: dict[str, Any]) -> None:
    inputs = qkv(3, 4, h=2, h_kv=1, d=2)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, **how), inputs)


def test_float8_has_factors_of_tensors_or_of_heads() -> None:
    q, k, v = (x.detach().to(torch.float8_e4m3fn) for x in qkv())
    factors = [torch.tensor(0.5), torch.full((2, 2), 2.0), torch.tensor([3.0])]
    o = attention(q, k, v, scales=tuple(factors), softcap=3.0)
    want = attention(q.double() * 0.5, k.double() * 2, v.double() * 3, softcap=3.0)
    assert o.dtype == torch.bfloat16 and torch.allclose(o.double(), want, rtol=2**-7, atol=1e-5)


def test_views_are_taken_as_they_lie() -> None:
    packed = torch.randn(2, 9, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    heads_first = packed.detach().permute(2, 0, 3, 1, 4).contiguous().requires_grad_()
    o = attention(*packed.unbind(2))
    other = attention(*heads_first.transpose(2, 3).unbind(0))
    assert torch.equal(o, other)
    dout = torch.randn_like(o)
    assert torch.equal(*(x.permute(p) for x, p in zip(
        (gradients(o, [packed], dout)[0], gradients(other, [heads_first], dout)[0]),
        ((0, 1, 2, 3, 4), (1, 3, 0, 2, 4)), strict=True)))  # fmt: skip


def test_the_gradient_of_a_sum_is_one_number_for_all() -> None:
    q, k, v = qkv()
    attention(q, k, v).sum().backward()
    want = gradients(attention(q, k, v), [q, k, v], torch.ones(2, 5, 4, 3, dtype=torch.float64))
    assert all(torch.equal(x.grad, w) for x, w in zip((q, k, v), want, strict=True))


def test_nothing_is_kept_where_nobody_asks_for_gradients() -> None:
    q, k, v = qkv(requires_grad=False)
    assert attention(q, k, v).grad_fn is None
    with torch.no_grad():
        assert attention(q.requires_grad_(), k, v).grad_fn is None
    assert attention(q, k, v).grad_fn is not None
    o = attention(q, k, v)
    (dq,) = gradients(o, [q], torch.ones_like(o))
    assert dq.grad_fn is None


def test_empty_tensors_and_queries_that_see_no_key() -> None:
    q, k, v = qkv(5, 3)
    o = attention(q, k, v, True)
    assert (o[:, :2] == 0).all()
    dq, *_ = gradients(o, [q, k, v], torch.full_like(o, torch.nan))
    assert (dq[:, :2] == 0).all()
    q, k, v = qkv(5, 0)
    o = attention(q, k, v)
    assert (o == 0).all() and (gradients(o, [q, k, v], torch.ones_like(o))[0] == 0).all()
    assert attention(*qkv(0, 3)).shape == (2, 0, 4, 3)


# -- an operator of PyTorch ------------------------------------------------------------------------


def test_the_operators_keep_pytorchs_rules() -> None:
    numbers = (True, None, 3, 0.5, False, None, None)
    q, k, v = qkv()
    others = (None, None, None, SLOPES)
    library.opcheck(torch.ops.tlhub.attention.default, (q, k, v, *others, *numbers))
    plain = [x.detach() for x in (q, k, v)]
    o, lse = torch.ops.tlhub.attention(*plain, *others, *numbers)
    library.opcheck(torch.ops.tlhub.attention_bwd.default, (torch.ones_like(o), *plain, o, lse, others[3], *numbers))
    narrow = [x.to(torch.float8_e4m3fn) for x in plain]
    factors = [torch.full((2, h), 0.5) for h in (4, 2, 2)]
    given = (*narrow, *factors, None, False, *numbers[1:])
    library.opcheck(torch.ops.tlhub.attention.default, given, test_utils="test_faketensor")  # others multiply float8


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic: bool) -> None:
    def layer(q: Any, k: Any, v: Any) -> Any:
        return attention(q * 2, k, v.sin(), causal=True, softcap=2.0, alibi_slopes=SLOPES).cos()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lengths in ((5, 7), (9, 12)):
        inputs = qkv(*lengths)
        o, want = compiled(*inputs), layer(*inputs)
        assert torch.equal(o, want)
        dout = torch.randn_like(want)
        for got, right in zip(gradients(o, inputs, dout), gradients(want, inputs, dout), strict=True):
            assert torch.equal(got, right)


def test_gradients_are_deterministic_where_pytorch_is_told_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = tlhub.torch.get
    monkeypatch.setattr(
        tlhub.torch,
        "get",
        lambda *a, **k: asked.append(k.get("deterministic")) or real(*a, **k),  # type: ignore
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for how in ({}, {"deterministic": False}):
        attention(*qkv(), **how).sum().backward()
    assert asked == [None, True, None, False]


def test_gradients_of_gradients_are_refused() -> None:
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_bwd"):
        dq.sum().backward()


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda q, k, v: (q[0], k, v), ArgumentError, r"argument 'q': expected dims \(batch, sequence, heads, chan"),
        (lambda q, k, v: (q, k.numpy(), v), ArgumentError, "argument 'k': expected a tensor of PyTorch, got ndarray"),
        (lambda q, k, v: (q, k[:1], v), ArgumentError, "argument 'k': expected shape"),
        (lambda q, k, v: (q, k[..., :3], v), ArgumentError, "argument 'k': expected shape"),
        (lambda q, k, v: (q, k, v[:, :3]), ArgumentError, "argument 'v': expected shape"),
        (lambda q, k, v: (q[:, :, :3], k, v), ArgumentError, "H=3 .*H_kv=2"),
        (lambda q, k, v: (q, k.float(), v), ArgumentError, "float64 does not mix"),
        (
            lambda q, k, v: (q, k.to("meta"), v),
            ArgumentError,
            "'k': expected a tensor on cpu, where q is, got one on meta",
        ),
        (lambda q, k, v: (q.int(), k.int(), v.int()), ArgumentError, "int32"),
        (
            lambda q, k, v: (q.to(torch.float8_e4m3fn).requires_grad_(), k, v),
            ArgumentError,
            "'q': expected a tensor that asks for no gradient, for float8 has none",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        attention(*change(*(x.detach() for x in qkv())))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"alibi_slopes": [0.5] * 4}, "argument 'alibi_slopes': expected a tensor of PyTorch, got list"),
        ({"alibi_slopes": SLOPES[:3]}, "argument 'alibi_slopes': expected shape \\(H=4,\\), got \\(3,\\)"),
        ({"alibi_slopes": SLOPES.double()}, "argument 'alibi_slopes': expected .*float32.*\nhint: alibi_slopes.to"),
        (
            {"alibi_slopes": SLOPES.clone().requires_grad_()},
            "'alibi_slopes': expected a tensor that asks for no gradient",
        ),
        ({"scales": (SLOPES[:1],)}, "argument 'scales': expected a tensor each for q, k and v, got 1"),
        ({"alibi_slopes": SLOPES.to(device="meta")}, "argument 'alibi_slopes': expected a tensor on cpu, where q is"),
        ({"scales": (1.0, 1.0, 1.0)}, r"argument 'scales\[0\]': expected a tensor of PyTorch, got float"),
        ({"scales": (SLOPES[:1],) * 3}, "scaled=True, and q is float64; scales are for q, k and v in float8"),
    ],
)
def test_slopes_and_scales_that_do_not_fit_are_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        attention(*qkv(), **how)


def test_scales_of_another_dtype_are_refused_by_the_name_that_was_written() -> None:
    q, k, v = (x.detach().to(torch.float8_e4m3fn) for x in qkv())
    with pytest.raises(ArgumentError, match=r"argument 'scales\[1\]': expected .*float32") as caught:
        attention(q, k, v, scales=(SLOPES[:1], SLOPES[:1].double(), SLOPES[:1]))
    assert caught.value.argument == "scales[1]" and caught.value.hint == "scales[1].to(torch.float32)"


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        ({"window": 1.5}, r"window=int\(window\)"),
        ({"softcap": None}, r"softcap=float\(softcap\)"),
        ({"scale": "1"}, r"scale=float\(scale\)"),
        ({"scale": torch.tensor(0.5, requires_grad=True)}, r"scale=float\(scale\)"),
    ],
)
def test_numbers_are_numbers(number: dict[str, Any], hint: str) -> None:
    with pytest.raises(ArgumentError, match=f"argument '{next(iter(number))}': expected a number.*\n.*{hint}"):
        attention(*qkv(), **number)


def test_forward_mode_is_refused() -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(ArgumentError, match=r"argument 'k': .*tangent.*\n.*torch.autograd.grad"):
        torch.func.jvp(lambda k: attention(q, k, v), (k,), (k,))
    numbers = (None,) * 4 + (False, None, 0, 0.0, False, None, None)
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="argument 'v': .*tangent"):
        torch.ops.tlhub.attention(q, k, forward_ad.make_dual(v, v), *numbers)


def test_schedules_are_asked_for_by_name() -> None:
    q, k, v = qkv()
    o, want = attention(q, k, v, schedule="cpu_flash", backward_schedule="cpu_flash_bwd"), attention(q, k, v)
    assert torch.equal(o, want)
    assert torch.equal(*(gradients(x, [q], torch.ones_like(o))[0] for x in (o, want)))
    with pytest.raises(UnknownName, match="'hoper'"):
        attention(q, k, v, schedule="hoper")
    with pytest.raises(UnknownName, match="'hoper'"):
        attention(q, k, v, backward_schedule="hoper").sum().backward()


# -- importing -------------------------------------------------------------------------------------


_WITHOUT = """
import sys
sys.modules["torch"] = None
import tlhub
try:
    import tlhub.torch
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_without_pytorch_the_module_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("PluginError tlhub.torch needs PyTorch: ") and "hint: pip install torch" in done.stdout
    )


def test_tlhub_alone_does_not_import_pytorch() -> None:
    code = "import sys, tlhub; tlhub.get; assert 'torch' not in sys.modules and 'tlhub.torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
