"""References: ``oci://host[:port]/repository[:tag][@sha256:...]``. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from tlhub.errors import ArgumentError

SCHEME = "oci://"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"oci://(?P<host>(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{{1,5}})?)"
    rf"/(?P<repository>{_PART}(?:/{_PART})*)(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}))?"
    rf"(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?")


class Reference(NamedTuple):
    """A place in a registry. ``digest`` names one state of it for good; ``plain``: HTTP without TLS."""

    host: str
    repository: str
    tag: str
    digest: str | None
    plain: bool

    def __str__(self) -> str:
        return f"{SCHEME}{self.host}/{self.repository}:{self.tag}" + (f"@{self.digest}" if self.digest else "")


def parse(text: str, *, plain: bool = False) -> Reference:
    """Return what *text* refers to; without a tag that is ``latest``. Raises ArgumentError.

    TLS is left out where *plain* asks for it, and for this machine's own addresses.
    """
    found = _REFERENCE.fullmatch(text)
    if found is None or len(found["repository"]) > 255:
        raise ArgumentError(
            f"no place in a registry: {text!r}; allowed is oci://HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST], "
            "the repository in lower case",
            argument="reference",
            hint="tlhub remote ls oci://localhost:5000/kernels:latest",
        )
    plain = plain or _LOOPBACK.fullmatch(found["host"]) is not None
    return Reference(found["host"], found["repository"], found["tag"] or "latest", found["digest"], plain)
