from __future__ import annotations

from tests.unit.cluster.fakes import FakeSafePoints
from tikv_br.incremental.handover import MIN_TTL, leave, protect, service_id


def test_a_sync_that_stops_leaves_its_safe_point_however_short_its_ttl() -> None:
    """A TTL of 0 would tell PD to forget it, and the next start could find its deletions gone."""
    pd = FakeSafePoints()
    keeper = protect(pd, "one", 100, gc_ttl=0)
    held = {service_id("one"): (99, MIN_TTL)}
    assert pd.services == held
    leave(keeper, 0)
    assert pd.services == held
