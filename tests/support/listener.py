"""An HTTP server that hooks of drills talk to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tikv_br.storage.crypter import SecretText


class Listener(ThreadingHTTPServer):
    """Notes what it is asked; below /broken it answers 500."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, bytes]] = []
        self.end = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    def url(self, path: str) -> SecretText:
        """Return the URL of a path."""
        return SecretText(f"http://127.0.0.1:{self.server_address[1]}/{path}")


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        """Note it."""
        assert isinstance(self.server, Listener)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.heard.append((self.command, self.path, body))
        if self.path.startswith("/garbage"):
            self.wfile.write(b"what is this?\r\n\r\n")
            return
        if self.path.startswith(("/silent", "/dripping")):
            self.server.end.wait(0 if self.path.startswith("/dripping") else None)
            while not self.server.end.wait(0.01):
                self.wfile.write(b"H")
            return
        self.send_response(500 if self.path.startswith("/broken") else 200)
        self.end_headers()

    def do_POST(self) -> None:
        """Note it as well."""
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


@contextmanager
def listening() -> Iterator[Listener]:
    """Run one until the end of the block."""
    with Listener() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.end.set()
            server.shutdown()
            thread.join()
