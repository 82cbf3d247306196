from __future__ import annotations

import json
import threading
from pathlib import Path

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
