"""Registries: manifests and blobs, with few requests, and another try of what may pass.

What goes wrong is a CacheError that names the registry. Bytes are handed on as they come: whoever reads them holds
them against the digest that they must have.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urljoin

from tlhub.cache.manifest import Damaged
from tlhub.errors import ArgumentError, CacheError
from tlhub.remote import artifact
from tlhub.remote.layer import sha256
from tlhub.remote.reference import Reference

_CHUNK = 64 << 10
_MAY_PASS = (429, 500, 502, 503, 504)
_MAY_PASS_TOO = {"MANIFEST_BLOB_UNKNOWN", "BLOB_UPLOAD_UNKNOWN", "BLOB_UPLOAD_INVALID", "DIGEST_INVALID"}
"""What a registry says in the moment in which another writes the same, and of bytes that were spoilt on the way."""

T = TypeVar("T")


class Unsteady(CacheError):
    """What may go well the next time: no connection, a broken one, a registry that is overrun."""


def offline() -> bool:
    """Tell whether TLHUB_OFFLINE says that no registry is to be asked. Raises ArgumentError for another word."""
    word = os.environ.get("TLHUB_OFFLINE") or "0"
    if word not in ("0", "1"):
        raise ArgumentError(f"TLHUB_OFFLINE is {word!r}; allowed are 0 and 1", hint="export TLHUB_OFFLINE=1")
    return word == "1"


def check_online() -> None:
    """Raise CacheError where no registry is to be asked, ArgumentError where that cannot be told."""
    if offline():
        raise CacheError("no registry is asked: TLHUB_OFFLINE is set", hint="unset TLHUB_OFFLINE")


class Registry:
    """A repository of a registry. *silence*: seconds to wait for the next byte; *pauses*: before each further try.

    Credentials are those that ``docker login`` and its like keep. Raises CacheError offline, and without oras.
    """

    def __init__(
        self, reference: Reference, *, silence: float = 30.0, pauses: tuple[float, ...] = (0.2, 0.6, 1.8)
    ) -> None:
        check_online()
        try:
            from tlhub.remote.client import Client
        except ImportError as error:
            message = "registries need the package 'oras', which is not installed"
            raise CacheError(message, hint="pip install 'tlhub-core[oci]'") from error
        self.reference, self.requests = reference, 0
        self._pauses = pauses
        self._base = f"{'http' if reference.plain else 'https'}://{reference.host}/v2/{reference.repository}"
        with self._logged_in():
            self._client = Client(reference, silence)

    def manifest(self) -> bytes | None:
        """Return what stands under the reference's digest or tag, None if nothing does. Raises CacheError."""
        reference = self.reference
        url = f"{self._base}/manifests/{reference.digest or reference.tag}"

        def get() -> bytes | None:
            headers = {"Accept": artifact.MEDIA_TYPE}
            with self._sent("GET", url, headers=headers, stream=True, or_none=True) as response:
                return response and b"".join(_first(response, artifact.LARGEST + 1))

        data = self._persist(get)
        if data is not None and reference.digest and sha256(data) != reference.digest:
            raise Damaged(f"{reference.host} sent another manifest than {reference.digest}")
        return data

    def put_manifest(self, data: bytes) -> str:
        """Have the tag mean *data*, and return its digest. Raises CacheError."""

        def put() -> str:
            url, headers = f"{self._base}/manifests/{self.reference.tag}", {"Content-Type": artifact.MEDIA_TYPE}
            with self._sent("PUT", url, data=data, headers=headers):
                return sha256(data)

        return self._persist(put)

    def put_blob(self, file: BinaryIO, digest: str) -> bool:
        """Upload *file*, unless the registry has it; tell whether it had to be. Raises CacheError."""

        def put() -> bool:
            with self._sent("HEAD", f"{self._base}/blobs/{digest}", or_none=True) as known:
                if known is not None:
                    return False
            # a broken upload begins anew: its place may be gone
            with self._sent("POST", f"{self._base}/blobs/uploads/") as started:
                place = urljoin(f"{self._base}/", started.headers.get("Location", ""))
            file.seek(0)
            url = f"{place}{'&' if '?' in place else '?'}digest={digest}"
            with self._sent("PUT", url, data=file, headers={"Content-Type": "application/octet-stream"}):
                return True

        return self._persist(put)

    def read(self, digest: str, start: int, end: int) -> Iterator[bytes]:
        """Iterate over the bytes of a blob from *start* to *end*; a broken connection is taken up where it broke.

        Raises CacheError.
        """
        for pause in (*self._pauses, None):
            headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            try:
                with self._sent("GET", f"{self._base}/blobs/{digest}", headers=headers, stream=True) as response:
                    for chunk in _between(response, start, end):
                        start += len(chunk)
                        yield chunk
                if start == end:
                    return
                raise Unsteady(f"{self.reference.host} ended {digest} {end - start} bytes early")
            except Unsteady:
                if pause is None:
                    raise
                time.sleep(pause)

    def _persist(self, attempt: Callable[[], T]) -> T:
        for pause in self._pauses:
            try:
                return attempt()
            except Unsteady:
                time.sleep(pause)
        return attempt()

    @contextlib.contextmanager
    def _sent(
        self,
        method: str,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        data: Any = None,
        stream: bool = False,
        or_none: bool = False,
    ) -> Iterator[Any]:
        """Send one request for the response, None where *or_none* allows that there is none. Raises CacheError."""
        self.requests += 1
        with self._translated():
            response = self._ask(url, method, data=data, headers=headers or {}, stream=stream)
            with contextlib.closing(response):
                absent = response.status_code == 404 and or_none
                if response.status_code >= 300 and not absent:
                    raise self._error(response)
                yield None if absent else response

    def _ask(self, url: str, method: str, **rest: Any) -> Any:
        with self._logged_in():
            return self._client.once(url, method, **rest)

    @contextlib.contextmanager
    def _logged_in(self) -> Iterator[None]:
        """Make a CacheError of what oras raises over credentials, which is one of many things."""
        import requests

        try:
            yield
        except requests.RequestException:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            host = self.reference.host
            raise CacheError(f"{host} asks for a login: {error}", hint=f"docker login {host}") from error

    def _error(self, response: Any) -> CacheError:
        host, code = self.reference.host, response.status_code
        if code in (401, 403):
            return CacheError(f"{host} does not let you do that ({code})", hint=f"docker login {host}")
        said, codes = "", set()
        with contextlib.suppress(Exception):  # whatever a registry says in place of its errors
            errors = response.json()["errors"]
            codes = {error["code"] for error in errors}
            said = f": {_printable(errors[-1]['message'])}"
        if code in _MAY_PASS or codes & _MAY_PASS_TOO:
            return Unsteady(f"{host} answers {code}{said}")
        return CacheError(f"{host} answers {code} to what {self.reference} needs{said}")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Make a CacheError of what the libraries below raise."""
        import requests
        import urllib3

        host = self.reference.host
        try:
            yield
        except CacheError:
            raise
        except requests.exceptions.SSLError as error:
            hint = "export REQUESTS_CA_BUNDLE=/the/file/of/its/authority.pem"
            raise CacheError(f"{host}: TLS fails: {_reason(error)}", hint=hint) from error
        except (requests.exceptions.InvalidSchema, requests.exceptions.InvalidURL) as error:
            raise CacheError(f"{host} redirects to where there is no TLS: {_reason(error)}") from error
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            hint = f"curl -sS {self._base.partition('/v2/')[0]}/v2/"
            raise Unsteady(f"{host} does not answer: {_reason(error)}", hint=hint) from error


def _between(response: Any, start: int, end: int) -> Iterator[bytes]:
    """Iterate over the bytes from *start* to *end*: of a response that has just them, or has the whole blob."""
    if response.status_code == 206:
        if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise CacheError(f"the registry sent {response.headers.get('Content-Range')!r}, not bytes {start}-")
        start, end = 0, end - start
    yield from _first(response, end, start)


def _first(response: Any, end: int, start: int = 0) -> Iterator[bytes]:
    """Iterate over the bytes of a response from *start* to *end*, or to where it ends."""
    position = 0
    for chunk in response.iter_content(_CHUNK):
        wanted = chunk[max(0, start - position) : end - position]
        position += len(chunk)
        if wanted:
            yield wanted
        if position >= end:
            return


def _reason(error: BaseException) -> str:
    """Return what the innermost of the exceptions says that requests wraps in one another."""
    for _ in range(8):
        inner = getattr(error, "reason", None) or next((a for a in error.args if isinstance(a, BaseException)), None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = re.sub(r".*: \[Errno -?\d+\] |<[^>]*>: |HTTPS?Connection\([^)]*\): ", "", text)
    return _printable(text) or type(error).__name__


def _printable(text: str) -> str:
    """Return *text*, which whoever answers may have chosen, so that it does nothing to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])
