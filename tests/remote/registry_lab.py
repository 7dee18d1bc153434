"""A real registry on loopback, and a proxy before it that breaks what it is told to break."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_CONFIG = """\
version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: {root}}}
http: {{addr: "127.0.0.1:{port}"}}
"""
_AUTH = "auth: {{htpasswd: {{realm: test, path: {path}}}}}\n"


def find_registry() -> str | None:
    return shutil.which("docker-registry")


class Daemon:
    """``docker-registry`` on a port of its own, for ``with``. ``passwords``: a file of htpasswd that it asks for."""

    def __init__(self, folder: Path, passwords: str | None = None) -> None:
        self.folder, self._passwords, self.port = folder, passwords, closed_port()

    def __enter__(self) -> Daemon:
        config = _CONFIG.format(root=self.folder / "data", port=self.port)
        if self._passwords is not None:
            (self.folder / "htpasswd").write_text(self._passwords)
            config += _AUTH.format(path=self.folder / "htpasswd")
        (self.folder / "config.yml").write_text(config)
        with open(self.folder / "log", "wb") as log:
            command = [find_registry() or "", "serve", str(self.folder / "config.yml")]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return self
            assert self.process.poll() is None and time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def place(self, repository: str, tag: str = "t") -> str:
        return f"oci://127.0.0.1:{self.port}/{repository}:{tag}"

    def blobs(self) -> list[Path]:
        """Return the files that hold the bytes of blobs."""
        return sorted((self.folder / "data").glob("docker/registry/v2/blobs/sha256/*/*/data"))


@dataclass
class Fault:
    """What a proxy does to requests whose method and path ``match``, for so many ``times``.

    ``kind``: ``cut`` closes after ``after`` bytes of the body, ``status`` answers ``code`` in place of the registry,
    ``flip`` alters the byte at ``after``, ``slow`` sends ``after`` bytes at a time with a pause between, ``hang`` does
    not answer, ``noranges`` leaves out the Range, ``dead`` closes at once.
    """

    kind: str = ""
    match: Callable[[str, str], bool] = lambda method, path: True
    times: int = 1 << 30
    after: int = 0
    code: int = 500


class Proxy:
    """For ``with``: a proxy before the registry at *port*. ``seen``: methods and paths, in order."""

    def __init__(self, port: int, fault: Fault) -> None:
        self.fault, self.seen = fault, list[tuple[str, str]]()
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                proxy.serve(self, port)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = handle_one

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def place(self, repository: str, tag: str = "t") -> str:
        return f"oci://127.0.0.1:{self.port}/{repository}:{tag}"

    def broken(self, kind: str, method: str, part: str, **more: int) -> None:
        """Break requests of *method* with *part* in their path from now on."""
        self.fault = Fault(kind, lambda m, p: m == method and part in p, **more)

    def serve(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        method, path = handler.command, handler.path
        with self._lock:
            self.seen.append((method, path))
            fault = self.fault
            struck = bool(fault.kind) and fault.times > 0 and fault.match(method, path)
            fault.times -= struck
        kind = fault.kind if struck else ""
        handler.close_connection = True
        if kind == "dead":
            return
        if kind == "hang":
            time.sleep(5)
            return
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        if kind == "status":
            handler.send_response(fault.code)
            handler.send_header("Content-Length", "0")
            handler.send_header("Connection", "close")
            handler.end_headers()
            return
        if kind == "cut" and method in ("PUT", "POST"):
            return
        headers = {k: v for k, v in handler.headers.items() if kind != "noranges" or k != "Range"}
        upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        upstream.request(method, path, body or None, {**headers, "Host": f"127.0.0.1:{self.port}"})
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                handler.send_header(name, value)
        length = answer.getheader("Content-Length") if method == "HEAD" else str(len(data))
        handler.send_header("Content-Length", length or "0")
        handler.send_header("Connection", "close")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for piece in _spoilt(data, kind, fault.after):
                handler.wfile.write(piece)
                handler.wfile.flush()


class Redirect:
    """For ``with``: a server with TLS, whose ``certificate`` it signed itself, that sends everybody to *location*."""

    def __init__(self, folder: Path, location: str) -> None:
        self.certificate, key = folder / "certificate.pem", folder / "key.pem"
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        files = ["-keyout", str(key), "-out", str(self.certificate)]
        make = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "1", *files, *subject]
        subprocess.run(make, check=True, capture_output=True)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(307)
                self.send_header("Location", location)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who does not trust it hangs up
        self.port = self._server.server_address[1]

    def __enter__(self) -> Redirect:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spoilt(data: bytes, kind: str, after: int) -> Iterator[bytes]:
    if kind == "flip" and after < len(data):
        data = data[:after] + bytes([data[after] ^ 1]) + data[after + 1 :]
    if kind == "cut":
        data = data[:after]
    step = after if kind == "slow" else max(1, len(data))
    for start in range(0, len(data), step):
        time.sleep(0.02 if kind == "slow" else 0)
        yield data[start : start + step]


def closed_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
