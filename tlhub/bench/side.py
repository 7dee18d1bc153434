"""One side of a measurement, as the parent sees it: a child process that is told over a pipe what to do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tlhub import errors
from tlhub.errors import TlhubError

_START = "import sys; sys.path[:] = {path!r}; from tlhub.bench.child import main; main()"

# choices of somebody else's tuning, which would measure a library that nobody runs
_FORGOTTEN = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")

_PATIENCE = 10.0
"""Seconds that a process has to end by itself."""


class LeftOut(Exception):
    """A side cannot run here; the message says why."""


@contextlib.contextmanager
def or_left_out() -> Iterator[None]:
    """Raise LeftOut where a peer lacks a package, or does not compute the problem."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise LeftOut(f"{error.name or error} is not installed") from error
    except ImportError as error:
        raise LeftOut(str(error)) from error
    except NotImplementedError as error:
        raise LeftOut(str(error) or "it does not compute this problem") from error


class Side:
    """A long-lived process that runs one implementation on *threads* threads. ``failed``: it raised an error."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.failed = False
        env = {k: v for k, v in os.environ.items() if k not in _FORGOTTEN}
        pools = ("TLHUB_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env | dict.fromkeys(pools, str(threads)),
            text=True,
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()  # the process ends with its input
            self._process.wait(timeout=_PATIENCE if kind is None else 0)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have the process do *what* and return its answer.

        Raises what it raised, where that is an error of tlhub's, AssertionError, or LeftOut.
        """
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.failed = True
            code = self._process.wait()
            raise TlhubError(f"the process that runs {self.name} ended with {code} while it was to {what}")
        answer = json.loads(line)
        if "value" in answer:
            return answer["value"]
        kind, text = answer["error"], answer["message"]
        if kind == "LeftOut":
            raise LeftOut(text)
        self.failed = True
        if kind == "AssertionError":
            raise AssertionError(text)
        known = getattr(errors, kind, None)
        raise known(text) if known else TlhubError(f"{self.name}: {kind}: {text}")
