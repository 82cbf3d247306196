from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from tests.unit.playground.grpc_context import Aborted, context
from tikv_br.playground.node import BACKUP_EMPTY_RANGE, crash_store
from tikv_br.playground.store_state import FatalRequestLog


def test_fatal_requests_are_saved(tmp_path: Path) -> None:
    """A later process finds them; clearing forgets them there too."""
    path = tmp_path / "fatal_requests.jsonl"
    log = FatalRequestLog(path)
    log.record(store_id=4, rpc="Ingest", what="unsorted")
    [line] = path.read_text().splitlines()
    assert json.loads(line).items() >= {"store_id": 4, "rpc": "Ingest", "what": "unsorted"}.items()
    again = FatalRequestLog(path)
    assert again.all() == log.all()
    assert len(again.all()) == 1
    again.clear()
    assert again.all() == []
    assert FatalRequestLog(path).all() == []


def test_the_caller_sees_the_store_die(tmp_path: Path) -> None:
    """The fatal_request is on record and the call ends as a lost connection does."""
    log = FatalRequestLog(tmp_path / "fatal_requests.jsonl")
    node = SimpleNamespace(store_id=7, fatal_requests=log)
    with pytest.raises(Aborted) as end:
        crash_store(node, context(), "Backup", BACKUP_EMPTY_RANGE)  # type: ignore[arg-type]
    assert end.value.code is grpc.StatusCode.UNAVAILABLE
    [fatal_request] = log.all()
    assert (fatal_request.store_id, fatal_request.rpc, fatal_request.what) == (
        7,
        "Backup",
        BACKUP_EMPTY_RANGE,
    )


def test_no_fatal_request_is_lost_among_threads(tmp_path: Path) -> None:
    """FatalRequests of many threads are all in memory and all in the file, each on a line of its own."""
    log = FatalRequestLog(tmp_path / "fatal_requests.jsonl")

    def offend() -> None:
        for number in range(25):
            log.record(store_id=number, rpc="Ingest", what="w")

    threads = [threading.Thread(target=offend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.all()) == 100
    assert FatalRequestLog(tmp_path / "fatal_requests.jsonl").all() == log.all()
