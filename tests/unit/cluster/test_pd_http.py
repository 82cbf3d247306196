"""PD's HTTP API against a scripted server and recorded documents."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.raw_calls import starts_of
from tests.unit.cluster.fakes import pd_http
from tests.unit.cluster.http_server import ScriptedHttp
from tikv_br.cluster.pd_http import REGION_PAGE, PdHttp
from tikv_br.errors import RequestRefused, RetryBudgetExhausted


@pytest.fixture
def server() -> Iterator[ScriptedHttp]:
    """PD's HTTP."""
    with ScriptedHttp() as scripted:
        yield scripted


@pytest.fixture
def pd(server: ScriptedHttp) -> PdHttp:
    """A client of it."""
    return pd_http(server)


@pytest.mark.parametrize("body", [b'"8.5.2"\n', b'"v8.5.2"'])
def test_the_version_loses_quotes_and_v(server: ScriptedHttp, pd: PdHttp, body: bytes) -> None:
    """The bare version is compared and shown."""
    server.scripts["/pd/api/v1/config/cluster-version"] = [(200, body)]
    assert pd.cluster_version() == "8.5.2"


def path_of(start: bytes, end: bytes = b"") -> str:
    """The request for the regions from a bound on."""
    quoted = ["".join(f"%{byte:02X}" for byte in bound) for bound in (start, end)]
    return f"/pd/api/v1/regions/key?key={quoted[0]}&end_key={quoted[1]}&limit={REGION_PAGE}"


def page(*regions: tuple[bytes, bytes, int | None]) -> list[tuple[int, bytes]]:
    """PD's answer with regions: start, end and size in MiB, if it has one."""
    peer = {"id": 3, "store_id": 1, "role_name": "Voter"}
    documents = [
        {
            "id": number,
            "start_key": start.hex().upper(),
            "end_key": end.hex().upper(),
            "epoch": {"conf_ver": 1, "version": 5},
            "peers": [peer],
            "leader": peer,
            **({} if size is None else {"approximate_size": size, "approximate_keys": 1000}),
        }
        for number, (start, end, size) in enumerate(regions)
    ]
    return [(200, json.dumps({"count": len(regions), "regions": documents}).encode())]


def test_regions_come_page_by_page_in_bytes(server: ScriptedHttp, pd: PdHttp) -> None:
    """The next page begins where the last ended, whatever bytes the bound has; PD says MiB, and 0 without an estimate."""
    server.scripts[path_of(b"")] = page((b"", b"\x80", 96), (b"\x80", b"\xff/&", None))
    server.scripts[path_of(b"\xff/&")] = page((b"\xff/&", b"", 1))
    found = pd.regions(b"", b"")
    assert starts_of(found) == [b"", b"\x80", b"\xff/&"]
    assert list(found.sizes) == [96 << 20, 0, 1 << 20]
    assert (len(found), found.total_bytes) == (3, 97 << 20)


def test_regions_end_with_the_range(server: ScriptedHttp, pd: PdHttp) -> None:
    """A page that reaches the end is the last, although the last region ends beyond."""
    server.scripts[path_of(b"\x81", b"\x90")] = page((b"\x80", b"\xa0", 7))
    assert starts_of(pd.regions(b"\x81", b"\x90")) == [b"\x80"]
    assert len(server.requests) == 1


def test_regions_that_pd_does_not_know_yet_are_left_out(server: ScriptedHttp, pd: PdHttp) -> None:
    """PD writes null for an empty list, as after the last region that its new leader has heard of."""
    server.scripts[path_of(b"")] = page((b"", b"\x80", 96))
    server.scripts[path_of(b"\x80")] = [(200, b'{"count": 0, "regions": null}')]
    assert starts_of(pd.regions(b"", b"")) == [b""]
    server.scripts[path_of(b"")] = [(200, b'{"count": 0, "regions": null}')]
    found = pd.regions(b"", b"")
    assert (len(found), found.total_bytes) == (0, 0)


def test_schedulers_are_paused_in_seconds(server: ScriptedHttp, pd: PdHttp) -> None:
    """The delay is a number of seconds; 0 resumes."""
    server.scripts["/pd/api/v1/schedulers"] = [(200, b'["balance-leader-scheduler"]')]
    server.scripts["/pd/api/v1/schedulers/balance-leader-scheduler"] = [(200, b'"ok"')]
    (name,) = pd.schedulers()
    pd.pause_scheduler(name, 300)
    pd.pause_scheduler(name, 0)
    path = "/pd/api/v1/schedulers/balance-leader-scheduler"
    assert server.requests[1:] == [("POST", path, b'{"delay": 300}'), ("POST", path, b'{"delay": 0}')]


def test_silent_stores_are_those_that_fell_silent(server: ScriptedHttp, pd: PdHttp) -> None:
    """A store without any heartbeat yet has just started, whatever PD calls it; gone ones are no news."""
    seen, never = "2026-11-21T10:34:40Z", "1970-01-01T00:00:00Z"
    states = [
        ("Up", seen),
        ("Disconnected", seen),
        ("Down", seen),
        ("Down", never),
        ("Offline", seen),
        ("Tombstone", seen),
    ]
    stores = [
        {"store": {"id": at, "state_name": state}, "status": {"last_heartbeat_ts": heartbeat}}
        for at, (state, heartbeat) in enumerate(states, 1)
    ]
    server.scripts["/pd/api/v1/stores"] = [(200, json.dumps({"count": 6, "stores": stores}).encode())]
    assert pd.silent_stores() == {2, 3}


def test_trouble_is_tried_again(server: ScriptedHttp, pd: PdHttp) -> None:
    """A 5xx, as before bootstrap, passes."""
    trouble = (500, b"ErrNotBootstrapped")
    server.scripts["/pd/api/v1/config/cluster-version"] = [trouble, (200, b'"8.5.2"')]
    assert pd.cluster_version() == "8.5.2"


def test_trouble_that_stays_ends_with_the_budget(server: ScriptedHttp, pd: PdHttp) -> None:
    """The message has PD's own words."""
    server.scripts["/pd/api/v1/config/cluster-version"] = [(503, b"no leader")]
    with pytest.raises(RetryBudgetExhausted, match="HTTP 503: no leader"):
        pd.cluster_version()


def test_a_refusal_is_final(server: ScriptedHttp, pd: PdHttp) -> None:
    """A 4xx is asked once."""
    with pytest.raises(RequestRefused, match="HTTP 404: not found"):
        pd.cluster_version()
    assert len(server.requests) == 1
