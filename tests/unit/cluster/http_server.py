"""A tiny HTTP server that answers from a script, for PD's HTTP and the stores' status ports."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from tests.support.certificates import KeyPair
from tests.support.ports import reserve_port


class ScriptedHttp:
    """Answers ``(status, body)`` by path; the last entry of a path stays. Requests are kept with their bodies.

    Once it is closed, its port refuses and is nobody else's.
    """

    def __init__(self, pair: KeyPair | None = None) -> None:
        self.scripts: dict[str, list[tuple[int, bytes]]] = {}
        self.requests: list[tuple[str, str, bytes]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", reserve_port(self)), self._handler())
        if pair is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pair.cert, pair.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(b"")

            def do_POST(self) -> None:
                self._answer(self.rfile.read(int(self.headers["Content-Length"])))

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
                """Say nothing."""

            def _answer(self, body: bytes) -> None:
                outer.requests.append((self.command, self.path, body))
                script = outer.scripts.get(self.path, [(404, b"not found")])
                status, data = script.pop(0) if len(script) > 1 else script[0]
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler
