"""A small HTTP/1.1 server for JSON APIs, on a thread of its own."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from tikv_br.errors import PlaygroundError
from tikv_br.playground.settings import TlsSettings


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``query`` is the text after ``?``."""

    method: str
    path: str
    query: str
    body: bytes

    @property
    def parameters(self) -> dict[str, str]:
        """The query's parameters; of one given twice the last."""
        return dict(parse_qsl(self.query, keep_blank_values=True))


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json; charset=UTF-8"

    @classmethod
    def json(cls, value: object, status: int = 200) -> Reply:
        """A value as JSON, indented as PD does it."""
        return cls(status, json.dumps(value, indent=2).encode() + b"\n")


App = Callable[[Request], Reply]


class HttpServer:
    """Serves an app until closed."""

    def __init__(self, app: App, address: str = "127.0.0.1:0", tls: TlsSettings | None = None) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server((host, int(port)), _handler_of(app))
        except OSError as error:
            raise PlaygroundError(f"cannot listen on {address}: {error.strerror}") from error
        if tls:
            context = ssl_context(tls)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop at once; the port is free afterwards."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def ssl_context(tls: TlsSettings) -> ssl.SSLContext:
    """The servers' side of TLS; asks for a client's certificate when TLS is mutual."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
    context.load_cert_chain(Path(tls.cert), Path(tls.key))
    context.verify_mode = ssl.CERT_REQUIRED if tls.mutual else ssl.CERT_OPTIONAL
    return context


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is no news."""


def _handler_of(app: App) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            reply = app(Request(self.command, parts.path, parts.query, body))
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - http.server finds them by name

        def log_message(self, *_: object) -> None:
            """Keep the log for what matters."""

    return Handler
