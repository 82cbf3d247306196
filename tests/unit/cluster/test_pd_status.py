"""Parsing of PD's HTTP documents; the documents are those of PD 8.5, shortened."""

from __future__ import annotations

import json

import pytest

from tests.unit.cluster.fakes import pd_http
from tests.unit.cluster.http_server import ScriptedHttp
from tikv_br.cluster.pd_http import (
    GcStatus,
    ServiceSafePoint,
    StoreStatus,
    free_space,
    gc_status,
    member_health,
    merges_regions,
    parse_size,
    store_statuses,
)
from tikv_br.errors import RequestRefused

API = "/pd/api/v1"


def answer(server: ScriptedHttp, path: str, document: object) -> None:
    """Script one path."""
    server.scripts[API + path] = [(200, json.dumps(document).encode())]


def test_stores_with_their_disks() -> None:
    """Sizes with units become bytes, versions lose their v, TiFlash is known by its label."""
    tikv = {"id": 1, "address": "a:20160", "version": "v8.5.2", "state_name": "Up"}
    flash = {**tikv, "id": 2, "state_name": "Down", "labels": [{"key": "engine", "value": "tiflash"}]}
    status = {"capacity": "1.5TiB", "available": "512GiB"}
    with ScriptedHttp() as server:
        answer(server, "/stores", {"count": 2, "stores": [{"store": tikv, "status": status}, {"store": flash}]})
        assert store_statuses(pd_http(server)) == [
            StoreStatus(1, "a:20160", "8.5.2", "Up", 3 << 39, 1 << 39, is_tiflash=False),
            StoreStatus(2, "a:20160", "8.5.2", "Down", 0, 0, is_tiflash=True),
        ]
        assert [free_space(pd_http(server), store_id) for store_id in (1, 2, 3)] == [
            " (524,288 of 1,572,864 MiB free by PD's last figures)",
            "",
            "",
        ]


def test_members_gc_and_merging() -> None:
    """Each document's fields; GC's own entry is none of the services."""
    points = [
        {"service_id": "gc_worker", "safe_point": 5, "expired_at": (1 << 63) - 1},
        {"service_id": "backup", "safe_point": 7, "expired_at": 99},
    ]
    with ScriptedHttp() as server:
        answer(server, "/health", [{"name": "pd1", "health": True}, {"name": "pd2"}])
        answer(server, "/gc/safepoint", {"service_gc_safe_points": points, "gc_safe_point": 3})
        answer(server, "/config/schedule", {"max-merge-region-size": 0})
        pd = pd_http(server)
        assert member_health(pd) == {"pd1": True, "pd2": False}
        gc = gc_status(pd)
        assert gc == GcStatus(3, (ServiceSafePoint("backup", 7, 99),), worker=5)
        assert (gc.refuses_below(98), GcStatus(6, gc.services, 8).refuses_below(98)) == (5, 7)
        assert GcStatus(6, gc.services, 8).refuses_below(99) == 8
        assert not merges_regions(pd)


@pytest.mark.parametrize(
    ("text", "size"), [("0B", 0), ("12", 12), ("1KiB", 1024), ("98.25GiB", 105495134208), ("2PiB", 2 << 50)]
)
def test_sizes(text: str, size: int) -> None:
    """As PD writes them."""
    assert parse_size(text) == size


def test_invalid_sizes_are_refused() -> None:
    """A change of PD's format is no empty disk."""
    with pytest.raises(RequestRefused, match="lots"):
        parse_size("lots")
