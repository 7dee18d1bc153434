"""The way of most calls: arrays that tvm-ffi takes as they are go straight to the library, which checks everything.

A loop over the arrays would cost as much as what the library does, so the way is written out for each number of them.
"""

from __future__ import annotations

import functools
from typing import Any

from tlhub.runtime import mistakes
from tlhub.runtime.arrays import MAKERS, WRITABLE

_ABSENT = object()
"""Stands for an input that was not passed."""

_CALL = """
def __call__(self, {absent}, /, *more, out=None, stream=None, workspace=None, **scalars):
    if out is None and type(_0) in MAKERS and stream is None and self._single:
        # only a convenience: whatever is wrong with the inputs is told by what follows
        out = MAKERS[type(_0)](_0, self._shapes(({inputs},))[0], self.signature.outputs[0].dtype)
    kind = type(out)
    if kind in WRITABLE and {alike} and stream is None and not more:
        lazy = WRITABLE[kind]
        if lazy is None or not ({tracked} or self._complex and ({negated})):
            try:
                if scalars or workspace is not None or self._needed:
                    self.function({inputs}, out, *self._rest_of(({inputs}, out), workspace, scalars))
                else:
                    self.function({inputs}, out, {defaults})
                return out
            except BufferError:
                pass  # an array that has to be wrapped: it is read-only, say
            except (ValueError, TypeError, OverflowError) as error:
                # what it lacks may be scratch memory, which few calls need: that is asked for by what follows
                if self._single and (self._scratch is None or workspace is not None):
                    raise mistakes.of_call(self, error, ({inputs},), scalars) from None
            except RuntimeError as error:
                return self._again(error, ({inputs},), out, workspace, scalars)
    inputs = tuple(x for x in ({inputs},) if x is not ABSENT)
    return general(self, *inputs, *more, out=out, stream=stream, workspace=workspace, **scalars)
"""


@functools.cache
def written_out(cls: Any, inputs: int, scalars: int) -> Any:
    """Return a subclass of *cls*, CompiledKernel, whose ``__call__`` is written out for so many inputs and scalars."""
    if not inputs:
        return cls
    names = [f"_{i}" for i in range(inputs)]
    every = [*names, "out"]
    text = _CALL.format(
        absent=", ".join(f"{name}=ABSENT" for name in names),
        inputs=", ".join(names),
        alike=" and ".join(f"type({name}) is kind" for name in names),
        tracked=" or ".join(f"{name}.requires_grad" for name in every),
        negated=" or ".join(f"lazy({name})" for name in every),
        defaults=", ".join(["None"] * (1 + scalars)),  # no workspace, and the scalars' defaults
    )
    general = cls.__call__
    known: dict[str, Any] = {"ABSENT": _ABSENT, "MAKERS": MAKERS, "WRITABLE": WRITABLE}
    known |= {"mistakes": mistakes, "general": general, "__name__": __name__}
    exec(compile(text, f"<a call with {inputs} inputs>", "exec"), known)
    call = functools.wraps(general)(known["__call__"])
    return type(
        cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
