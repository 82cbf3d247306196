from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE, eventually
from tests.unit.incremental.statuses import WHOLE, status
from tikv_br.errors import UsageError
from tikv_br.incremental.watch.server import serve
from tikv_br.incremental.watch.status import NamedStatus
from tikv_br.storage.crypter import SecretText
from tikv_br.web import server as web
from tikv_br.web.address import Address
from tikv_br.web.status import NO_KEY

GOOD = NamedStatus("a", status(feed=WHOLE))
GAPS = "parts of the range without a subscription: 1; regions whose incremental scan has not ended: 2"


class Client:
    """A client of a server that reports the syncs in `found`."""

    def __init__(self, address: Address, found: list[NamedStatus]) -> None:
        self.address, self.found = address, found

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        """Code, headers and body of an answer."""
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read().decode()
        finally:
            connection.close()

    def json(self, path: str) -> Any:  # noqa: ANN401 - any JSON
        """The body of an answer that must be one."""
        code, headers, body = self.get(path)
        assert (code, headers["Content-Type"]) == (200, "application/json")
        return json.loads(body)


@contextmanager
def serving(host: str = "127.0.0.1", key: SecretText = NO_KEY) -> Iterator[Client]:
    """A server on a free port."""
    found = [GOOD]
    with serve(Address(host, 0), lambda: found, key=key) as address:
        yield Client(address, found)


@pytest.fixture
def client() -> Iterator[Client]:
    """See `serving`."""
    with serving() as client:
        yield client


def test_status_is_exact(client: Client) -> None:
    """The JSON contains every figure, 64-bit timestamps included, and why a sync is unhealthy."""
    ends = {"source": "10.0.0.1:2379", "sink": "tikv://10.2.0.1:2379"}
    client.found[:] = [replace(GOOD, source=ends["source"], sink=ends["sink"]), NamedStatus("b", None)]
    answer = client.json("/status")
    assert answer["syncs"] == [
        {
            "name": "a",
            **ends,
            "trouble": "",
            "degraded": "",
            "status": json.loads(json.dumps(asdict(status(feed=WHOLE)))),
        },
        {"name": "b", "source": "", "sink": "", "trouble": "has not started yet", "degraded": "", "status": None},
    ]
    assert (answer["healthy"], answer["degraded"], answer["max_lag"]) == (False, False, 300.0)


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([], 200, "ok"),
        ([GOOD, GOOD], 200, "ok"),
        ([GOOD, NamedStatus("d", status())], 200, f"degraded\nd: {GAPS}"),
        (
            [NamedStatus("d", status(feed=WHOLE, pd_silent_seconds=10.2)), GOOD],
            200,
            "degraded\nd: the source's PD has not answered for 10 s",
        ),
        ([NamedStatus("d", status(feed=WHOLE, pd_silent_seconds=9.9))], 200, "ok"),
        (
            [NamedStatus("d", status(feed=replace(WHOLE, stalled=4, failing_seconds=6.0, last_error="no")))],
            200,
            "degraded\nd: regions without a new resolved-ts for 10 s: 4; part of the source has had no subscription for 6 s: no",
        ),
        (
            [NamedStatus("d", status(feed=replace(WHOLE, waits_for="restore raw (0123)")))],
            200,
            "degraded\nd: waits for restore raw (0123)",
        ),
        (
            [NamedStatus("d", status(feed=WHOLE, missed=("restore raw (0123), ended at 12:00",)))],
            503,
            "d: degraded: the sink lacks rows that no change feed delivers: restore raw (0123), ended at 12:00",
        ),
        ([NamedStatus("b", None)], 503, "b: has not started yet"),
        ([NamedStatus("b", None, waiting="for the sink")], 503, "b: for the sink"),
        ([GOOD, NamedStatus("b", status(checkpoint_lag=300.5))], 503, "b: 300 s behind, which is more than 300 s"),
        (
            [NamedStatus("c", status(sink_failing_seconds=12.3))],
            503,
            "c: the sink has accepted no writes for 12 s: store 4 went away",
        ),
        ([NamedStatus("c", status(), error="the safe point is lost")], 503, "c: the safe point is lost"),
    ],
)
def test_health(client: Client, found: list[NamedStatus], code: int, said: str) -> None:
    """200 if all syncs run within the lag limit, with a line for each degraded one; else 503 with a line for each unhealthy one."""
    client.found[:] = found
    assert client.get("/healthz")[::2] == (code, said + "\n")


def test_figures_require_the_key() -> None:
    """Without the key, or with a wrong one: 401. The health status needs no key, but contains no names or reasons."""
    with serving(key=SecretText("a-key-of-the-test")) as client:
        client.found.append(NamedStatus("b", None))
        for headers in ({}, {"Authorization": "Bearer a-key-of-the-tes"}, {"Authorization": "Basic a-key-of-the-test"}):
            for path in ("/", "/status", "/metrics", "/nowhere"):
                code, answered, body = client.get(path, **headers)
                assert (code, answered["WWW-Authenticate"]) == (401, 'Bearer realm="tikv-br"')
                assert "a-key" not in body
        assert client.get("/healthz")[::2] == (503, "unhealthy\n")
        known = {"Authorization": "Bearer a-key-of-the-test"}
        assert client.get("/healthz", **known)[::2] == (503, "b: has not started yet\n")
        assert [client.get(path, **known)[0] for path in ("/status", "/metrics", "/", "/nowhere")] == [200] * 2 + [
            404
        ] * 2


