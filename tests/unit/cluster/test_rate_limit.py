"""Reads at a rate: by a clock that only moves when somebody waits."""

from __future__ import annotations

import pytest

from tests.support.clock import Clock
from tikv_br.cluster.rate_limit import CREDIT_SECONDS, RateLimit


@pytest.mark.parametrize("reading", [0.0, 0.02, 0.09])
def test_the_duration_of_requests_does_not_slow_the_rate(reading: float) -> None:
    """100 reads of 1,000 bytes at 10,000 bytes a second last ten seconds, also if each takes some time."""
    clock = Clock(50.0)
    limit = RateLimit(10_000, clock, clock.sleep)
    for _ in range(100):
        clock.sleep(reading)
        limit.spend(1, 1000)
    assert clock.now - 50.0 == pytest.approx(10.0, abs=0.1)


def test_a_pause_is_made_up_for_by_a_second_at_most() -> None:
    """After an hour of silence a store gets no hour's worth of bytes at once."""
    clock = Clock(50.0)
    limit = RateLimit(1000, clock, clock.sleep)
    limit.spend(1, 1000)
    clock.sleep(3600)
    began = clock.now
    for _ in range(5):
        limit.spend(1, 1000)
    assert clock.now - began == pytest.approx(5.0 - CREDIT_SECONDS)


def test_each_store_has_a_rate_of_its_own() -> None:
    """Reads from one store do not delay reads from another."""
    waits: list[float] = []
    limit = RateLimit(1000, lambda: 50.0, waits.append)
    for store_id, size in ((1, 10_000), (2, 1000), (1, 1000)):
        limit.spend(store_id, size)
    assert waits == pytest.approx([10.0, 1.0, 11.0])
