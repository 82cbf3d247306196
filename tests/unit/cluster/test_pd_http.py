"""PD's HTTP API against a scripted server and recorded documents."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.unit.cluster.fakes import pd_http
from tests.unit.cluster.http_server import ScriptedHttp
from tikv_br.cluster.pd_http import PdHttp, RegionSize
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
    """What is compared and shown is the bare version."""
    server.scripts["/pd/api/v1/config/cluster-version"] = [(200, body)]
    assert pd.cluster_version() == "8.5.2"


def test_region_sizes_are_bytes(server: ScriptedHttp, pd: PdHttp) -> None:
    """PD says MiB; a region without an estimate counts as 0."""
    peer = {"id": 3, "store_id": 1, "role_name": "Voter"}
    bounds = {"start_key": "", "end_key": "", "epoch": {"conf_ver": 1, "version": 5}, "peers": [peer], "leader": peer}
    regions = [{"id": 2, **bounds, "approximate_size": 96, "approximate_keys": 1000}, {"id": 4, **bounds}]
    server.scripts["/pd/api/v1/regions"] = [(200, json.dumps({"count": 2, "regions": regions}).encode())]
    assert pd.region_sizes() == {2: RegionSize(96 << 20, 1000), 4: RegionSize(0, 0)}


def test_no_regions_is_an_empty_answer(server: ScriptedHttp, pd: PdHttp) -> None:
    """PD writes null for an empty list."""
    server.scripts["/pd/api/v1/regions"] = [(200, b'{"count": 0, "regions": null}')]
    assert pd.region_sizes() == {}


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
