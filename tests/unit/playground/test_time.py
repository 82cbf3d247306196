"""Twin of tikv_br/playground/tso.py and causal.py."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clock import Clock
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.timestamps import LOGICAL_BITS, RENEW_INTERVAL, CausalTimestamps, Tso


def test_tso_follows_the_clock_and_never_goes_back(engine: RocksEngine) -> None:
    """Physical parts are the clock's milliseconds, also while the clock is set back."""
    clock = Clock(1_800_000_000.0)
    tso = Tso(engine, clock)
    first = tso.next()
    assert first >> LOGICAL_BITS == 1_800_000_000_000
    clock.now += 1.5
    second = tso.next()
    assert second >> LOGICAL_BITS == 1_800_000_001_500
    clock.now -= 100
    assert tso.next() == second + 1


def test_tso_gives_the_last_of_a_batch(engine: RocksEngine) -> None:
    """A batch is the timestamps up to and with the one returned, all of one millisecond."""
    tso = Tso(engine, Clock(1_800_000_000.0))
    first = tso.next()
    assert tso.next(100) == first + 100
    assert tso.next() == first + 101


def test_tso_refuses_impossible_counts(engine: RocksEngine) -> None:
    """Nothing, or more than a millisecond holds, is refused."""
    tso = Tso(engine, Clock(1_800_000_000.0))
    for count in (0, -1, 1 << LOGICAL_BITS):
        with pytest.raises(ValueError, match="tso count"):
            tso.next(count)


def test_a_full_millisecond_overflows_into_the_next(engine: RocksEngine) -> None:
    """The logical part stays below 2^18 whatever is asked of one millisecond."""
    tso = Tso(engine, Clock(1_800_000_000.0))
    lasts = [tso.next(200_000) for _ in range(4)]
    assert [last >> LOGICAL_BITS for last in lasts] == [1_800_000_000_000 + extra for extra in range(4)]
    assert all(last & (1 << LOGICAL_BITS) - 1 == 200_000 for last in lasts)


def test_a_restart_goes_on_above(engine: RocksEngine) -> None:
    """A new oracle on the same data starts above what an earlier one gave out, though its clock stands still."""
    clock = Clock(1_800_000_000.0)
    last = 0
    for _ in range(3):
        tso = Tso(engine, clock)
        given = [tso.next(count) for count in (1, 50, 1)]
        assert given[0] > last
        last = given[-1]


def test_tso_is_unique_among_threads(engine: RocksEngine) -> None:
    """No timestamp is given to two threads."""
    tso = Tso(engine)
    with ThreadPoolExecutor(4) as pool:
        given = list(itertools.chain(*pool.map(lambda _: [tso.next() for _ in range(2000)], range(4))))
    assert len(set(given)) == len(given)


def run_ahead(causal: CausalTimestamps, clock: Clock, seconds: float) -> None:
    """Let time pass with the renewal that the playground's thread does."""
    for _ in range(round(seconds / RENEW_INTERVAL)):
        clock.now += RENEW_INTERVAL
        causal.renew()


def test_causal_timestamps_lag_by_the_time_ahead(engine: RocksEngine) -> None:
    """An idle store's next write is three seconds behind PD, no more however long it idles (E6)."""
    clock = Clock(1_800_000_000.0)
    tso = Tso(engine, clock)
    causal = CausalTimestamps(tso, ahead=3.0)
    for idle, lag in ((1.0, 1000), (2.0, 2900), (60.0, 2900)):
        run_ahead(causal, clock, idle)
        behind = (tso.next() >> LOGICAL_BITS) - (causal.next_ts() >> LOGICAL_BITS)
        assert abs(behind - lag) <= 200


@pytest.mark.parametrize("interval", [0.25, 1.0, 10.0])
def test_causal_timestamps_are_no_older_where_renewals_are_late(engine: RocksEngine, interval: float) -> None:
    """On a busy machine the renewals are further apart; the cache covers three seconds all the same."""
    clock = Clock(1_800_000_000.0)
    tso = Tso(engine, clock)
    causal = CausalTimestamps(tso, ahead=3.0)
    for _ in range(50):
        clock.now += interval
        causal.renew()
    behind = (tso.next() >> LOGICAL_BITS) - (causal.next_ts() >> LOGICAL_BITS)
    assert 3000 - 1000 * interval <= behind <= 3000


def test_causal_timestamps_ascend_and_are_the_stores_own(engine: RocksEngine) -> None:
    """Two stores' timestamps never meet, each store's ascend, also when a cache runs dry."""
    tso = Tso(engine)
    one, other = CausalTimestamps(tso), CausalTimestamps(tso)
    given: dict[str, list[int]] = {"one": [], "other": []}
    for number in range(3000):
        given["one"].append(one.next_ts())
        if number % 3 == 0:
            given["other"].append(other.next_ts())
            other.renew()
    assert all(stamps == sorted(set(stamps)) for stamps in given.values())
    assert not set(given["one"]) & set(given["other"])
