"""An S3 endpoint that answers by a script: for what real servers do only on bad days."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qsl, urlsplit

from tikv_br.storage.url import StorageLocation, parse

S3_URL = "s3://bucket/p?region=r&access-key=a&secret-access-key=very-secret"


class Script(BaseHTTPRequestHandler):
    """Answers with the next status of a script, then always with the last."""

    answers: list[tuple[int, str]]
    seen: ClassVar[list[str]] = []
    """Targets of all requests to all scripts."""

    def _answer(self) -> None:
        self.seen.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, code = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        body = f"<Error><Code>{code}</Code><Message>said the script</Message></Error>".encode() if code else b"payload"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 10:00:00 GMT")
        self.send_header("ETag", '"mark"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815  # names that http.server wants

    def log_message(self, *_arguments: object) -> None:
        """Keep silent."""


class Listing(BaseHTTPRequestHandler):
    """Lists 27 objects below ``p/`` in pages of 4, as `kind` says."""

    kind: str

    def do_GET(self) -> None:
        """One page."""
        query = dict(parse_qsl(urlsplit(self.path).query))
        if "list-type" not in query:  # the probe
            self.do_HEAD()
            return
        names = [f"{query.get('prefix', '')}{number:02}" for number in range(27)]
        behind = query.get("continuation-token") or (
            "" if "ignores start-after" in self.kind else query.get("start-after", "")
        )
        left = [name for name in names if name > behind]
        page = left if "one page" in self.kind else left[:4]
        date = "<LastModified>2026-11-21T10:00:00.000Z</LastModified>"
        entries = "".join(f"<Contents><Key>{name}</Key>{date}<Size>1</Size></Contents>" for name in page)
        more = "<IsTruncated>true</IsTruncated>" if len(page) < len(left) and "silent" not in self.kind else ""
        if more and "no tokens" not in self.kind:
            more += f"<NextContinuationToken>{page[-1]}</NextContinuationToken>"
        body = f"<ListBucketResult>{more}{entries}</ListBucketResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        """The probe."""
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Keep silent."""


class Page(BaseHTTPRequestHandler):
    """A web server: a page of HTML, or a redirect."""

    status: int

    def _answer(self) -> None:
        body = b"<!DOCTYPE html>\n<HTML><body>Please log in</body></html>"
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if self.status // 100 == 3:
            self.send_header("Location", f"http://{self.headers['Host']}/login")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_CONNECT = _answer  # noqa: N815  # names that http.server wants

    def log_message(self, *_arguments: object) -> None:
        """Keep silent."""


@contextmanager
def page(status: int, url: str = S3_URL) -> Iterator[StorageLocation]:
    """A web server, or a proxy, in the place of the storage."""
    with _served(type("Handler", (Page,), {"status": status})) as endpoint:
        yield parse(f"{url}&endpoint={endpoint}")


@contextmanager
def listing(kind: str, url: str = S3_URL) -> Iterator[StorageLocation]:
    """A server of 27 objects; `url` as in `scripted`."""
    with _served(type("Handler", (Listing,), {"kind": kind})) as endpoint:
        yield parse(f"{url}&endpoint={endpoint}")


@contextmanager
def scripted(*answers: tuple[int, str], url: str = S3_URL) -> Iterator[StorageLocation]:
    """A server whose first answer goes to our look whether it is there; `url` is that of the storage, without the endpoint."""
    with _served(type("Handler", (Script,), {"answers": list(answers)})) as endpoint:
        yield parse(f"{url}&endpoint={endpoint}")


@contextmanager
def _served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
