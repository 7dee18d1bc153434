"""Attention for PyTorch: differentiable, operators that ``torch.compile`` and CUDA graphs take.

import tlhub.torch

o = tlhub.torch.attention(q, k, v, causal=True)  # (batch, sequence, heads, channels)
o = tlhub.torch.attention_varlen(q, k, v, starts, causal=True)  # (tokens, heads, channels)

Imported on request alone, for it needs PyTorch. Its operators are ``torch.ops.tlhub.attention`` and
``attention_varlen``, which return the logarithms of the sums (lse) as well, ``attention_bwd`` and
``attention_varlen_bwd``.
"""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Any, NamedTuple

from tlhub.errors import ArgumentError, PluginError
from tlhub.hub import get

try:
    import torch
    from torch import library
    from torch.autograd.forward_ad import unpack_dual
except ImportError as error:
    raise PluginError(f"tlhub.torch needs PyTorch: {error}", hint="pip install torch") from error

__all__ = ["attention", "attention_varlen"]

Tensor = Any
"""torch.Tensor; a name that type checkers know without PyTorch."""

_INTS = (Integral, torch.SymInt)
_FLOATS = (Real, torch.SymInt, torch.SymFloat)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_TYPED = ("dout", "q", "k", "v", "o")
"""The inputs whose dtype is part of the look-up."""
_WRITTEN = {"slopes": "alibi_slopes", "q_scale": "scales[0]", "k_scale": "scales[1]", "v_scale": "scales[2]"}
"""What the inputs of kernels are called here, where that is another name."""


class _Numbers(NamedTuple):
    """What every operator takes after its tensors."""

    causal: bool
    scale: float | None
    window: int
    softcap: float
    deterministic: bool
    schedule: str | None
    backward_schedule: str | None

    @property
    def scalars(self) -> dict[str, float]:
        given = {"window": self.window, "softcap": self.softcap}
        return given if self.scale is None else {"scale": self.scale, **given}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
    deterministic: bool | None = None,
    schedule: str | None = None,
    backward_schedule: str | None = None,
) -> Tensor:
    """Return softmax(scale q k^T, masked) v by heads: kernel ``attention``, whose gradient is ``attention_bwd``.

    *q* (B, S, H, D), *k* (B, S_kv, H_kv, D), *v* (B, S_kv, H_kv, D_v), on one device, of any strides; the result is
    (B, S, H, D_v). H_kv divides H: heads share keys in order. *causal* hides the keys after a query, aligned at the
    end; *window* shows that many keys up to it; *softcap* bounds the logits; *scale* is 1/sqrt(D) unless given.
    *alibi_slopes* (H), float32: what a logit loses with each place of distance; they get no gradient.
    *scales*, of q, k and v in float8, which have no gradient: a number each, or one for each head of a batch, float32.
    *deterministic*: the gradients have the same bits on every call (default: as
    ``torch.use_deterministic_algorithms`` says). *schedule* asks for one implementation of the kernel by name, and
    *backward_schedule* for one of its gradient.

    Raises what ``tlhub.get`` and its kernels do: ArgumentError for tensors that do not fit, NoSchedule.
    """
    numbers = _numbers("attention", causal, scale, window, softcap, deterministic, schedule, backward_schedule)
    _check("attention", q=q, k=k, v=v, alibi_slopes=alibi_slopes)
    factors = (None, None, None) if scales is None else _factors(scales, q=q, k=k, v=v)
    o, _ = torch.ops.tlhub.attention(q, k, v, *factors, alibi_slopes, *numbers)
    return o


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    starts_kv: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    schedule: str | None = None,
    backward_schedule: str | None = None,
) -> Tensor:
    """Return ``attention`` of each of many sequences, laid end to end: kernel ``attention_varlen``.

    *q* (T, H, D), *k* (T_kv, H_kv, D), *v* (T_kv, H_kv, D_v); the result is (T, H, D_v). Sequence n has the queries
    from ``starts[n]`` to before ``starts[n + 1]``, and the keys that *starts_kv* says so of, by default the same;
    both int32, on the device. All else is as ``attention`` says.
    """
    numbers = _numbers("attention_varlen", causal, scale, window, softcap, deterministic, schedule, backward_schedule)
    starts_kv = starts if starts_kv is None else starts_kv
    _check("attention_varlen", q=q, k=k, v=v, starts=starts, starts_kv=starts_kv, alibi_slopes=alibi_slopes)
    for name, where in (("starts", starts), ("starts_kv", starts_kv)):
        if where.ndim != 1:
            raise _refused("attention_varlen", name, "one dim", f"shape {tuple(where.shape)}", f"{name}.flatten()")
    o, _ = torch.ops.tlhub.attention_varlen(q, k, v, starts, starts_kv, alibi_slopes, *numbers)
    return o


# -- operators -------------------------------------------------------------------------------------


def _operator(name: str, tensors: str, results: int) -> Any:
    """Return what makes a function an operator: it takes *tensors*, then numbers, and returns *results* tensors."""
    numbers = "bool causal, float? scale, int window, float softcap, bool deterministic, str? schedule"
    given = ", ".join(f"Tensor{'?' if x.endswith('?') else ''} {x.rstrip('?')}" for x in tensors.split())
    schema = f"({given}, {numbers}, str? backward_schedule) -> ({', '.join(['Tensor'] * results)})"
    return library.custom_op(f"tlhub::{name}", mutates_args=(), schema=schema)


@_operator("attention", "q k v q_scale? k_scale? v_scale? slopes?", 2)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, slopes: Tensor, *given: Any
) -> Any:
    numbers = _Numbers(*given)
    tensors = {"q": q, "k": k, "v": v, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "slopes": slopes}
    options = {"lse": True, "scaled": q_scale is not None}
    return _run("attention", tensors, numbers, numbers.schedule, options)


@_operator("attention_varlen", "q k v starts starts_kv slopes?", 2)
def _attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_kv: Tensor, slopes: Tensor, *given: Any
) -> Any:
    numbers = _Numbers(*given)
    tensors = {"q": q, "k": k, "v": v, "starts": starts, "starts_kv": starts_kv, "slopes": slopes}
    return _run("attention_varlen", tensors, numbers, numbers.schedule, {"lse": True})


@_operator("attention_bwd", "dout q k v o lse slopes?", 3)
def _attention_bwd(dout: Tensor, *given: Any) -> Any:
    return _gradients("attention_bwd", ("q", "k", "v", "o", "lse", "slopes"), dout, *given)


@_operator("attention_varlen_bwd", "dout q k v o lse starts starts_kv slopes?", 3)
def _attention_varlen_bwd(dout: Tensor, *given: Any) -> Any:
    names = ("q", "k", "v", "o", "lse", "starts", "starts_kv", "slopes")
    return _gradients("attention_varlen_bwd", names, dout, *given)


def _gradients(name: str, names: tuple[str, ...], dout: Tensor, *given: Any) -> Any:
    numbers = _Numbers(*given[len(names) :])
    if dout.stride(-1) != 1:  # that of a sum is one number for all, a form that GPUs read slowly
        dout = dout.contiguous()
    tensors = {"dout": dout, **dict(zip(names, given, strict=False))}
    options = {"deterministic": numbers.deterministic}
    return _run(name, tensors, numbers, numbers.backward_schedule, options)


def _register(name: str, forward: Any, backward: Any, skipped: int = 0) -> None:
    """Tell PyTorch the shapes of the operator *name* and of its gradient, and that it is one.

    *skipped*: how many tensors after q, k and v the gradient does not take.
    """

    @forward.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        _check_ranks(name, q=q, k=k, v=v)
        o = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16 if q.dtype in _FLOAT8 else q.dtype)
        return o, q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)

    @backward.register_fake
    def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        count = len(inputs) - len(_Numbers._fields)
        ctx.numbers = inputs[count:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3 + skipped : count])

    def differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        gradients = backward(dout, *ctx.saved_tensors, *ctx.numbers)
        rest = len(ctx.saved_tensors) - 5 + skipped + len(ctx.numbers)
        return (*gradients, *[None] * rest)

    forward.register_autograd(differentiate, setup_context=keep)


_register("attention", _attention, _attention_bwd, skipped=3)
_register("attention_varlen", _attention_varlen, _attention_varlen_bwd)


# -- calls -----------------------------------------------------------------------------------------


def _run(
    name: str, tensors: dict[str, Tensor | None], numbers: _Numbers, schedule: str | None, options: dict[str, Any]
) -> Any:
    """Call the kernel of that name on *tensors*, those that there are. Raises ArgumentError."""
    there = {n: x for n, x in tensors.items() if x is not None}
    q, k, v = (there[n] for n in "qkv")
    _check_ranks(name, **{n: there[n] for n in _TYPED if n in there})
    sequences = there["starts"].shape if "starts" in there else ()
    shape = (*q.shape, *sequences, k.shape[-2], k.shape[-3], v.shape[-1])
    dtypes = {n: str(there[n].dtype) for n in _TYPED if n in there}
    dtype = dtypes if len(set(dtypes.values())) > 1 else dtypes["q"]  # one name is found faster than a mapping
    options = {"causal": numbers.causal, "alibi": "slopes" in there, **options}
    kernel = get(name, shape, dtype, device=str(q.device), schedule=schedule, **options)
    try:
        return kernel(*[_plain(name, n, x) for n, x in there.items()], **numbers.scalars)
    except ArgumentError as error:
        raise _as_written(error) from None


