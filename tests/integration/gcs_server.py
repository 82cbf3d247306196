"""Google Cloud Storage for tests: fake-gcs-server keeps the objects, behind a translator from the XML API to its JSON API.

obstore speaks the XML API, with which Google's servers can do all of this. fake-gcs-server v1.56.1 has of it only reads: a PUT is
"invalid uploadType", ``POST ?uploads`` is 405, and no option changes that (its issues 331 and 852 ask for it). Its JSON API has conditional writes (``ifGenerationMatch=0`` answers 412), and those
decide here. Uploads of parts are put together by the translator.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import secrets
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.integration.s3_servers import await_port
from tests.support.ports import reserved_ports
from tests.support.tools import find_tool
from tikv_br.storage.url import StorageLocation, parse

BUCKET = "backups"


@dataclass(frozen=True)
class GcsServer:
    """A running server with `BUCKET` in it."""

    endpoint: str
    """Endpoint of the XML API."""
    json_port: int
    """Port of fake-gcs-server, for an independent view of the storage."""
    credentials: Path
    """A key file whose tokens need no service of Google."""
    classes: dict[str, str]
    """The storage class that was asked for, by the names of objects in the bucket."""
    uploads: dict[str, dict[int, bytes]]
    """Parts of unfinished uploads by their ids, also after a restart in the same folder."""

    def url(self, prefix: str = "", bucket: str = BUCKET, **parameters: str) -> str:
        """A ``gcs://`` URL with endpoint and credentials, some replaced by ``parameters``."""
        said = {"endpoint": self.endpoint, "credentials-file": str(self.credentials)} | {
            name.replace("_", "-"): value for name, value in parameters.items()
        }
        return f"gcs://{bucket}/{prefix}?" + "&".join(f"{name}={value}" for name, value in said.items() if value)

    def location(self, prefix: str = "", bucket: str = BUCKET, **parameters: str) -> StorageLocation:
        """`url`, parsed."""
        return parse(self.url(prefix, bucket, **parameters))

    def stored(self, prefix: str) -> dict[str, bytes]:
        """Objects of fake-gcs-server below a prefix."""
        listed = json.loads(call(self.json_port, "GET", f"/storage/v1/b/{BUCKET}/o?prefix={quote(prefix)}").body)
        names = [item["name"] for item in listed.get("items", [])]
        return {name: call(self.json_port, "GET", f"{path_of(BUCKET, name)}?alt=media").body for name in names}


@dataclass(frozen=True)
class Answer:
    """Answer of fake-gcs-server."""

    status: int
    headers: dict[str, str]
    body: bytes


