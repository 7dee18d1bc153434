"""Attention for PyTorch: differentiable, an operator that ``torch.compile`` and CUDA graphs take.

import tlhub.torch

o = tlhub.torch.attention(q, k, v, causal=True)  # (batch, sequence, heads, channels)

Imported on request alone, for it needs PyTorch. Its operators are ``torch.ops.tlhub.attention``, which returns the
logarithms of the sums (lse) as well, and ``torch.ops.tlhub.attention_bwd``.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from tlhub.errors import ArgumentError, PluginError
from tlhub.hub import get

try:
    import torch
    from torch import library
    from torch.autograd.forward_ad import unpack_dual
except ImportError as error:
    raise PluginError(f"tlhub.torch needs PyTorch: {error}", hint="pip install torch") from error

__all__ = ["attention"]

Tensor = Any
"""torch.Tensor; a name that type checkers know without PyTorch."""

_INTS = (Integral, torch.SymInt)
_FLOATS = (Real, torch.SymInt, torch.SymFloat)
_NUMBERS = "bool causal, float? scale, int window, float softcap, bool deterministic, str? schedule"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    schedule: str | None = None,
) -> Tensor:
    """Return softmax(scale q k^T, masked) v by heads: kernel ``attention``, whose gradient is ``attention_bwd``.

    *q* (B, S, H, D), *k* (B, S_kv, H_kv, D), *v* (B, S_kv, H_kv, D_v), on one device, of any strides; the result is
    (B, S, H, D_v). H_kv divides H: heads share keys in order. *causal* hides the keys after a query, aligned at the
    end; *window* shows that many keys up to it; *softcap* bounds the logits; *scale* is 1/sqrt(D) unless given.
    *deterministic*: the gradients have the same bits on every call (default: as
    ``torch.use_deterministic_algorithms`` says). *schedule* asks for one implementation, of both kernels, by name.

    Raises what ``tlhub.get`` and its kernels do: ArgumentError for tensors that do not fit, NoSchedule.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise _refused(name, "a tensor of PyTorch", type(x).__name__, f"torch.as_tensor({name})")
        if unpack_dual(x).tangent is not None:  # PyTorch would take the result's for 0
            hint = f"torch.autograd.grad(o, {name}, dout), which is reverse mode"
            raise _refused(name, "a tensor without a tangent", "one of forward-mode differentiation", hint)
    _check_numbers(scale=0.0 if scale is None else scale, window=window, softcap=softcap)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    o, _ = torch.ops.tlhub.attention(q, k, v, causal, scale, window, softcap, deterministic, schedule)
    return o


@library.custom_op(
    "tlhub::attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_NUMBERS}) -> (Tensor, Tensor)"
)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int,
    softcap: float,
    deterministic: bool,
    schedule: str | None,
) -> tuple[Tensor, Tensor]:
    own = {"q": q, "k": k, "v": v}
    kernel = _kernel("attention", own, schedule, causal=causal, lse=True)
    result: tuple[Tensor, Tensor] = kernel(*map(_plain, own.values()), **_scalars(scale, window, softcap))
    return result


@library.custom_op(
    "tlhub::attention_bwd",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_NUMBERS}) -> (Tensor, Tensor, Tensor)",
)
def _attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    window: int,
    softcap: float,
    deterministic: bool,
    schedule: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if dout.stride(-1) != 1:  # that of a sum is one number for all, a form that GPUs read slowly
        dout = dout.contiguous()
    own = {"dout": dout, "q": q, "k": k, "v": v, "o": o}
    kernel = _kernel("attention_bwd", own, schedule, causal=causal, deterministic=deterministic)
    tensors = map(_plain, (*own.values(), lse))
    result: tuple[Tensor, Tensor, Tensor] = kernel(*tensors, **_scalars(scale, window, softcap))
    return result


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    _check_ranks(q=q, k=k, v=v)
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    return o, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@_attention_bwd.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.numbers = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.tlhub.attention_bwd(dout, *ctx.saved_tensors, *ctx.numbers)
    return (*gradients, *[None] * len(ctx.numbers))


_attention.register_autograd(_differentiate, setup_context=_keep)


# -- calls -----------------------------------------------------------------------------------------


def _kernel(name: str, tensors: dict[str, Tensor], schedule: str | None, **options: Any) -> Any:
    """Return the compiled kernel for *tensors*, inputs of that name whose dtype is free. Raises ArgumentError."""
    q, k, v = (tensors[n] for n in "qkv")
    _check_ranks(**tensors)
    shape = (*q.shape, k.shape[2], k.shape[1], v.shape[3])
    dtypes = {n: str(x.dtype) for n, x in tensors.items()}
    dtype = dtypes if len(set(dtypes.values())) > 1 else dtypes["q"]  # one name is found faster than a mapping
    return get(name, shape, dtype, device=str(q.device), schedule=schedule, **options)


def _check_ranks(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.ndim != 4:
            hint = f"{name}.unsqueeze(0), where it is the batch that is missing"
            raise _refused(name, "dims (batch, sequence, heads, channels)", f"shape {tuple(x.shape)}", hint)


def _check_numbers(**numbers: Any) -> None:
    for name, number in numbers.items():
        said, kinds = ("int", _INTS) if name == "window" else ("float", _FLOATS)
        if not isinstance(number, kinds):  # a tensor, too: its gradient would be lost
            raise _refused(name, f"a number, {said}", type(number).__name__, f"{name}={said}({name})")


def _refused(name: str, expected: str, got: str, hint: str) -> ArgumentError:
    said = f"attention: argument {name!r}: expected {expected}, got {got}"
    return ArgumentError(said, argument=name, expected=expected, got=got, hint=hint)


def _plain(x: Tensor) -> Tensor:
    """Return *x* as kernels take it: its gradient is PyTorch's to track, and here it has."""
    return x.detach()


def _scalars(scale: float | None, window: int, softcap: float) -> dict[str, float]:
    given = {"window": window, "softcap": softcap}
    return given if scale is None else {"scale": scale, **given}
