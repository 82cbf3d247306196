"""The HTTP server of ``--status-addr``: ``/`` (a page), ``/status``, ``/history``, ``/healthz`` and ``/metrics``.

Read-only. Listens on loopback unless another address is given. Figures need the key; without it, clients get the page (which
contains no figures) and the health status.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from tikv_br import __version__
from tikv_br.errors import UsageError
from tikv_br.incremental.watch.address import Address
from tikv_br.incremental.watch.metrics import Metrics
from tikv_br.incremental.watch.status import JOIN_SECONDS, History, Point, StatusSource
from tikv_br.storage.crypter import SecretText

log = logging.getLogger(__name__)

MAX_LAG = 300.0
POLL_SECONDS = 0.2
"""How often the server checks for shutdown."""
REQUEST_TIMEOUT = 10.0
"""Seconds that one read from or write to a client may take; then its connection is closed."""
NO_KEY = SecretText()
"""No key is required."""
PUBLIC_PATHS = {"/", "/healthz"}
_MILLISECONDS = re.compile(r"[0-9]{1,19}", re.ASCII)
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
HEADERS = {
    "Cache-Control": "no-store",
    # The page loads nothing from other sites, and no other site may frame it.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """The answer to one request."""

    content_type: str
    body: bytes
    code: HTTPStatus = HTTPStatus.OK


KEY_REQUIRED = HttpResponse(
    TEXT, b"this path requires the status key; pass the header: Authorization: Bearer KEY\n", HTTPStatus.UNAUTHORIZED
)


class StatusApi:
    """Answers requests about the syncs of this process. Thread-safe."""

    def __init__(self, statuses: StatusSource, history: History, max_lag: float, key: SecretText) -> None:
        self._statuses, self._history, self._max_lag, self._key = statuses, history, max_lag, key
        self._metrics = Metrics(statuses, max_lag)
        self._page = resources.files("tikv_br.incremental.watch").joinpath("page.html").read_bytes()

    def answer(self, target: str, accept: str, authorization: str) -> HttpResponse:
        """Answer a GET of a path with its query; `accept` and `authorization` are the values of these headers."""
        url = urlsplit(target)
        authorized = self._is_authorized(authorization)
        if url.path not in PUBLIC_PATHS and not authorized:
            return KEY_REQUIRED
        match url.path:
            case "/":
                return HttpResponse("text/html; charset=utf-8", self._page)
            case "/status":
                return HttpResponse(JSON, _json(self._status()))
            case "/history":
                return self._points(parse_qs(url.query).get("since", ["0"])[0])
            case "/healthz":
                return self._health(details=authorized)
            case "/metrics":
                return self._render_metrics(accept)
            case _:
                return HttpResponse(
                    TEXT, b"not found; paths: /, /status, /history, /healthz, /metrics\n", HTTPStatus.NOT_FOUND
                )

    def _status(self) -> dict[str, object]:
        syncs = []
        for each in self._statuses():
            figures = asdict(each.status) if each.status is not None else None
            problem, degraded = each.problem(self._max_lag), each.degraded
            syncs.append({"name": each.name, "trouble": problem, "degraded": degraded, "status": figures})
        healthy = not any(each["trouble"] for each in syncs)
        now_ms = time.time_ns() // 1_000_000
        return {
            "version": __version__,
            "now_ms": now_ms,
            "max_lag": self._max_lag,
            "healthy": healthy,
            "degraded": any(each["degraded"] for each in syncs),
            "syncs": syncs,
        }

    def _points(self, since: str) -> HttpResponse:
        """The history as columns per sync, which is what the page plots."""
        if not _MILLISECONDS.fullmatch(since):
            return HttpResponse(TEXT, b"since= must be milliseconds since the epoch\n", HTTPStatus.BAD_REQUEST)
        columns = {
            name: {field: [getattr(point, field) for point in points] for field in Point.__dataclass_fields__}
            for name, points in self._history.since(int(since)).items()
        }
        return HttpResponse(JSON, _json(columns))

    def _render_metrics(self, accept: str) -> HttpResponse:
        try:
            return HttpResponse(*self._metrics.render(accept))
        except TypeError:  # raised by the Prometheus client if the version is not a number
            return HttpResponse(
                TEXT, b"the header Accept asks for an unsupported version of the text format\n", HTTPStatus.BAD_REQUEST
            )

    def _is_authorized(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        expected = self._key.reveal().encode()
        return not expected or (scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), expected))

    def _health(self, *, details: bool) -> HttpResponse:
        statuses = self._statuses()
        unhealthy = [f"{each.name}: {problem}" for each in statuses if (problem := each.problem(self._max_lag))]
        if unhealthy:
            text = "\n".join(unhealthy) if details else "unhealthy"
            return HttpResponse(TEXT, f"{text}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)
        degraded = [f"{each.name}: {each.degraded}" for each in statuses if each.degraded]
        if degraded:
            return HttpResponse(TEXT, "\n".join(["degraded", *(degraded if details else ()), ""]).encode())
        return HttpResponse(TEXT, b"ok\n")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "tikv-br"
    sys_version = ""
    timeout = REQUEST_TIMEOUT

    def do_GET(self) -> None:
        """Send headers and body."""
        self._send(self._answer(), with_body=True)

    def do_HEAD(self) -> None:
        """Send the headers of a GET."""
        self._send(self._answer(), with_body=False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log requests at debug level."""
        log.debug(format, *args)

    def _answer(self) -> HttpResponse:
        header = self.headers.get
        return self.server.api.answer(self.path, header("Accept", ""), header("Authorization", ""))

    def _send(self, answer: HttpResponse, *, with_body: bool) -> None:
        self.send_response(answer.code)
        headers = {"Content-Type": answer.content_type, "Content-Length": str(len(answer.body)), **HEADERS}
        if answer.code is HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = 'Bearer realm="tikv-br"'
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(answer.body)


class _Server(ThreadingHTTPServer):
    def __init__(self, address: Address, api: StatusApi) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.api = api
        super().__init__((address.host, address.port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base class's
        """Log at debug level: a client that disconnects is not an error of the sync."""
        log.debug("cannot answer %s: %s", client_address, sys.exc_info()[1])


@contextmanager
def serve(
    address: Address, statuses: StatusSource, *, max_lag: float = MAX_LAG, key: SecretText = NO_KEY
) -> Iterator[Address]:
    """Serve until the end of the block; yields the address with the chosen port.

    Raises `UsageError` if it cannot listen there.
    """
    history = History(statuses)
    try:
        server = _Server(address, StatusApi(statuses, history, max_lag, key))
    except OSError as error:
        raise UsageError(
            f"cannot listen on --status-addr {address}: {error.strerror or error}",
            hint="Pass another port, or port 0 for any free one.",
        ) from None
    with server, history:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), name="status", daemon=True)
        thread.start()
        try:
            yield Address(address.host, server.server_address[1])
        finally:
            server.shutdown()
            thread.join(JOIN_SECONDS)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
