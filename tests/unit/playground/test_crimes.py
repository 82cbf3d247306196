from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from tests.unit.playground.grpc_context import Aborted, context
from tikv_br.playground import crimes
from tikv_br.playground.crimes import CrimeLog


def test_crimes_are_remembered_on_disk(tmp_path: Path) -> None:
    """A later process finds them; clearing forgets them there too."""
    path = tmp_path / "crimes.jsonl"
    log = CrimeLog(path)
    log.record(store_id=4, rpc="Ingest", what="unsorted")
    [line] = path.read_text().splitlines()
    assert json.loads(line).items() >= {"store_id": 4, "rpc": "Ingest", "what": "unsorted"}.items()
    again = CrimeLog(path)
    assert again.all() == log.all()
    assert len(again.all()) == 1
    again.clear()
    assert again.all() == []
    assert CrimeLog(path).all() == []


def test_the_caller_sees_the_store_die(tmp_path: Path) -> None:
    """The crime is on record and the call ends as a lost connection does."""
    log = CrimeLog(tmp_path / "crimes.jsonl")
    node = SimpleNamespace(store_id=7, crimes=log)
    with pytest.raises(Aborted) as end:
        crimes.store_dies(node, context(), "Backup", crimes.BACKUP_EMPTY_RANGE)  # type: ignore[arg-type]
    assert end.value.code is grpc.StatusCode.UNAVAILABLE
    [crime] = log.all()
    assert (crime.store_id, crime.rpc, crime.what) == (7, "Backup", crimes.BACKUP_EMPTY_RANGE)


def test_no_crime_is_lost_among_threads(tmp_path: Path) -> None:
    """Crimes of many threads are all in memory and all in the file, each on a line of its own."""
    log = CrimeLog(tmp_path / "crimes.jsonl")

    def offend() -> None:
        for number in range(25):
            log.record(store_id=number, rpc="Ingest", what="w")

    threads = [threading.Thread(target=offend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.all()) == 100
    assert CrimeLog(tmp_path / "crimes.jsonl").all() == log.all()
