from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import pytest

from incremental.watch.address import Address
from incremental.watch.named import NamedStatus
from incremental.watch.server import MOST_CLIENTS, NO_KEY, serve
from tests.unit.incremental.statuses import status
from tests.waiting import eventually
from tikv_br.errors import UsageError
from tikv_br.storage.secret import SecretText

GOOD = NamedStatus("a", status())


class Client:
    """Asks a server that tells of the syncs in a list."""

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


def test_status_holds_every_figure_to_the_last_bit(client: Client) -> None:
    """The JSON is what the syncs said, 64-bit timestamps included, and what is wrong with each."""
    client.found.append(NamedStatus("b", None))
    told = client.json("/status")
    assert told["syncs"] == [
        {"name": "a", "trouble": "", "status": asdict(status())},
        {"name": "b", "trouble": "has not begun yet", "status": None},
    ]
    assert (told["healthy"], told["max_lag"]) == (False, 300.0)


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([], 200, "ok"),
        ([GOOD, GOOD], 200, "ok"),
        ([NamedStatus("b", None)], 503, "b: has not begun yet"),
        ([GOOD, NamedStatus("b", status(checkpoint_lag=300.5))], 503, "b: 300 s behind, which is more than 300 s"),
        (
            [NamedStatus("c", status(sink_failing_seconds=12.3))],
            503,
            "c: the sink has taken nothing for 12 s: store 4 went away",
        ),
        ([NamedStatus("c", status(), error="the safe point is lost")], 503, "c: the safe point is lost"),
    ],
)
def test_health(client: Client, found: list[NamedStatus], code: int, said: str) -> None:
    """200 while all run and are near enough; 503 and one line for each that is not."""
    client.found[:] = found
    assert client.get("/healthz")[::2] == (code, said + "\n")


def test_figures_are_for_those_who_know_the_key() -> None:
    """Without it, or with another one, 401; the page and whether all is well are for everyone, without names or reasons."""
    with serving(key=SecretText("a-key-of-the-test")) as client:
        client.found.append(NamedStatus("b", None))
        for headers in ({}, {"Authorization": "Bearer a-key-of-the-tes"}, {"Authorization": "Basic a-key-of-the-test"}):
            for path in ("/status", "/history", "/metrics", "/nowhere"):
                code, answered, body = client.get(path, **headers)
                assert (code, answered["WWW-Authenticate"]) == (401, 'Bearer realm="tikv-br"')
                assert "a-key" not in body
        assert client.get("/")[0] == 200
        assert client.get("/healthz")[::2] == (503, "not well\n")
        known = {"Authorization": "Bearer a-key-of-the-test"}
        assert client.get("/healthz", **known)[::2] == (503, "b: has not begun yet\n")
        assert [client.get(path, **known)[0] for path in ("/status", "/history", "/metrics", "/nowhere")] == [
            200
        ] * 3 + [404]


def test_history_begins_where_it_is_asked_to(client: Client) -> None:
    """Columns of equal length; after the last point known there is nothing."""
    until = threading.Event()
    while not (columns := client.json("/history")["a"])["ms"]:
        until.wait(0.1)
    assert {len(values) for values in columns.values()} == {len(columns["ms"])}
    assert set(columns) == {"ms", "checkpoint_lag", "resolved_lag", "events_per_second", "written_per_second"}
    assert columns["ms"][0] not in client.json(f"/history?since={columns['ms'][0]}")["a"]["ms"]


@pytest.mark.parametrize("since", ["never", "-1", "%D9%A1", "9" * 20, "9" * 5000])
def test_nonsense_is_answered_as_such(client: Client, since: str) -> None:
    """A time that is none, however long, and a version of the text format that is none: 400, and what is wrong."""
    code, _headers, body = client.get(f"/history?since={since}")
    assert (code, body) == (400, "since= takes milliseconds since the epoch\n")
    assert client.get("/metrics", Accept="text/plain; version=1.x")[::2] == (
        400,
        "the header Accept asks for no version that there is\n",
    )
    assert client.get("/metrics", Accept="text/plain; version=1.0.0")[0] == 200


def test_only_what_is_there_is_answered(client: Client) -> None:
    """Unknown paths are 404, methods that write 501; HEAD has the headers of GET and no body."""
    assert client.get("/secret")[0] == 404
    assert client.get("/../server.py")[0] == 404
    assert client.get("/status", "POST")[0] == 501
    code, headers, body = client.get("/metrics", "HEAD")
    assert (code, body) == (200, "")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_the_page_may_load_nothing_else(client: Client) -> None:
    """The policy forbids all but inline code and our own answers, and the page names no other address."""
    code, headers, body = client.get("/")
    assert code == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "connect-src 'self'" in policy
    assert "http" not in policy
    assert body.count("http") == body.count("http://www.w3.org/2000/svg") == 1  # a name, never fetched
    assert not {"src=", "@import", "url("} & set(body.split())


def test_clients_that_say_nothing_hold_up_no_one() -> None:
    """An open connection without a request keeps neither others from being answered nor the server from ending."""
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
    """Without a host it is loopback; brackets hold an IPv6 address."""
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
def test_what_others_call_an_address(text: str, host: str) -> None:
    """That of all addresses is the machine's name: nobody could reach 0.0.0.0."""
    assert Address.parse(text).reachable == Address(host, 8300)


@pytest.mark.parametrize("text", ["", "host", "host:", "1.2.3.4:65536", "host:-1", "host:²", "host:http"])
def test_what_is_no_address(text: str) -> None:
    """A port must be there, and be one."""
    with pytest.raises(UsageError, match="--status-addr"):
        Address.parse(text)


def test_an_address_in_use_is_said(client: Client) -> None:
    """A second server at the same place is refused with the reason, and leaves no thread behind."""
    before = threading.active_count()
    with pytest.raises(UsageError, match="in use"), serve(client.address, list):
        pass
    assert threading.active_count() <= before


def test_ipv6() -> None:
    """It serves on ::1 where the machine has it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with serving("::1") as client:
        assert str(client.address) == f"[::1]:{client.address.port}"
        assert client.get("/healthz")[0] == 200


def test_slow_clients_take_no_more_than_their_places(client: Client) -> None:
    """Whoever sends half a request keeps one place; who comes on top is sent away, until one of them has gone."""
    address = (client.address.host, client.address.port)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(MOST_CLIENTS)]
        for each in slow:
            each.sendall(b"GET /healthz HT")
        with socket.create_connection(address, timeout=60) as late:
            assert late.recv(1) == b""

    def answers() -> bool:
        try:
            return client.get("/healthz")[0] == 200
        except (http.client.RemoteDisconnected, ConnectionResetError):
            return False

    eventually(answers, 60)
