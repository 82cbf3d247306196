from __future__ import annotations

import threading

import pytest

from tikv_br.playground.store_state import CallClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time that the clock sees, to be set."""
    seconds = [100.0]
    monkeypatch.setattr("tikv_br.playground.node.time.monotonic", lambda: seconds[0])
    return seconds


def test_calls_at_the_same_time_are_busy_once(now: list[float]) -> None:
    """Two overlapping calls add up for themselves, and count once for how long the stores were busy."""
    clock = CallClock()
    with clock.measure("Download"):
        now[0] += 2
        with clock.measure("Ingest"):
            now[0] += 3
    now[0] += 50
    with clock.measure("Ingest"):
        now[0] += 1
        assert clock.describe()["busy_seconds"] == 6
    assert clock.describe() == {
        "busy_seconds": 6,
        "rpcs": {"Download": {"calls": 1, "seconds": 5}, "Ingest": {"calls": 2, "seconds": 4}},
    }


def test_open_streams_are_no_work(now: list[float]) -> None:
    """A change feed is open also while nothing happens."""
    clock = CallClock()
    with clock.measure("EventFeed"):
        now[0] += 9
    assert clock.describe() == {"busy_seconds": 0, "rpcs": {}}


def test_clearing_begins_anew(now: list[float]) -> None:
    """Counts are reset; a running call is busy from then on."""
    clock = CallClock()
    with clock.measure("Backup"):
        now[0] += 7
        clock.clear()
        now[0] += 1
        assert clock.describe()["busy_seconds"] == 1


def test_many_threads_end_at_rest() -> None:
    """No call is lost however many come at once."""
    clock = CallClock()

    def call() -> None:
        for _ in range(200):
            with clock.measure("RawPut"):
                pass

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    described = clock.describe()
    assert described["rpcs"]["RawPut"]["calls"] == 1600
    assert clock.describe()["busy_seconds"] == described["busy_seconds"]
