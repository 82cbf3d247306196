"""Stores that are made to take the time of more data."""

from __future__ import annotations

from tikv_br.playground.store_state import Pace


def test_work_queues_and_weighs() -> None:
    """Two concurrent calls take the sum, later ones start again, and each byte counts as often as configured."""
    now, slept = [100.0], list[float]()
    pace = Pace(1000, weight=10, clock=lambda: now[0], sleep=slept.append)
    pace.work(200)
    pace.work(100)
    now[0] += 60
    pace.work(50)
    assert slept == [2, 3, 0.5]
    assert pace.worked == 3.5
    pace.clear()
    assert pace.worked == 0


def test_without_a_speed_nothing_waits() -> None:
    """By default stores are as fast as they can be."""
    slept: list[float] = []
    Pace(sleep=slept.append).work(1 << 40)
    assert slept == []


def test_a_new_rate_replaces_the_old_one() -> None:
    """As download limits of TiKV 9.0: the last one counts for good, and its work waits for no earlier work."""
    now, slept = [0.0], list[float]()
    pace = Pace(clock=lambda: now[0], sleep=slept.append)
    pace.work(1000)
    pace.limit(500)
    pace.work(1000)
    pace.work(500)
    pace.limit(1000)
    pace.work(1000)
    now[0] = 1e9
    assert pace.rate == 1000
    pace.limit(0)
    pace.work(1000)
    assert slept == [2.0, 3.0, 1.0]
