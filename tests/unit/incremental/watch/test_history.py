from __future__ import annotations

import threading

from tests.unit.incremental.statuses import status
from tikv_br.incremental.watch.status import History, NamedStatus


class Syncs:
    """Statuses and a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.found: list[NamedStatus] = []

    def history(self, points: int = 900) -> History:
        """A history without its thread: it samples when the test calls `sample`."""
        return History(lambda: self.found, points=points, clock=lambda: self.now)

    def set(self, seconds: float, **events: int) -> None:
        """Advance the clock, and set the total number of events of each sync."""
        self.now += seconds
        self.found = [NamedStatus(name, status(events=total, written=total // 2)) for name, total in events.items()]


def test_rates_cover_the_time_between_two_samples() -> None:
    """Each point after the first sample has the current lags and the rates of its own interval."""
    syncs = Syncs()
    history = syncs.history()
    for seconds, total in ((1.0, 1000), (1.0, 3000), (2.0, 3000), (0.5, 4000)):
        syncs.set(seconds, a=total)
        history.sample()
    points = history.since(0)["a"]
    assert [point.events_per_second for point in points] == [2000, 0, 2000]
    assert [point.written_per_second for point in points] == [1000, 0, 1000]
    assert {(point.checkpoint_lag, point.resolved_lag) for point in points} == {(3.0, 2.0)}


def test_a_restarted_sync_has_no_negative_rate() -> None:
    """Its counters start at 0 again; the rate of that interval is 0."""
    syncs = Syncs()
    history = syncs.history()
    for total in (5000, 6000, 10, 110):
        syncs.set(1.0, a=total)
        history.sample()
    assert [point.events_per_second for point in history.since(0)["a"]] == [1000, 0, 100]


def test_it_is_bounded_and_drops_ended_syncs() -> None:
    """Only the last points are kept; a sync that is no longer listed is dropped, and one that has not started has no points."""
    syncs = Syncs()
    history = syncs.history(points=5)
    for total in range(20):
        syncs.set(1.0, a=total, b=total)
        history.sample()
    assert [len(points) for points in history.since(0).values()] == [5, 5]
    syncs.found = [NamedStatus("b", None), NamedStatus("c", None)]
    history.sample()
    assert {name: len(points) for name, points in history.since(0).items()} == {"b": 5, "c": 0}
    last = history.since(0)["b"][-1].ms
    assert history.since(last)["b"] == []


def test_it_samples_in_the_background_while_entered() -> None:
    """A thread samples repeatedly, and has ended afterwards."""
    samples = threading.Semaphore(0)

    def statuses() -> list[NamedStatus]:
        samples.release()
        return [NamedStatus("a", status())]

    with History(statuses, interval=0.01) as history:
        for _ in range(3):
            assert samples.acquire(timeout=60)
    assert history.since(0)["a"]
    assert not any(thread.name == "history" for thread in threading.enumerate())
