"""The HTTP server of ``--status-addr``: ``/`` (a page), ``/status``, ``/history``, ``/healthz`` and ``/metrics``.

It only reads, and listens on loopback unless another address is said. Figures are for who has the key; without one there is the page, which
holds none, and whether all is well.
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
from http.server import BaseHTTPRequestHandler
from importlib import resources
from socketserver import ThreadingTCPServer
from urllib.parse import parse_qs, urlsplit

from incremental.watch.address import Address
from incremental.watch.history import JOIN_SECONDS, History, Point
from incremental.watch.metrics import Metrics
from incremental.watch.named import Watched
from tikv_br import __version__
from tikv_br.errors import UsageError
from tikv_br.storage.secret import SecretText

log = logging.getLogger(__name__)

MAX_LAG = 300.0
POLL_SECONDS = 0.2
"""How soon the server notices that it is to end."""
REQUEST_SECONDS = 10.0
"""How long a client may be silent within a request."""
MOST_CLIENTS = 32
"""So many are answered at once; who comes on top is sent away. Slow readers must not cost the sync its sockets."""
NO_KEY = SecretText()
"""Figures are for everyone."""
OPEN_PATHS = {"/", "/healthz"}
_MILLISECONDS = re.compile(r"[0-9]{1,19}", re.ASCII)
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
HEADERS = {
    "Cache-Control": "no-store",
    # The page fetches nothing but our own answers, and no other site may frame it.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a path is answered with."""

    content_type: str
    body: bytes
    code: HTTPStatus = HTTPStatus.OK


KEY_WANTED = Answer(TEXT, b"the key is wanted, as a header: Authorization: Bearer KEY\n", HTTPStatus.UNAUTHORIZED)


class Board:
    """All that can be asked of the syncs of a process."""

    def __init__(self, watched: Watched, history: History, max_lag: float, key: SecretText) -> None:
        self._watched, self._history, self._max_lag, self._key = watched, history, max_lag, key
        self._metrics = Metrics(watched, max_lag)
        self._page = resources.files("incremental.watch").joinpath("page.html").read_bytes()

    def answer(self, target: str, accept: str, authorization: str) -> Answer:
        """Answer a GET of a path with its query; `accept` and `authorization` are headers."""
        url = urlsplit(target)
        knows_key = self._knows_key(authorization)
        if url.path not in OPEN_PATHS and not knows_key:
            return KEY_WANTED
        match url.path:
            case "/":
                return Answer("text/html; charset=utf-8", self._page)
            case "/status":
                return Answer(JSON, _json(self._status()))
            case "/history":
                return self._past(parse_qs(url.query).get("since", ["0"])[0])
            case "/healthz":
                return self._health(in_full=knows_key)
            case "/metrics":
                return self._figures(accept)
            case _:
                return Answer(TEXT, b"there are /, /status, /history, /healthz and /metrics\n", HTTPStatus.NOT_FOUND)

    def _status(self) -> dict[str, object]:
        syncs = []
        for each in self._watched():
            figures = asdict(each.status) if each.status is not None else None
            syncs.append({"name": each.name, "trouble": each.trouble(self._max_lag), "status": figures})
        healthy = not any(each["trouble"] for each in syncs)
        now_ms = time.time_ns() // 1_000_000
        return {
            "version": __version__,
            "now_ms": now_ms,
            "max_lag": self._max_lag,
            "healthy": healthy,
            "syncs": syncs,
        }

    def _past(self, since: str) -> Answer:
        if not _MILLISECONDS.fullmatch(since):
            return Answer(TEXT, b"since= takes milliseconds since the epoch\n", HTTPStatus.BAD_REQUEST)
        return Answer(JSON, _json(self._points(int(since))))

    def _figures(self, accept: str) -> Answer:
        try:
            return Answer(*self._metrics.render(accept))
        except TypeError:  # of the Prometheus client, for a version that is no number
            return Answer(TEXT, b"the header Accept asks for no version that there is\n", HTTPStatus.BAD_REQUEST)

    def _points(self, since: int) -> dict[str, object]:
        """By columns, as a page plots them."""
        return {
            name: {field: [getattr(point, field) for point in points] for field in Point.__dataclass_fields__}
            for name, points in self._history.since(since).items()
        }

    def _knows_key(self, authorization: str) -> bool:
        scheme, _, said = authorization.partition(" ")
        wanted = self._key.reveal().encode()
        return not wanted or (scheme.lower() == "bearer" and hmac.compare_digest(said.strip().encode(), wanted))

    def _health(self, *, in_full: bool) -> Answer:
        wrong = [f"{each.name}: {trouble}" for each in self._watched() if (trouble := each.trouble(self._max_lag))]
        if wrong:
            said = "\n".join(wrong) if in_full else "not well"
            return Answer(TEXT, f"{said}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)
        return Answer(TEXT, b"ok\n")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "tikv-br"
    sys_version = ""
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answer with a body."""
        self._send(self._answer(), with_body=True)

    def do_HEAD(self) -> None:
        """Answer without one."""
        self._send(self._answer(), with_body=False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """To our log, where only --log-level debug shows it."""
        log.debug(format, *args)

    def _answer(self) -> Answer:
        header = self.headers.get
        return self.server.board.answer(self.path, header("Accept", ""), header("Authorization", ""))

    def _send(self, answer: Answer, *, with_body: bool) -> None:
        self.send_response(answer.code)
        headers = {"Content-Type": answer.content_type, "Content-Length": str(len(answer.body)), **HEADERS}
        if answer.code is HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = 'Bearer realm="tikv-br"'
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(answer.body)


class _Server(ThreadingTCPServer):
    """Not `ThreadingHTTPServer`, which asks the DNS for its own name."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: Address, board: Board) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.board = board
        self._places = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__((address.host, address.port), _Handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Answer in a thread, if there is a place for it."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread to be had
            self._places.release()
            raise

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Free the place at the end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base class's
        """A reader that went away is no trouble of ours."""
        log.debug("no answer to %s: %s", client_address, sys.exc_info()[1])


@contextmanager
def serve(
    address: Address, watched: Watched, *, max_lag: float = MAX_LAG, key: SecretText = NO_KEY
) -> Iterator[Address]:
    """Answer until left; yields the address with the port that was chosen. Raises `UsageError` if it cannot be had."""
    history = History(watched)
    try:
        server = _Server(address, Board(watched, history, max_lag, key))
    except OSError as error:
        raise UsageError(f"--status-addr {address}: {error.strerror or error}") from None
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
