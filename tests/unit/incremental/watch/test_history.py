from __future__ import annotations

import threading

from incremental.watch.history import History
from incremental.watch.named import NamedStatus
from tests.unit.incremental.statuses import status


class Syncs:
    """What a test sets, and a clock that it turns."""

    def __init__(self) -> None:
        self.now = 100.0
        self.found: list[NamedStatus] = []

    def history(self, points: int = 900) -> History:
        """A history that looks only when told to."""
        return History(lambda: self.found, points=points, clock=lambda: self.now)

    def set(self, seconds: float, **events: int) -> None:
        """Let time pass, and have these syncs told so many events in all."""
        self.now += seconds
        self.found = [NamedStatus(name, status(events=total, written=total // 2)) for name, total in events.items()]


def test_rates_are_of_the_time_between_two_looks() -> None:
    """Each point after the first look has the lags as they are and the events and rows of its own interval a second."""
    syncs = Syncs()
    history = syncs.history()
    for seconds, total in ((1.0, 1000), (1.0, 3000), (2.0, 3000), (0.5, 4000)):
        syncs.set(seconds, a=total)
        history.look()
    points = history.since(0)["a"]
    assert [point.events_per_second for point in points] == [2000, 0, 2000]
    assert [point.written_per_second for point in points] == [1000, 0, 1000]
    assert {(point.checkpoint_lag, point.resolved_lag) for point in points} == {(3.0, 2.0)}


def test_a_sync_started_anew_has_no_rate_below_zero() -> None:
    """Its counters begin at 0 again; that interval counts for nothing."""
    syncs = Syncs()
    history = syncs.history()
    for total in (5000, 6000, 10, 110):
        syncs.set(1.0, a=total)
        history.look()
    assert [point.events_per_second for point in history.since(0)["a"]] == [1000, 0, 100]


def test_it_is_bounded_and_forgets_who_is_gone() -> None:
    """Of many looks the last points are kept; a sync that is not listed any more is dropped, and one not begun is empty."""
    syncs = Syncs()
    history = syncs.history(points=5)
    for total in range(20):
        syncs.set(1.0, a=total, b=total)
        history.look()
    assert [len(points) for points in history.since(0).values()] == [5, 5]
    syncs.found = [NamedStatus("b", None), NamedStatus("c", None)]
    history.look()
    assert {name: len(points) for name, points in history.since(0).items()} == {"b": 5, "c": 0}
    last = history.since(0)["b"][-1].ms
    assert history.since(last)["b"] == []


def test_it_looks_by_itself_while_entered() -> None:
    """A thread looks again and again, and is gone afterwards."""
    looks = threading.Semaphore(0)

    def watched() -> list[NamedStatus]:
        looks.release()
        return [NamedStatus("a", status())]

    with History(watched, interval=0.01) as history:
        for _ in range(3):
            assert looks.acquire(timeout=60)
    assert history.since(0)["a"]
    assert not any(thread.name == "history" for thread in threading.enumerate())
