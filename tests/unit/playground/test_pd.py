"""PD's HTTP API, keyspaces and region sizes; recordings cover the plain reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tikv_br.errors import PlaygroundError
from tikv_br.playground.cluster import Playground, open_playground
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.pd_config import PdConfig
from tikv_br.playground.pd_http import PdHttpApi
from tikv_br.playground.pd_state import Keyspaces
from tikv_br.playground.region import RegionSizes
from tikv_br.playground.servers import Request


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    """Return a playground that serves nothing."""
    opened = open_playground(tmp_path, regions=4)
    yield opened
    opened.stop()


@pytest.fixture
def http(playground: Playground) -> PdHttpApi:
    """Return its HTTP API."""
    return PdHttpApi(playground.state, PdConfig(playground.engine, replicas=3, stores=3))


def ask(http: PdHttpApi, method: str, url: str, body: object = None) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    path, _, query = url.partition("?")
    reply = http.handle(Request(method, path, query, b"" if body is None else json.dumps(body).encode()))
    return reply.status, json.loads(reply.body)


def test_schedule_for_a_time(engine: RocksEngine) -> None:
    """Values set with a TTL hold until it ends or is set to 0; others for good, also after a restart."""
    now = [1000.0]
    config = PdConfig(engine, replicas=3, stores=3, clock=lambda: now[0])
    config.set_schedule({"leader-schedule-limit": 9}, ttl=300)
    config.set_schedule({"region-schedule-limit": 7})
    assert config.schedule()["leader-schedule-limit"] == 9
    now[0] += 301
    assert config.schedule()["leader-schedule-limit"] == 4
    config.set_schedule({"leader-schedule-limit": 9}, ttl=300)
    config.set_schedule({"leader-schedule-limit": 9}, ttl=0)
    assert config.schedule()["leader-schedule-limit"] == 4
    assert PdConfig(engine, replicas=3, stores=3).schedule()["region-schedule-limit"] == 7


def test_schedule_by_http(http: PdHttpApi) -> None:
    """The pause that backup tools ask for (ttlSecond) shows in the schedule; an unknown name is a bad request."""
    assert ask(http, "POST", "/pd/api/v1/config/schedule?ttlSecond=300", {"max-merge-region-size": 0})[0] == 200
    assert ask(http, "GET", "/pd/api/v1/config/schedule")[1]["max-merge-region-size"] == 0
    assert ask(http, "POST", "/pd/api/v1/config?ttlSecond=300", {"schedule.max-merge-region-keys": 0})[0] == 200
    assert ask(http, "GET", "/pd/api/v1/config/schedule")[1]["max-merge-region-keys"] == 0
    assert ask(http, "POST", "/pd/api/v1/config/schedule", {"no-such-item": 0})[0] == 400


def test_regions_by_key(http: PdHttpApi, playground: Playground) -> None:
    """Keys in a query are percent-encoded bytes; limit counts regions; stats are of the range."""
    bounds = [region.start.hex().upper() for region in playground.regions.all()]
    found = ask(http, "GET", "/pd/api/v1/regions/key?key=%80&limit=1")[1]
    assert [region["start_key"] for region in found["regions"]] == ["80"]
    assert ask(http, "GET", "/pd/api/v1/stats/region?start_key=%40&end_key=%C0")[1]["count"] == 2
    assert [region["start_key"] for region in ask(http, "GET", "/pd/api/v1/regions")[1]["regions"]] == bounds


def test_keyspaces(http: PdHttpApi, engine: RocksEngine) -> None:
    """DEFAULT is 0, others get ids in turn, a taken name is refused, and all are there after a restart."""
    created = ask(http, "POST", "/pd/api/v2/keyspaces", {"name": "one"})[1]
    assert created["id"] == 1
    assert ask(http, "POST", "/pd/api/v2/keyspaces", {"name": "one"})[0] == 400
    assert [each["name"] for each in ask(http, "GET", "/pd/api/v2/keyspaces")[1]["keyspaces"]] == ["DEFAULT", "one"]
    keyspaces = Keyspaces(engine)
    keyspaces.create("two")
    again = Keyspaces(engine).load("two")
    assert again is not None
    assert again.id == 1
    with pytest.raises(PlaygroundError, match="exists"):
        keyspaces.create("DEFAULT")


def test_pre_split_is_even(playground: Playground) -> None:
    """--regions 4 cuts the users' keys by their first byte into quarters before any data come."""
    assert [region.start for region in playground.regions.all()] == [b"", b"\x40", b"\x80", b"\xc0"]


def test_sizes_are_counted_again_when_it_pays(playground: Playground) -> None:
    """A region's size is exact when first asked for, then again after an eighth was written, after a split, or on demand."""
    sizes = RegionSizes(playground.engine)
    region = playground.regions.all()[1]
    rows = [(b"z\x50%03d" % number, bytes(95)) for number in range(100)]
    playground.engine.write(rows)
    assert (sizes.of(region).rows, sizes.of(region).size) == (100, 10_000)
    playground.engine.write([(b"z\x50x", bytes(97))])
    sizes.written(region.id, 100)
    assert sizes.of(region).rows == 100
    assert sizes.at_most(region) == 10_100
    sizes.written(region.id, 2000)
    assert sizes.of(region).rows == 101
    left, right = playground.regions.split(region.id, [b"\x50050"])
    assert (sizes.of(left).rows, sizes.of(right).rows) == (50, 51)
    playground.engine.delete_range(b"", b"")
    sizes.forget(left.id)
    assert sizes.of(left).rows == 0
