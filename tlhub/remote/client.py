"""The HTTP client: oras's login, on a session with time-outs that takes no step down from TLS.

Imported when a registry is asked for the first time: it takes half a second.
"""

from __future__ import annotations

import os
from typing import Any

import oras.auth.token
import oras.container
import oras.provider
import requests
from oras.logger import logger
from requests.adapters import HTTPAdapter

from tlhub.remote.reference import Reference

_CONNECT = 5.0
logger.handler = lambda message: None  # errors say it


class Client(oras.provider.Registry):
    """*silence*: seconds to wait for the next byte. Credentials are Docker's configuration's."""

    def __init__(self, reference: Reference, silence: float) -> None:
        super().__init__(hostname=reference.host, insecure=reference.plain)
        self.auth = _Login(self.session, self.prefix)
        self.session.mount("https://", _Timed(silence))
        if reference.plain:
            self.session.mount("http://", _Timed(silence))
        else:  # no redirect and no upload leaves TLS
            del self.session.adapters["http://"]
        folder = os.environ.get("DOCKER_CONFIG")
        container = oras.container.Container(f"{reference.repository}:{reference.tag}", registry=reference.host)
        self.auth.load_configs(container, configs=[os.path.join(folder, "config.json")] if folder else None)

    # oras would try again for minutes
    once = oras.provider.Registry.do_request.__wrapped__


class _Login(oras.auth.token.TokenAuth):
    """Answers what a registry asks for, a token or a password; an old token is no answer."""

    def __init__(self, session: requests.Session, prefix: str) -> None:
        super().__init__()
        self.session, self.prefix, self._tls_verify, self._scheme = session, prefix, True, "Bearer"

    def get_auth_header(self) -> dict[str, str]:
        return {"Authorization": f"{self._scheme} {self.token}"} if self.token else {}

    def authenticate_request(
        self, original: requests.Response, headers: dict[str, str], refresh: bool = False
    ) -> tuple[dict[str, str], bool]:
        asked = original.headers.get("Www-Authenticate", "").partition(" ")[0].lower()
        if asked != "basic":
            self.token = None
            answer: tuple[dict[str, str], bool] = super().authenticate_request(original, headers, refresh)
            return answer
        known = getattr(self, "_basic_auth", None)
        if not known or self.token:
            return headers, False
        self._scheme, self.token = "Basic", known
        return {**(headers or {}), **self.get_auth_header()}, True


class _Timed(HTTPAdapter):
    def __init__(self, silence: float) -> None:
        super().__init__()
        self._silence = silence

    def send(self, request: requests.PreparedRequest, **rest: Any) -> requests.Response:
        return super().send(request, **{**rest, "timeout": (_CONNECT, self._silence)})
