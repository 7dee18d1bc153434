"""What the commands print: documents and tables on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TextIO

BROKEN_PIPE = 141  # what a shell reports for a process that SIGPIPE ended

_documents: TextIO | None = None


@contextlib.contextmanager
def only_documents() -> Iterator[None]:
    """Keep stdout for ``write``: what libraries and plugins print meanwhile goes to stderr."""
    global _documents
    if sys.stdout is None:
        raise OSError("stdout is closed")
    before, _documents = _documents, sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        with _quiet_pipe():
            _documents.flush()
    finally:
        _documents = before


def claim_stdout() -> None:
    """Give file descriptor 1 of this process to stderr, and the real stdout to ``sys.stdout`` alone.

    For the process of the command line only: C libraries and children then cannot spoil a document.
    """
    if sys.stdout is None:  # closed: nothing to protect
        return
    try:
        real = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # a closed descriptor
        return
    sys.stdout = open(real, "w", encoding=getattr(sys.stdout, "encoding", None), errors="backslashreplace")


def silence() -> None:
    """Send what is still buffered for a reader that has gone to nowhere."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, (_documents or sys.stdout).fileno())
        os.close(null)


@contextlib.contextmanager
def _quiet_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        silence()
        sys.exit(BROKEN_PIPE)
    except OSError as error:  # a full disk, say
        silence()
        raise OSError(f"stdout cannot be written: {error.strerror or error}") from error


def write(text: str) -> None:
    """Print *text* on stdout."""
    with _quiet_pipe():
        print(text, file=_documents or sys.stdout, flush=True)


def write_path(path: str) -> None:
    """Print *path* on stdout, byte for byte: names of files need not be text."""
    stream = _documents or sys.stdout
    with _quiet_pipe():
        stream.flush()
        stream.buffer.write(os.fsencode(path) + b"\n")
        stream.flush()


def write_json(document: Any) -> None:
    """Print one JSON document on stdout: on a terminal for people to read, else on one line, which is much quicker."""
    indent = 2 if (_documents or sys.stdout).isatty() else None
    write(json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=False))


def note(text: str) -> None:
    """Print *text* on stderr."""
    print(text, file=sys.stderr, flush=True)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[str] = (), whole: Sequence[str] = ()
) -> None:
    """Print a table on stdout: as wide as the terminal, or unfolded where there is none.

    *right*: columns of numbers; *whole*: those that are copied, and are never broken to fit.
    """
    cells = [[str(cell).replace("\n", " ") for cell in row] for row in (columns, *rows)]
    if not (_documents or sys.stdout).isatty():
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        sides = [">" if column in right else "<" for column in columns]
        form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
        write("\n".join(form.format(*row).rstrip() for row in cells))
        return
    import io

    from rich.console import Console
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        widest = max(len(row[position]) for row in cells[1:]) if column in whole and rows else None
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=column in whole, min_width=widest)
    for row in cells[1:]:
        made.add_row(*row)
    drawn = io.StringIO()
    console = Console(
        file=drawn,
        markup=False,
        highlight=False,
        emoji=False,
        force_terminal=True,
        no_color=os.environ.get("NO_COLOR") or None,  # type: ignore[arg-type]
    )
    console.print(made)
    write("\n".join(line.rstrip() for line in drawn.getvalue().splitlines()))


def fields(pairs: Sequence[tuple[str, Any]]) -> None:
    """Print *pairs* on stdout, one a line, the values under one another."""
    width = max((len(name) for name, _ in pairs), default=0)
    write("\n".join(f"{name:<{width}}  {value}" for name, value in pairs))


def dims(pairs: Sequence[Sequence[Any]]) -> str:
    """Return dims for people to read: ``M=1024 N=? K=64`` (a symbol keeps its number only where it recurs)."""
    symbols = [e for _, e in pairs if isinstance(e, str)]
    shown = {s: "?" if symbols.count(s) == 1 else s for s in symbols}
    return " ".join(f"{name}={shown.get(extent, extent)}" for name, extent in pairs)
