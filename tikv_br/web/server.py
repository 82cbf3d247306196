"""The HTTP server of status pages: threads, timeouts, limits and headers. What it answers, its callers say."""

from __future__ import annotations

import hmac
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tikv_br.errors import UsageError
from tikv_br.storage.crypter import SecretText
from tikv_br.web.address import Address

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Interval of checks for shutdown."""
JOIN_SECONDS = 10.0
REQUEST_TIMEOUT = 10.0
"""Seconds from the acceptance of a connection to the last byte of the answer; then it is closed."""
MAX_CONNECTIONS = 32
"""Connections that are served at a time: more would use up the open files of the process, which has other work."""
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 10\r\nContent-Length: 0\r\n\r\n"
MAX_BODY = 4096
"""Bytes of a request's body; more are refused."""
READS = ("GET", "HEAD")
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request of a client, who may be anybody."""

    method: str
    target: str
    """Path and query of the request."""
    headers: Mapping[str, str]
    """Headers by lower-case name."""
    body: bytes = b""

    @property
    def url(self) -> SplitResult:
        """The parts of the target; empty ones if it does not parse."""
        try:
            return urlsplit(self.target)
        except ValueError:
            return urlsplit("")

    def header(self, name: str) -> str:
        """The value of a header; empty without it."""
        return self.headers.get(name.lower(), "")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """The answer to one request."""

    content_type: str
    body: bytes
    code: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers besides the ones of every answer."""


Answer = Callable[[HttpRequest], HttpResponse]
"""Answers one request; called from any thread. For HEAD it answers as for GET: the body is not sent."""


def is_bearer(authorization: str, key: SecretText) -> bool:
    """Return whether the value of an Authorization header has the key; always true without a key."""
    scheme, _, given = authorization.partition(" ")
    expected = key.reveal().encode()
    return not expected or (scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), expected))


@contextmanager
def listening(
    address: Address, answer: Answer, flag: str = "--status-addr", methods: Collection[str] = READS
) -> Iterator[Address]:
    """Serve until the end of the block; yields the address with the chosen port.

    `flag` is the option that chose the address, for messages. Raises `UsageError` if it cannot listen there.
    """
    try:
        server = _Server(address, answer, methods)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {flag} {address}: {error.strerror or error}",
            hint="Pass another port, or port 0 for any free one.",
        ) from None
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), name="status", daemon=True)
        thread.start()
        try:
            yield Address(address.host, server.server_address[1])
        finally:
            server.shutdown()
            thread.join(JOIN_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "tikv-br"
    sys_version = ""
    timeout = REQUEST_TIMEOUT
    error_content_type = TEXT
    error_message_format = "%(code)d %(message)s\n"

    def do_GET(self) -> None:
        """Send headers and body."""
        self._reply(with_body=True)

    def do_HEAD(self) -> None:
        """Send the headers of a GET."""
        self._reply(with_body=False)

    def do_POST(self) -> None:
        """Read the body, and answer."""
        self._reply(with_body=True)

    def parse_request(self) -> bool:
        """Refuse methods that are not served, and bodies that are too large."""
        if not super().parse_request():
            return False
        if self.command not in self.server.methods:
            allowed = ", ".join(self.server.methods)
            body = f"method not allowed; methods: {allowed}\n".encode()
            self._send(HttpResponse(TEXT, body, HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": allowed}), with_body=True)
            return False
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()) or len(length) > 9 or int(length) > MAX_BODY:
            self._send(HttpResponse(TEXT, b"body too large\n", HTTPStatus.REQUEST_ENTITY_TOO_LARGE), with_body=True)
            return False
        return True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log requests at debug level."""
        log.debug(format, *args)

    def _reply(self, *, with_body: bool) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        method = "GET" if self.command == "HEAD" else self.command
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._send(self.server.answer(HttpRequest(method, self.path, headers, body)), with_body=with_body)

    def _send(self, answer: HttpResponse, *, with_body: bool) -> None:
        self.send_response(answer.code)
        length = {"Content-Type": answer.content_type, "Content-Length": str(len(answer.body))}
        for name, value in (length | HEADERS | dict(answer.headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(answer.body)


class _Server(ThreadingHTTPServer):
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: Address, answer: Answer, methods: Collection[str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.answer, self.methods = answer, methods
        self._deadlines: dict[socket.socket, float] = {}
        super().__init__((address.host, address.port), _Handler)

    def verify_request(self, request: Any, client_address: object) -> bool:  # noqa: ANN401, ARG002 - the base class's
        """Refuse a connection beyond the limit, and note the deadline of others. Only the thread of the server adds."""
        if len(self._deadlines) >= MAX_CONNECTIONS:
            request.setblocking(False)  # noqa: FBT003 - its only argument
            with suppress(OSError):
                request.send(_BUSY)
            return False
        self._deadlines[request] = time.monotonic() + REQUEST_TIMEOUT
        return True

    def service_actions(self) -> None:
        """End connections that have had their time, however slowly their clients send or read; also between two connections."""
        now = time.monotonic()
        for request, deadline in list(self._deadlines.items()):
            if deadline < now:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - the base class's
        """Close a connection."""
        self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base class's
        """Log at debug level: a client that disconnects is no error of the command."""
        log.debug("cannot answer %s: %s", client_address, sys.exc_info()[1])
