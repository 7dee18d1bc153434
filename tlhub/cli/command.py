"""What every command shares: lazy loading, where output goes, errors to exit codes, how a problem is typed."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

from tlhub.cli import output
from tlhub.errors import ArgumentError, TlhubError, UnknownName, debugging, did_you_mean

FOUND_PROBLEMS, WRONG_INPUT, INTERRUPTED = 1, 2, 130
"""Exit codes: 0 is fine, 1 it found problems, 2 what was typed is wrong."""

OWN_PROCESS = "own process"
"""The context's object where the command line has the process to itself."""

F = TypeVar("F", bound=Callable[..., Any])


def hide_torch() -> None:
    """Keep what loads kernels from importing torch, a second's work, where nobody else could want it."""
    if click.get_current_context().obj == OWN_PROCESS:
        from tlhub.runtime.load import hide_torch

        hide_torch()


class Command(click.Command):
    """A command whose stdout carries its document alone: what anything else prints goes to stderr."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # "-1,2,3" and "-5" are dims and numbers, never options; a leading space hides them from the parser
        return super().parse_args(ctx, [f" {a}" if re.match(r"-[0-9.]", a) else a for a in args])

    def invoke(self, ctx: click.Context) -> Any:
        with output.only_documents():
            return super().invoke(ctx)

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(1000)  # the whole first sentence: the list wraps it


class Group(click.Group):
    """A group whose commands live in modules that are imported when they are used."""

    command_class = Command

    def __init__(self, *args: Any, lazy: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = dict(lazy or {})  # name -> "module:attribute"

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(1000)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy:
            module, _, attribute = self.lazy[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            names = self.list_commands(ctx)
            near = did_you_mean(args[0], names)
            raise UnknownName(
                f"no command {args[0]!r}; the commands are {', '.join(names)}",
                hint=f"{ctx.command_path} {near}" if near else f"{ctx.command_path} --help",
            )
        return super().resolve_command(ctx, args)


class Root(Group):
    """The outermost group: it turns whatever a command raises into one line and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            result = super().main(*args, **kwargs)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            output.silence()
            sys.exit(output.BROKEN_PIPE)
        except Exception as error:
            if debugging():
                import traceback

                traceback.print_exc()
            else:
                print(message(error), file=sys.stderr)
            sys.exit(exit_code(error))
        # with standalone_mode off, click hands back the code of ctx.exit(); commands return nothing
        sys.exit(result if isinstance(result, int) else 0)


def exit_code(error: BaseException) -> int:
    """Return 2 where *error* means that what was typed is wrong, else 1."""
    typed = isinstance(error, (UnknownName, ArgumentError, click.UsageError))
    return WRONG_INPUT if typed else FOUND_PROBLEMS


def message(error: BaseException) -> str:
    """Return what the terminal shows of *error*: ``error: ...``, and its hint on a line of its own."""
    if type(error).__name__ == "NoArgsIsHelpError":  # a group alone; older versions of click have no such error
        return str(error)
    if isinstance(error, click.UsageError):
        return f"error: {_usage(error)}"
    if isinstance(error, click.ClickException):
        return f"error: {error.format_message()}"
    if isinstance(error, TlhubError):
        return f"error: {error}"
    if isinstance(error, OSError):
        return f"error: {error}"
    return f"error: {type(error).__name__}: {error}\nhint: TLHUB_DEBUG=1 shows where it comes from"


def _usage(error: click.UsageError) -> str:
    """Say what click found wrong the way tlhub's own errors do."""
    path = error.ctx.command_path if error.ctx else "tlhub"
    if isinstance(error, click.NoSuchOption):
        near = did_you_mean(error.option_name, error.possibilities or _options(error.ctx))
        return f"no option {error.option_name!r}\nhint: " + (f"did you mean {near}?" if near else f"{path} --help")
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name = error.param.opts[0] if isinstance(error.param, click.Option) else error.param.human_readable_name
        text = f"{name} is missing"
    else:
        text = error.format_message().rstrip(".")
        text = text[:1].lower() + text[1:]
    return f"{text}\nhint: {path} --help"


def _options(ctx: click.Context | None) -> list[str]:
    params = ctx.command.params if ctx else []
    return [name for p in params if isinstance(p, click.Option) for name in p.opts]


# -- a problem, as it is typed ---------------------------------------------------------------------


def problem_arguments(required: bool = True) -> Callable[[F], F]:
    """Give a command ``KERNEL DIMS --dtype D [--option k=v].. [--arch A] [--device D] [--schedule S]``."""
    decorators = [
        click.argument("kernel", required=required),
        click.argument("dims", required=required),
        click.option("--dtype", metavar="D", help="One dtype, or ARGUMENT=DTYPE by commas."),
        click.option("--option", "-o", "options", multiple=True, metavar="K=V", help="An option of the kernel."),
        click.option("--arch", metavar="A", help="An architecture, such as cpu:x86-64-v3."),
        click.option("--device", metavar="D", help="A device, such as cpu or cuda:1."),
        click.option("--schedule", metavar="S", help="This schedule and no other."),
    ]

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def json_option(function: F) -> F:
    """Give a command ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(function)


def parse_dims(text: str) -> tuple[int | str, ...] | dict[str, int | str]:
    """Return what DIMS says: ``1024,1024,1024``, ``M,4096,4096`` or ``M=1024,N=..``.

    Whether the values are extents is for the kernel's contract to say, so ``-1`` and ``1.5`` pass.
    """
    parts = [p.strip() for p in text.strip().split(",")]
    named = [p for p in parts if "=" in p]
    if not named:
        return tuple(_number(p) for p in parts)
    if len(named) < len(parts):
        raise ArgumentError(
            f"dims {text.strip()!r} mix names and positions", argument="dims", hint="1024,1024,1024 or M=1024,N=1024"
        )
    return _pairs(parts, "dims", _number)


def parse_dtype(text: str) -> str | dict[str, str]:
    """Return one dtype's name, or a mapping of arguments to names: ``a=float8_e4m3fn,b=float8_e5m2``."""
    text = text.strip()
    return _pairs(text.split(","), "dtype", str) if "=" in text or "," in text else text