def test_an_invalid_version_of_the_text_format_is_a_bad_request(client: Client) -> None:
    """400 with the reason."""
    assert client.get("/metrics", Accept="text/plain; version=1.x")[::2] == (
        400,
        "the header Accept asks for an unsupported version of the text format\n",
    )
    assert client.get("/metrics", Accept="text/plain; version=1.0.0")[0] == 200


def test_unknown_paths_and_methods(client: Client) -> None:
    """Unknown paths are 404, methods that write are 405, large bodies 413; HEAD has the headers of GET and no body."""
    assert client.get("/secret")[0] == 404
    assert client.get("/../server.py")[0] == 404
    for method in ("POST", "PUT", "DELETE", "NONSENSE"):
        code, headers, _ = client.get("/status", method)
        assert (code, headers["Allow"]) == (405, "GET, HEAD")
    for length in ("5000", "-1", "9" * 5000):
        assert client.get("/status", "GET", **{"Content-Length": length})[0] == 413
    code, headers, body = client.get("/metrics", "HEAD")
    assert (code, body) == (200, "")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_idle_connections_do_not_block() -> None:
    """A connection without a request blocks neither other clients nor the end of the server."""
    with ExitStack() as stack:
        with serving() as client:
            stack.enter_context(socket.create_connection((client.address.host, client.address.port)))
            assert client.get("/healthz")[0] == 200
        with pytest.raises(ConnectionError):
            client.get("/healthz")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("8300", "127.0.0.1", 8300),
        (":8300", "127.0.0.1", 8300),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("[::1]:8300", "::1", 8300),
        ("db-1.example:80", "db-1.example", 80),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    """The default host is loopback; IPv6 addresses are in brackets."""
    assert Address.parse(text) == Address(host, port)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("0.0.0.0:8300", socket.gethostname()),
        ("[::]:8300", socket.gethostname()),
        ("127.0.0.1:8300", "127.0.0.1"),
        ("[::1]:8300", "::1"),
        ("db-1.example:8300", "db-1.example"),
    ],
)
def test_reachable_address(text: str, host: str) -> None:
    """0.0.0.0 and :: are replaced by the host name: other machines cannot connect to them."""
    assert Address.parse(text).reachable == Address(host, 8300)


@pytest.mark.parametrize("text", ["", "host", "host:", "1.2.3.4:65536", "host:-1", "host:²", "host:http"])
def test_invalid_addresses_are_refused(text: str) -> None:
    """The port is missing or invalid."""
    with pytest.raises(UsageError, match="--status-addr"):
        Address.parse(text)


def test_an_address_in_use_is_refused(client: Client) -> None:
    """A second server on the same address is refused with the reason, and leaves no thread."""
    before = threading.active_count()
    with pytest.raises(UsageError, match="in use"), serve(client.address, list):
        pass
    assert threading.active_count() <= before


def test_ipv6() -> None:
    """It serves on ::1 if the machine has it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with serving("::1") as client:
        assert str(client.address) == f"[::1]:{client.address.port}"
        assert client.get("/healthz")[0] == 200


def test_slow_clients_block_nobody_and_time_out(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that stop within a request, or send a byte now and then, are disconnected at the deadline; others are served meanwhile."""
    monkeypatch.setattr(web, "REQUEST_TIMEOUT", 2.0)
    address = (client.address.host, client.address.port)
    with ExitStack() as stack:
        slow = []
        for _ in range(web.MAX_CONNECTIONS - 2):  # the time of each runs from its connection
            slow.append(stack.enter_context(socket.create_connection(address, timeout=60)))
            slow[-1].sendall(b"GET /healthz HT")
        assert client.get("/healthz")[0] == 200
        dripping = stack.enter_context(socket.create_connection(address, timeout=60))
        dripping.sendall(b"GET /healthz HTTP/1.0\r\nX: ")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + PATIENCE:
                dripping.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() < began + PATIENCE
        assert {each.recv(1) for each in slow} == {b""}


def test_connections_are_bounded(client: Client) -> None:
    """However many connect, the process keeps its files: those beyond the limit get 503, and the server is there afterwards."""
    address = (client.address.host, client.address.port)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(address, timeout=60))
        eventually(lambda: code_of(client) == 503)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 200 + web.MAX_CONNECTIONS + 2
    eventually(lambda: code_of(client) == 200)


def code_of(client: Client) -> int:
    """The code of an answer; 0 without one, as from a client that was refused before it had sent its request."""
    try:
        return client.get("/healthz")[0]
    except (ConnectionError, http.client.HTTPException):
        return 0


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("{address}", 200),
        ("localhost:1", 200),
        ("10.1.2.3:8300", 200),
        ("[fd00::1]:8300", 200),
        (socket.gethostname(), 200),
        ("rebound.example", 403),
        ("rebound.example:8300", 403),
        ("127.0.0.1.example", 403),
        ("localhost.example", 403),
        ("127.0.0.1@rebound.example", 403),
        ("", 403),
    ],
)
def test_without_a_key_only_names_of_this_server_are_answered(host: str, code: int, client: Client) -> None:
    """A web site whose name is made to lead here sends that name. With a key it could not pass anyway."""
    host = host.format(address=client.address)
    for path in ("/status", "/metrics", "/healthz"):
        assert client.get(path, Host=host)[0] == code
    with serving(key=SecretText("k" * 16)) as keyed:
        headers = {"Host": host or "x", "Authorization": f"Bearer {'k' * 16}"}
        assert keyed.get("/status", **headers)[0] == 200