def _as_written(error: ArgumentError) -> ArgumentError:
    """Return *error* of an argument under the name that the caller wrote."""
    argument = error.argument or ""
    if argument not in _WRITTEN:
        return error
    message, hint = (re.sub(rf"\b{argument}\b", _WRITTEN[argument], text) for text in (error.message, error.hint or ""))
    how = {"argument": _WRITTEN[argument], "expected": error.expected, "got": error.got}
    return ArgumentError(message, hint=hint or None, **how)


def _plain(kernel: str, name: str, x: Tensor) -> Tensor:
    """Return *x* as kernels take it: its gradient is PyTorch's to track, and here it has."""
    _check_tangent(kernel, name, x)
    return x.detach()


def _numbers(
    kernel: str, causal: bool, scale: float | None, window: int, softcap: float, deterministic: bool | None, *names: Any
) -> tuple[Any, ...]:
    """Return what operators take after their tensors, defaults filled in. Raises ArgumentError."""
    numbers = {"scale": 0.0 if scale is None else scale, "window": window, "softcap": softcap}
    for name, number in numbers.items():
        said, kinds = ("int", _INTS) if name == "window" else ("float", _FLOATS)
        if not isinstance(number, kinds):  # a tensor, too: its gradient would be lost
            raise _refused(kernel, name, f"a number, {said}", type(number).__name__, f"{name}={said}({name})")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return (causal, scale, window, softcap, deterministic, *names)


def _factors(scales: Any, **tensors: Tensor) -> list[Tensor]:
    """Return the *scales* of *tensors* by heads: what is one number is repeated. Raises ArgumentError."""
    if len(scales) != len(tensors):
        hint = "scales=(q_scale, k_scale, v_scale)"
        raise _refused("attention", "scales", "a tensor each for q, k and v", f"{len(scales)}", hint)
    _check("attention", **tensors, **{f"scales[{i}]": x for i, x in enumerate(scales)})
    _check_ranks("attention", **tensors)
    shapes = [(x.shape[0], x.shape[2]) for x in tensors.values()]
    return [x.reshape(()).expand(shape) if x.numel() == 1 else x for x, shape in zip(scales, shapes, strict=True)]


def _check(kernel: str, **tensors: Any) -> None:
    """Refuse what is no tensor on the device of q, what forward mode follows, and a gradient that there is none of."""
    for name, x in tensors.items():
        if x is None and name == "alibi_slopes":
            continue
        if not isinstance(x, torch.Tensor):
            raise _refused(kernel, name, "a tensor of PyTorch", type(x).__name__, f"torch.as_tensor({name})")
        if x.device != tensors["q"].device:
            on = f"a tensor on {tensors['q'].device}, where q is"
            raise _refused(kernel, name, on, f"one on {x.device}", f"{name}.to({str(tensors['q'].device)!r})")
        _check_tangent(kernel, name, x)
        if x.dtype in _FLOAT8 and x.requires_grad:
            expected = "a tensor that asks for no gradient, for float8 has none"
            raise _refused(kernel, name, expected, "one that does", f"{name}.detach()")
        if name not in _TYPED and x.requires_grad:
            raise _refused(kernel, name, "a tensor that asks for no gradient", "one that does", f"{name}.detach()")


def _check_tangent(kernel: str, name: str, x: Tensor) -> None:
    if unpack_dual(x).tangent is not None:  # PyTorch would take the result's for 0
        hint = f"torch.autograd.grad(o, {name}, dout), which is reverse mode"
        raise _refused(kernel, name, "a tensor without a tangent", "one of forward-mode differentiation", hint)


def _check_ranks(kernel: str, **tensors: Tensor) -> None:
    if "varlen" in kernel:
        rank, dims, change = 3, "(tokens, heads, channels)", "flatten(0, 1), where there is a batch"
    else:
        rank, dims = 4, "(batch, sequence, heads, channels)"
        change = "unsqueeze(0), where it is the batch that is missing"
    for name, x in tensors.items():
        if x.ndim != rank:
            raise _refused(kernel, name, f"dims {dims}", f"shape {tuple(x.shape)}", f"{name}.{change}")


def _refused(kernel: str, name: str, expected: str, got: str, hint: str) -> ArgumentError:
    said = f"{kernel}: argument {name!r}: expected {expected}, got {got}"
    return ArgumentError(said, argument=name, expected=expected, got=got, hint=hint)