def call(port: int, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
    """A request to fake-gcs-server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, target, body, headers or {})
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def path_of(bucket: str, name: str) -> str:
    """An object in the JSON API."""
    return f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}"


class Translator(BaseHTTPRequestHandler):
    """Each request of the XML API as one or two of the JSON API."""

    protocol_version = "HTTP/1.1"
    port: ClassVar[int]
    uploads: ClassVar[dict[str, dict[int, bytes]]]
    classes: ClassVar[dict[str, str]]

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, name = parts.path.lstrip("/").partition("/")
        name, query = unquote(name), dict(parse_qsl(parts.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not name:
            self._list(bucket, query)
        elif self.command in {"GET", "HEAD"}:
            self._read(bucket, name)
        elif self.command == "DELETE":
            self._delete(bucket, name, query)
        elif "uploads" in query:
            upload = secrets.token_hex(8)
            self.uploads[upload] = {}
            self._note_class(name)
            self._answer(
                200, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            )
        elif "partNumber" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self._answer(200, ETag=f'"{query["partNumber"]}"')
        elif "uploadId" in query:
            pieces = self.uploads.pop(query["uploadId"])
            self._write(bucket, name, b"".join(pieces[number] for number in sorted(pieces)))
        else:
            self._note_class(name)
            self._write(bucket, name, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815  # names that http.server wants

    def _note_class(self, name: str) -> None:
        if wanted := self.headers.get("x-goog-storage-class"):
            self.classes[name] = wanted

    def _write(self, bucket: str, name: str, data: bytes) -> None:
        target = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        if (generation := self.headers.get("x-goog-if-generation-match")) is not None:
            target += f"&ifGenerationMatch={generation}"
        answer = call(self.port, "POST", target, data)
        if answer.status != 200:
            self._fail(bucket, answer.status)
            return
        mark = mark_of(json.loads(answer.body))
        text = f"<CompleteMultipartUploadResult><ETag>{escape(mark)}</ETag></CompleteMultipartUploadResult>"
        self._answer(200, text, ETag=mark)

    def _read(self, bucket: str, name: str) -> None:
        found = call(self.port, "GET", path_of(bucket, name))
        if found.status != 200:
            self._fail(bucket, found.status)
            return
        wanted = {"Range": self.headers["Range"]} if "Range" in self.headers else {}
        data = call(self.port, "GET", f"{path_of(bucket, name)}?alt=media", headers=wanted)
        meta = json.loads(found.body)
        more = {"Content-Range": data.headers["content-range"]} if "content-range" in data.headers else {}
        modified = email.utils.format_datetime(datetime.fromisoformat(meta["updated"]), usegmt=False)
        modified = email.utils.formatdate(email.utils.parsedate_to_datetime(modified).timestamp(), usegmt=True)
        self._answer(data.status, data.body, ETag=mark_of(meta), **{"Last-Modified": modified, **more})

    def _delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        if "uploadId" in query:
            self.uploads.pop(query["uploadId"], None)
            self._answer(204)
            return
        answer = call(self.port, "DELETE", path_of(bucket, name))
        if answer.status in {200, 204}:
            self._answer(204)
        else:
            self._fail(bucket, answer.status)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        answer = call(self.port, "GET", f"/storage/v1/b/{bucket}/o?prefix={quote(query.get('prefix', ''), safe='')}")
        if answer.status != 200:
            self._fail(bucket, answer.status)
            return
        items = [
            item for item in json.loads(answer.body).get("items", []) if item["name"] > query.get("start-after", "")
        ]
        listed = "".join(
            f"<Contents><Key>{escape(item['name'])}</Key><LastModified>{item['updated']}</LastModified>"
            f"<ETag>{escape(mark_of(item))}</ETag><Size>{item['size']}</Size></Contents>"
            for item in items
        )
        self._answer(200, f"<ListBucketResult>{listed}</ListBucketResult>")

    def _fail(self, bucket: str, status: int) -> None:
        code = {404: "NoSuchKey", 412: "PreconditionFailed"}.get(status, "InternalError")
        if status == 404 and call(self.port, "GET", f"/storage/v1/b/{bucket}").status == 404:
            code = "NoSuchBucket"
        self._answer(status, f"<Error><Code>{code}</Code><Message>said fake-gcs-server</Message></Error>")

    def _answer(self, status: int, body: str | bytes = b"", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        """Keep silent."""


def mark_of(item: dict[str, Any]) -> str:
    """The ETag of an object, in quotes."""
    return f'"{item["etag"].strip(chr(34))}"'


_uploads: dict[Path, dict[str, dict[int, bytes]]] = {}


class Front(ThreadingHTTPServer):
    """The server of the translator: when it is closed, so are its connections, as of a process that was killed."""

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep silent of connections that break off."""


@contextmanager
def gcs_server(folder: Path, *, port: int = 0, on_disk: bool = False) -> Iterator[GcsServer]:
    """Run fake-gcs-server in memory, or in the folder, where it can be started again; and the translator in a thread."""
    program = find_tool(
        "fake-gcs-server",
        hint="run scripts/install_fake_gcs_server.sh, or set FAKE_GCS_SERVER",
        variable="FAKE_GCS_SERVER",
    )
    with reserved_ports(1) as [inner]:
        arguments = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(inner)]
        backend = ["-backend", "filesystem", "-filesystem-root", str(folder / "objects")]
        arguments += backend if on_disk else ["-backend", "memory"]
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            await_port(inner, process)
            if call(inner, "GET", f"/storage/v1/b/{BUCKET}").status != 200:
                made = json.dumps({"name": BUCKET}).encode()
                assert call(inner, "POST", "/storage/v1/b?project=tests", made).status == 200
            classes: dict[str, str] = {}
            uploads = _uploads.setdefault(folder, {})
            handler = type("Handler", (Translator,), {"port": inner, "classes": classes, "uploads": uploads})
            with Front(port, handler) as front:
                endpoint = f"http://127.0.0.1:{front.server_port}"
                credentials = folder / "key.json"
                key = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
                credentials.write_text(json.dumps({**key, "gcs_base_url": endpoint, "disable_oauth": True}))
                yield GcsServer(endpoint, inner, credentials, classes, uploads)
        finally:
            process.kill()
            process.wait()
