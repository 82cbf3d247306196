from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import grpc
import pytest

from tests.unit.playground.grpc_context import Aborted, context
from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground.failpoints import FOREVER, FailpointTable

BUSY = {"region_error": {"message": "busy", "server_is_busy": {"reason": "r", "backoff_ms": 7}}}


def meet(table: FailpointTable, rpc: str = "RawScan", store_id: int = 1, region_id: int = 16) -> str:
    """Effect on a call: the region error's message, the status, or none."""
    try:
        error = table.intercept(rpc, store_id=store_id, region_id=region_id, context=context())
    except Aborted as end:
        return str(end)
    return "" if error is None else error.message


def test_strikes_the_next_calls_and_no_more() -> None:
    """After ``skip`` calls the next ``count`` are struck, then none; the hits are counted."""
    table = FailpointTable()
    failpoint = table.add({"rpc": "rawscan", "count": 2, "skip": 1, "action": BUSY})
    assert [meet(table) for _ in range(5)] == ["", "busy", "busy", "", ""]
    assert failpoint.hits == 2
    assert failpoint.to_json() | {"action": None} == {
        "rpc": "rawscan", "count": 0, "skip": 0, "hits": 2, "id": failpoint.id, "action": None,
    }  # fmt: skip


def test_strikes_until_removed() -> None:
    """Count -1 never runs out; removing one leaves the other, clearing leaves none."""
    table = FailpointTable()
    first = table.add({"rpc": "RawScan", "count": FOREVER, "action": BUSY})
    table.add({"rpc": "RawPut", "count": FOREVER, "action": BUSY})
    assert {meet(table) for _ in range(50)} == {"busy"}
    table.remove(first.id)
    assert (meet(table), meet(table, "RawPut")) == ("", "busy")
    table.clear()
    assert meet(table, "RawPut") == ""
    assert table.all() == []


def test_only_what_matches_is_struck_and_counted() -> None:
    """RPC, store and region must all fit; ``*`` fits every RPC."""
    table = FailpointTable()
    failpoint = table.add({"rpc": "RawScan", "store_id": 2, "region_id": 16, "action": BUSY})
    assert [meet(table), meet(table, "RawPut", 2), meet(table, "RawScan", 2, 17)] == ["", "", ""]
    assert failpoint.hits == 0
    assert meet(table, "RawScan", 2, 16) == "busy"
    table.add({"rpc": "*", "action": {"drop": {}}})
    assert meet(table, "Ingest") == "UNAVAILABLE: Socket closed"


@pytest.mark.parametrize("field", [field.name for field in errorpb_pb2.Error.DESCRIPTOR.fields if field.message_type])
def test_any_kind_of_region_error(field: str) -> None:
    """Every kind that errorpb has can be asked for by its name, and is what the caller gets."""
    table = FailpointTable()
    table.add({"rpc": "RawGet", "action": {"region_error": {field: {}}}})
    error = table.intercept("RawGet", store_id=1, region_id=1, context=context())
    assert error is not None
    assert [each.name for each, _ in error.ListFields()] == [field]


def test_change_feeds_have_points_and_errors_of_their_own() -> None:
    """A feed error strikes at its point only; `*` means methods, so it passes the points by."""
    table = FailpointTable()
    table.add({"rpc": "*", "count": -1, "action": BUSY})
    table.add({"rpc": "cdc.scan", "region_id": 16, "action": {"feed_error": {"congested": {"region_id": "16"}}}})
    reported = [
        table.intercept_feed(point, store_id=1, region_id=region_id, context=context())
        for point, region_id in (("cdc.register", 16), ("cdc.scan", 17), ("cdc.scan", 16), ("cdc.scan", 16))
    ]
    assert reported[:2] == [None, None]
    assert reported[2] is not None
    assert reported[2].congested.region_id == 16
    assert reported[3] is None
    for refused in (
        {"rpc": "EventFeed", "action": {"feed_error": {"congested": {}}}},
        {"rpc": "cdc.scan", "action": BUSY},
        {"rpc": "cdc.scan", "action": {"feed_error": {"nosuch": {}}}},
    ):
        with pytest.raises(PlaygroundError):
            table.add(refused)


