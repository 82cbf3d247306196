"""The wording of obstore's errors, which `failure_of` reads: a release with another one fails here, before it reaches an operator.

Certificates: `test_s3_tls`. Credentials: `test_azure` and `test_gcs`. Batches of deletions: `test_azure`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.support.ports import reserved_ports
from tikv_br.storage.request_failure import RequestFailure, failure_of

pytestmark = pytest.mark.core

OBJECT = b'Last-Modified: Sat, 21 Nov 2026 10:00:00 GMT\r\nETag: "x"\r\n'
REFUSAL = b"<Error><Code>%s</Code><Message>a message</Message><Region>eu</Region></Error>"


def answer(status: int, body: bytes = b"", headers: bytes = b"", length: int | None = None) -> bytes:
    """An HTTP response; ``length``: the one that it claims to have."""
    size = len(body) if length is None else length
    return b"HTTP/1.1 %d X\r\n%sContent-Length: %d\r\n\r\n%s" % (status, headers, size, body)


@contextmanager
def answering(data: bytes | None) -> Iterator[str]:
    """The endpoint of a server that answers every request with these bytes and closes; None = it is silent."""
    stop = threading.Event()

    def talk(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(10)
            connection.recv(65536)  # the whole request, as it has no body
            if data is None:
                stop.wait(10)
            else:
                connection.sendall(data)

    def listen() -> None:
        while not stop.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            stop.set()
            server.shutdown(socket.SHUT_RDWR)


def failure(endpoint: str, request: Callable[[S3Store], object]) -> RequestFailure:
    """Result of `failure_of` for a request without retries."""
    store = S3Store(
        "bucket",
        endpoint=endpoint,
        access_key_id="a",
        secret_access_key="b",
        region="r",
        client_options={"allow_http": True, "timeout": timedelta(seconds=1)},
        retry_config={"max_retries": 0},
    )
    with pytest.raises((BaseError, FileNotFoundError, FileExistsError, PermissionError)) as caught:
        request(store)
    return failure_of(caught.value)


def read(store: S3Store) -> object:
    """Read the object."""
    return obstore.get(store, "object").bytes()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 412, 429, 500, 501, 503, 507])
def test_status_and_codes_of_answers_are_read(status: int) -> None:
    """Refusals of a server differ by status, code, message and region."""
    with answering(answer(status, REFUSAL % b"TheCode")) as endpoint:
        found = failure(endpoint, read)
    assert (found.status, found.code, found.message, found.region) == (status, "TheCode", "a message", "eu")
    assert found.answered
    assert found.is_transient == (status in {429, 500, 503})


def test_a_redirect_without_a_place_is_one_to_another_region() -> None:
    """S3 answers so where the region is wrong."""
    with answering(answer(301)) as endpoint:
        assert failure(endpoint, read).status == 301


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "Request"),
        (answer(200, b"abc", OBJECT, length=100), "Interrupted"),
        (None, "Timeout"),
    ],
)
def test_broken_connections_may_be_tried_again(data: bytes | None, kind: str) -> None:
    """A connection that ends or is silent says nothing of the object: the request is repeated."""
    with answering(data) as endpoint:
        found = failure(endpoint, read)
    assert (found.status, found.broken, found.is_transient, found.had_no_effect) == (0, kind, True, False)


@pytest.mark.parametrize(
    ("scheme", "cause"), [("http", "Connection refused"), ("https", "InvalidContentType"), ("name", "dns error")]
)
def test_an_unsent_request_had_no_effect(scheme: str, cause: str) -> None:
    """Nobody listens, no TLS, no such host: transient, and safe to repeat."""
    with answering(answer(400)) as listening, reserved_ports(1) as [port]:
        plain, tls = f"http://127.0.0.1:{port}", listening.replace("http", "https")
        found = failure({"http": plain, "https": tls, "name": "http://nowhere.invalid"}[scheme], read)
    assert (found.broken, found.is_transient, found.had_no_effect) == ("Connect", True, True)
    assert cause in found.cause


def test_a_range_behind_the_end_is_a_refused_range() -> None:
    """Servers answer 416, or with the whole object."""
    with answering(answer(416)) as endpoint:
        assert failure(endpoint, lambda store: obstore.get_range(store, "object", start=9, length=5)).status == 416
