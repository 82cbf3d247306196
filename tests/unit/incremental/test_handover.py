from __future__ import annotations

import pytest

from tests.unit.cluster.fakes import FakeSafePoints
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.incremental.handover import MIN_TTL, leave, protect, service_id, warn_of_scan_window


def test_a_sync_that_stops_leaves_its_safe_point_however_short_its_ttl() -> None:
    """With a TTL of 0 PD would forget it, and deletions could be missing at the next start."""
    pd = FakeSafePoints()
    keeper = protect(pd, "one", 100, gc_ttl=0)
    held = {service_id("one"): (99, MIN_TTL)}
    assert pd.services == held
    leave(keeper, 0)
    assert pd.services == held


def test_a_log_that_starts_with_a_scan_window_says_how_to_avoid_it(caplog: pytest.LogCaptureFixture) -> None:
    """Once it is longer than the stores' caches make it in any case."""
    now = 470_000_000 << 18
    warn_of_scan_window("east", minus_seconds(now, 5), now)
    assert not caplog.records
    warn_of_scan_window("east", minus_seconds(now, 73), now)
    [reported] = caplog.messages
    assert "log east: no time of its first 73 s" in reported
    assert "--safe-interval 0s" in reported
    assert "--start-ts now" in reported
