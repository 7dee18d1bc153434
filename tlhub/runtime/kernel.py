"""CompiledKernel: what ``get`` returns, a loaded entry that can be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from tlhub.errors import DeviceError
from tlhub.runtime import arrays, direct, mistakes, streams
from tlhub.shapes import quotient
from tlhub.specs import LIBRARY, Config, Kernel, Problem, Signature

if TYPE_CHECKING:
    from tlhub.cache.entry import Entry

_PARTS = ("float16", "float32", "float64")
"""The dtypes of a complex array's parts."""


class CompiledKernel:
    """A kernel for one problem, ready to be called: ``k(*inputs, out=None, stream=None, workspace=None, **scalars)``.

    ``problem``, ``schedule``, ``config``, ``arch``: what was chosen. ``origin``: memory, cache, site,
    prebuilt, remote or built; ``match``: exact, compatible or revision. ``entry``: what was loaded, ``key``
    its build digest. ``function``: the tvm-ffi function itself, for callers that pass every argument.
    ``scratch``: the library's function that tells the bytes of workspace of a call, None where no call needs any.
    ``otherwise(error)``: what to become where the device takes none of this, known when it is first called.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        signature: Signature,
        function: Callable[..., Any],
        *,
        schedule: str,
        config: Config,
        arch: str,
        origin: str,
        match: str,
        entry: Entry,
        scratch: Callable[..., int] | None = None,
        otherwise: Callable[[DeviceError], CompiledKernel] | None = None,
    ) -> None:
        self.kernel = kernel
        self.problem = problem
        self.signature = signature
        self.function = function
        self.schedule = schedule
        self.config = config
        self.arch = arch
        self.origin = origin
        self.match = match
        self.entry = entry
        self._scratch = scratch
        self._otherwise = otherwise
        self._needed = False  # whether the last call that asked needed scratch memory
        # lazy negation is of the imaginary part of a complex array
        self._complex = any(t.dtype in _PARTS for t in (*signature.inputs, *signature.outputs))
        self._streams = not arch.startswith("cpu:")
        self._position = {s.name: i for i, s in enumerate(signature.scalars)}
        self._single = len(signature.outputs) == 1
        self._plans, self._lead, self._lead_rank = _plan(problem, signature)
        general: Any = type(self)
        self.__class__ = direct.written_out(general, len(signature.inputs), len(signature.scalars))

    @property
    def key(self) -> str:
        """The build digest of the entry."""
        return self.entry.manifest.build_digest

    def source(self) -> str:
        """Return the readable source of the program that the library was compiled from."""
        names = sorted(name for name in self.entry.manifest.members if name != LIBRARY)
        return "\n".join(self.entry.read(name).decode() for name in names)

    def __repr__(self) -> str:
        dims = ", ".join(f"{n}={e}" for n, e in self.problem.dims)
        return (
            f"<CompiledKernel {self.kernel.name}({dims}) {self.problem.dtype} "
            f"by {self.schedule} for {self.arch}, {self.origin}>"
        )

    def __call__(self, *inputs: Any, out: Any = None, stream: Any = None, workspace: Any = None, **scalars: Any) -> Any:
        """Run the kernel on *inputs*, in the contract's order, and return the output or a tuple of them.

        *out*: the array to write, or a tuple of arrays where there are several outputs; without it new
        arrays of the kind of the first input are made. *stream*: a handle, or a stream of PyTorch or CuPy (default:
        the one that the first input's library works on; JAX takes no other). *workspace*: an array of as many bytes as
        ``workspace()`` says (default: one is made where it is needed). *scalars*: by name, the contract's defaults
        otherwise. Raises ArgumentError, which is a ValueError and a TypeError, before anything is written; DeviceError.
        """
        if stream is not None:
            first = (*inputs, out)[0]
            with streams.entered(first, stream, self._handle(stream, first)):
                return self(*inputs, out=out, workspace=workspace, **scalars)
        return self._call(inputs, out, workspace, scalars)

    def workspace(self, *inputs: Any, **scalars: Any) -> int:
        """Return how many bytes of scratch memory a call with these arguments needs. Raises ArgumentError."""
        if self._scratch is None:
            return 0
        values = self._values(scalars)
        read, results, _ = self._operands(inputs, None)
        try:
            with streams.current(inputs[0]):
                return int(self._scratch(*read, *self._written(results), None, *values))
        except (ValueError, TypeError, OverflowError) as error:
            raise mistakes.of_call(self, error, inputs, scalars) from None
        except RuntimeError as error:
            self._give_way(error)
            return self.workspace(*inputs, **scalars)

    def _call(self, inputs: tuple[Any, ...], out: Any, workspace: Any, scalars: Mapping[str, Any]) -> Any:
        """Run on arrays of any kind."""
        values = self._values(scalars)  # first: an input passed by name is told as that, not as one missing
        read, results, finish = self._operands(inputs, out)
        with streams.current((*inputs, *results)[0]) if self._streams else nullcontext():
            try:
                try:
                    room = self._run(inputs, read, results, workspace, values)
                except BufferError:  # a read-only NumPy array, say, of a type that may otherwise be handed over
                    room = self._run(inputs, self._readable(inputs), results, workspace, values)
            except (ValueError, TypeError, OverflowError) as error:
                raise mistakes.of_call(self, error, inputs, scalars) from None
            except RuntimeError as error:
                return self._again(error, inputs, out, workspace, scalars, results)
        done = tuple(f(x) if f else x for f, x in zip(finish, results, strict=True))
        del room  # not before: it is finishing that waits for the kernel, and JAX gives away memory that nobody holds
        return done[0] if self._single else done

    def _again(
        self,
        error: RuntimeError,
        inputs: tuple[Any, ...],
        out: Any,
        workspace: Any,
        scalars: Mapping[str, Any],
        results: Sequence[Any] = (),
    ) -> Any:
        """Make a call that failed with *error* by what serves instead. Raises what *error* stands for otherwise."""
        self._blame(inputs, results or [out])
        self._give_way(error)
        return self(*inputs, out=out, workspace=workspace, **scalars)

    def _rest_of(self, given: tuple[Any, ...], workspace: Any, scalars: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the workspace and the scalars of a call with the arrays *given*."""
        values = self._values(scalars)
        if self._needed and workspace is None:  # and so may this call: a refusal costs more than to ask
            workspace = self._room(given[0], *given, None, *values)
        return (workspace, *values)

    def _give_way(self, error: RuntimeError) -> None:
        """Become what serves where the device does not take this library. Raises what *error* stands for otherwise."""
        failure = mistakes.of_device(self, error)
        if self._otherwise is None or not mistakes.is_unfit(failure):
            raise failure from None
        self.__dict__.update(self._otherwise(failure).__dict__)

    def _operands(
        self, inputs: tuple[Any, ...], out: Any
    ) -> tuple[tuple[Any, ...], list[Any], list[Callable[[Any], Any] | None]]:
        """Return the inputs as tvm-ffi takes them, the outputs, new ones unless given, and how to finish each."""
        sign = self.signature
        if len(inputs) != len(sign.inputs):
            raise mistakes.of_count(self, inputs)
        # where there are streams, a type that was handed over on a CPU says nothing of how it is on a GPU
        read = self._readable(inputs) if self._streams or not arrays.direct(inputs) else inputs
        if out is None:
            shapes = self._shapes(read)
            made = [arrays.empty_like(inputs[0], s, t.dtype) for t, s in zip(sign.outputs, shapes, strict=True)]
            return read, [m for m, _ in made], [f for _, f in made]
        results = [out] if self._single else self._several(out)
        return read, results, [None] * len(results)

    def _run(
        self,
        inputs: tuple[Any, ...],
        read: tuple[Any, ...],
        results: list[Any],
        workspace: Any,
        values: tuple[Any, ...],
    ) -> Any:
        """Run, and return the workspace, which is to be kept until the outputs are finished."""
        written = self._written(results)
        if self._scratch is not None and workspace is None:
            workspace = self._room(inputs[0], *read, *written, None, *values)
        self.function(*read, *written, arrays.memory(workspace), *values)
        return workspace

    def _room(self, like: Any, *arguments: Any) -> Any:
        """Return the workspace of a call with these arguments, on the device of *like*, None where it needs none."""
        assert self._scratch is not None
        size = self._scratch(*arguments)
        self._needed = size > 0
        return arrays.empty_like(like, (size,), "uint8")[0] if size else None

    def _handle(self, stream: Any, first: Any) -> int:
        """Return the handle of *stream*, for a call whose first array is *first*. Raises ArgumentError."""
        hint = "leave stream= away"
        if not self._streams:
            expected = f"None, for {self.arch} has no streams"
        elif streams.made_by(first) == "jax":
            expected = "None, for JAX waits for a stream of its own and for no other"
        else:
            found = streams.handle(stream)
            if found is not None:
                return found
            expected, hint = "a stream of PyTorch or CuPy, or its handle", "stream=torch.cuda.current_stream()"
        raise arrays.refuse(self.kernel.name, "stream", expected, type(stream).__name__, hint)

    def _readable(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs as tvm-ffi takes them, each wrapped."""
        return tuple(
            arrays.readable(x, t, self.kernel.name) for x, t in zip(inputs, self.signature.inputs, strict=True)
        )

    def _written(self, results: list[Any]) -> list[Any]:
        """Return the outputs as tvm-ffi takes them."""
        return [arrays.writable(x, t, self.kernel.name) for x, t in zip(results, self.signature.outputs, strict=True)]

    def _values(self, scalars: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the scalars in the binary's order, None for those that were not given."""
        values: list[Any] = [None] * len(self.signature.scalars)
        for name, value in scalars.items():
            position = self._position.get(name)
            if position is None:
                raise mistakes.of_scalar(self, name)
            values[position] = value
        return tuple(values)

    def _shapes(self, read: tuple[Any, ...]) -> list[tuple[int, ...]]:
        """Return the outputs' shapes, as the inputs have them."""
        try:
            left_out = self._lead is not None and len(read[self._lead].shape) < self._lead_rank
            return [
                tuple(
                    [
                        e if type(e) is int else -(-read[e[0]].shape[e[1]] // e[2])
                        for e in plan[1 if left_out and short else 0 :]
                    ]
                )
                for plan, short in self._plans
            ]
        except (IndexError, AttributeError):  # an input that the library refuses, before it looks at outputs
            return [(0,) * len(plan) for plan, _ in self._plans]

    def _several(self, out: Any) -> list[Any]:
        names = [t.name for t in self.signature.outputs]
        if not isinstance(out, (tuple, list)) or len(out) != len(names):
            got = f"{len(out)} of them" if isinstance(out, (tuple, list)) else type(out).__name__
            raise arrays.refuse(
                self.kernel.name,
                "out",
                f"a tuple of {len(names)} arrays ({', '.join(names)})",
                got,
                f"out=({', '.join(names)})",
            )
        return list(out)

    def _blame(self, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """Raise an ArgumentError if it was an array that its own library could not hand over."""
        for x, t in zip(inputs, self.signature.inputs, strict=False):
            arrays.readable(x, t, self.kernel.name)
        for x, t in zip(results, self.signature.outputs, strict=False):
            arrays.writable(x, t, self.kernel.name)


def _plan(problem: Problem, signature: Signature) -> tuple[list[tuple[tuple[Any, ...], bool]], int | None, int]:
    """Return where the outputs' extents come from, and which input says whether the leading dim is left out.

    Of each output: per dim an extent, or an input, an axis counted from the end, and what its extent is divided by,
    rounded up; and whether its leading dim may be left out. Then the first input that may leave it out, if any, and
    the rank it has otherwise.
    """
    leads = [t.dims[:1] == (signature.elide,) for t in signature.inputs]
    lead = leads.index(True) if True in leads else None
    where: dict[str, Any] = {n: e for n, e in problem.dims if isinstance(e, int)}
    for i, tensor in enumerate(signature.inputs):
        for axis, dim in enumerate(tensor.dims):
            where.setdefault(dim, (i, axis - len(tensor.dims), 1))
    for dim, (whole, over) in signature.parts.items():
        known = where.get(whole)
        if over == 0 or isinstance(known, int):
            where[dim] = quotient(known or 0, over)
        elif known:
            where.setdefault(dim, (*known[:2], over))
    plans = [(tuple(where.get(d, 0) for d in t.dims), t.dims[:1] == (signature.elide,)) for t in signature.outputs]
    return plans, lead, 0 if lead is None else len(signature.inputs[lead].dims)