def test_an_overrun_belongs_to_a_loss_of_the_lead() -> None:
    """It strikes there and nowhere else, and nothing else strikes there, not even what fits every method."""
    table = FailpointTable()
    table.add({"rpc": "*", "count": -1, "action": BUSY})
    table.add({"rpc": "cdc.transfer", "store_id": 4, "action": {"overrun": {"seconds": 1.5}}})
    assert [table.overrun(store_id=store_id, region_id=16) for store_id in (1, 4, 4)] == [0, 1.5, 0]
    for refused in (
        {"rpc": "cdc.transfer", "action": {"drop": {}}},
        {"rpc": "cdc.resolved", "action": {"overrun": {"seconds": 1}}},
        {"rpc": "*", "action": {"overrun": {"seconds": 1}}},
    ):
        with pytest.raises(PlaygroundError):
            table.add(refused)


def test_statuses_and_waiting() -> None:
    """A status ends the call; a delay and a command come first, and leave later failpoints their turn."""
    ran: list[tuple[str, Mapping[str, Any]]] = []
    table = FailpointTable()
    table.run_command = lambda name, arguments: ran.append((name, arguments))
    table.add({"rpc": "Download", "action": {"delay": {"seconds": 0.05}}})
    table.add({"rpc": "Download", "action": {"command": {"name": "split", "arguments": {"keys": ["6b"]}}}})
    table.add({"rpc": "Download", "action": {"abort": {"code": "RESOURCE_EXHAUSTED", "details": "full"}}})
    table.add({"rpc": "Download", "action": {"kill_store": {}}})
    started = time.monotonic()
    assert meet(table, "Download", 5) == "RESOURCE_EXHAUSTED: full"
    assert time.monotonic() - started >= 0.05
    assert ran == [("split", {"keys": ["6b"]})]
    assert meet(table, "Download", 5) == "UNAVAILABLE: Socket closed"
    assert ran[1:] == [("kill-store", {"store_id": 5})]


def test_exact_count_under_many_threads() -> None:
    """However many calls come at once, exactly ``count`` of them are struck."""
    table = FailpointTable()
    table.add({"rpc": "RawScan", "count": 100, "action": BUSY})
    struck: list[str] = []

    def call() -> None:
        struck.extend(meet(table) for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert struck.count("busy") == 100
    assert struck.count("") == 300


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rpc": "RawSan", "action": BUSY}, "unknown RPC or point 'RawSan'"),
        ({"rpc": "RawScan", "action": {"explode": {}}}, "unknown action 'explode'"),
        ({"rpc": "RawScan", "action": {"region_error": {"nosuch": {}}}}, "nosuch"),
        ({"rpc": "RawScan", "action": {"abort": {"code": "NOSUCH"}}}, "NOSUCH"),
        ({"rpc": "RawScan", "action": {"delay": {}}}, "seconds"),
        ({"rpc": "RawScan", "action": {}}, "one field"),
        ({"rpc": "RawScan"}, "one field"),
        ({"rpc": "RawScan", "times": 3, "action": BUSY}, "times"),
        ({"rpc": "Tso", "action": BUSY}, "has no field for a region error"),
    ],
)
def test_invalid_failpoints_are_refused(asked: dict[str, Any], message: str) -> None:
    """A misspelt or impossible failpoint is an error when it is added, instead of never triggering."""
    with pytest.raises(PlaygroundError, match=message):
        FailpointTable().add(asked)


def test_commands_need_an_admin() -> None:
    """Without anybody to run it, a command fails loudly."""
    table = FailpointTable()
    table.add({"rpc": "RawScan", "action": {"command": {"name": "split"}}})
    with pytest.raises(PlaygroundError, match="split"):
        meet(table)


def test_status_codes_are_grpc_s() -> None:
    """All seventeen names of gRPC's statuses are understood."""
    for code in grpc.StatusCode:
        table = FailpointTable()
        table.add({"rpc": "RawScan", "action": {"abort": {"code": code.name}}})
        assert meet(table) == f"{code.name}: "