_MEANT = {**dict.fromkeys(("1", "yes", "on"), "true"), **dict.fromkeys(("0", "no", "off"), "false")}


def parse_options(kernel: Any, typed: Sequence[str]) -> dict[str, Any]:
    """Return ``k=v`` options as values: each the choice of *kernel* that is written so.

    Options that it does not have stay text, for the contract to refuse. Raises ArgumentError.
    """
    found: dict[str, Any] = {}
    for pair in typed:
        name, equals, text = pair.strip().partition("=")
        if not equals:
            raise ArgumentError(
                f"option {pair!r} has no value", argument="option", hint=f"--option {pair}=VALUE, such as {pair}=true"
            )
        if name in found:
            raise ArgumentError(f"option {name!r} is given twice", argument="option", hint=f"--option {name}={text}")
        choices = next((o.choices for o in kernel.options if o.name == name), ())
        written: dict[str, Any] = {}
        for choice in choices:  # a string wins over a None or a number that is written the same
            if isinstance(choice, str) or show(choice) not in written:
                written[show(choice)] = choice
        if choices and text not in written and text.lower() not in written:
            meant = _MEANT.get(text.lower())
            near = meant if meant in written else did_you_mean(text, written) or show(choices[0])
            allowed = ", ".join(map(show, choices))
            raise ArgumentError(
                f"{kernel.name}: option {name} is {text!r}; allowed: {allowed}",
                argument=name,
                expected=allowed,
                got=repr(text),
                hint=f"--option {name}={near}",
            )
        found[name] = written.get(text, written.get(text.lower(), text))
    return found


def show(value: Any) -> str:
    """Return *value* as it is typed on the command line: ``true``, ``none``, ``128``, ``gelu``."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def words(pairs: Iterable[tuple[str, Any]]) -> str:
    """Return named values as they are typed, in one line: ``causal=true lse=false``; ``none`` if there are none."""
    return " ".join(f"{name}={show(value)}" for name, value in pairs) or "none"


def request(
    kernel: str,
    dims: str,
    dtype: str | None,
    options: Sequence[str],
    arch: str | None = None,
    device: str | None = None,
    schedule: str | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of ``tlhub.get`` for a typed problem.

    Raises UnknownName and ArgumentError for whatever is wrong with it, before anything is looked up.
    """
    from tlhub import catalog, problem

    contract = catalog.load().kernel(kernel)
    shape = parse_dims(dims)
    if not dtype:
        raise ArgumentError(
            f"{kernel}: --dtype is missing; allowed: {', '.join(contract.dtypes)}",
            argument="dtype",
            hint=f"add --dtype {contract.dtypes[0]}",
        )
    types = parse_dtype(dtype)
    values = parse_options(contract, options)
    try:
        problem.make(contract, shape, types, values)  # so that no option can pass for a keyword of get()
    except ArgumentError as error:
        told = {"argument": error.argument, "expected": error.expected, "got": error.got}
        raise ArgumentError(error.message, **told, hint=_typed(contract, error.hint)) from None
    place = {"device": device, "arch": arch, "schedule": schedule}
    return {"kernel": kernel, "shape": shape, "dtype": types, **place, **values}


def _typed(kernel: Any, hint: str | None) -> str | None:
    """Return a *hint* that is a keyword of ``tlhub.get`` as it is typed: ``--option glu=true`` for ``glu=True``."""
    name, equals, written = (hint or "").partition("=")
    if not equals or name not in ("dtype", *(o.name for o in kernel.options)):
        return hint
    value = ast.literal_eval(written)
    if name == "dtype":
        return f"--dtype {','.join(f'{argument}={dtype}' for argument, dtype in value.items())}"
    return f"--option {name}={show(value)}"


_EXAMPLES = {"dims": "M=1024,N=1024,K=1024", "dtype": "--dtype a=float8_e4m3fn,b=float8_e5m2"}


def _pairs(parts: Sequence[str], what: str, convert: Callable[[str], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        name, equals, value = (s.strip() for s in part.partition("="))
        if not (equals and name and value):
            raise ArgumentError(f"{what}: {part!r} is not NAME=VALUE", argument=what, hint=_EXAMPLES[what])
        if name in found:
            raise ArgumentError(f"{what}: {name!r} is given twice", argument=what, hint=_EXAMPLES[what])
        found[name] = convert(value)
    return found


def _number(text: str) -> int | str:
    with contextlib.suppress(ValueError):
        if text.isascii() and "_" not in text:
            return int(text)
    return text
