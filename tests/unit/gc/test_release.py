"""A service safe point is removed only if nobody renews it while it is watched."""

from __future__ import annotations

import pytest

from tests.unit.gc.fakes import FakePd
from tikv_br.cluster import safepoint
from tikv_br.errors import SafePointInUse, UsageError
from tikv_br.gc.status import WATCH_SECONDS, find, release_unused
from tikv_br.incremental import handover


class Watching:
    """A clock that moves when it is slept on; `each` is called after each sleep with the seconds gone by."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: dict[int, object] = {}

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        event = self.events.pop(round(self.now), None)
        if callable(event):
            event()


def watch(pd: FakePd, time: Watching, service: str = "tikv-br-sync-a", seconds: float = WATCH_SECONDS) -> None:
    """Release it."""
    release_unused(pd, find(pd, service), seconds, clock=lambda: time.now, sleep=time.sleep)


@pytest.fixture
def pd() -> FakePd:
    """A PD with one service safe point."""
    made = FakePd()
    made.update_service_safe_point("tikv-br-sync-a", 3600, made.ago(100))
    return made


def services(pd: FakePd) -> list[str]:
    """Their names."""
    return [each.service for each in pd.gc_status().services]


def test_one_that_nobody_renews(pd: FakePd) -> None:
    """It is gone, after the whole time, and no other one is."""
    pd.update_service_safe_point("other", 3600, pd.ago(50))
    time = Watching()
    watch(pd, time)
    assert (services(pd), time.now) == (["other"], WATCH_SECONDS)


@pytest.mark.parametrize("second", [1, 60, 75])
def test_one_that_is_renewed(pd: FakePd, second: int) -> None:
    """A renewal at any time of the watch, even in its last second, keeps it, whether or not the safe point moved."""
    time, safe_point = Watching(), find(pd, "tikv-br-sync-a").safe_point

    def renew() -> None:
        pd.seconds += 1
        pd.update_service_safe_point("tikv-br-sync-a", 3600, safe_point)

    time.events[second] = renew
    with pytest.raises(SafePointInUse, match="sync, changefeed or log a"):
        watch(pd, time)
    assert services(pd) == ["tikv-br-sync-a"]
    assert round(time.now) == second


def test_one_that_ends_meanwhile(pd: FakePd) -> None:
    """A safe point that its own run removed needs nothing more."""
    time = Watching()
    time.events[5] = lambda: pd.update_service_safe_point("tikv-br-sync-a", 0, 0)
    watch(pd, time)
    assert (services(pd), round(time.now)) == ([], 5)


def test_a_run_that_begins_at_that_moment(pd: FakePd) -> None:
    """If it is there again after the removal, that is said."""
    real = pd.update_service_safe_point

    def update(service_id: str, ttl_seconds: int, safe_point: int) -> int:
        real(service_id, ttl_seconds, safe_point)
        return real(service_id, 3600, pd.ago(10))

    pd.update_service_safe_point = update  # type: ignore[method-assign]
    with pytest.raises(SafePointInUse, match="registered again"):
        watch(pd, Watching(), seconds=0)


@pytest.mark.parametrize(("service", "why"), [("gc_worker", "GC itself"), ("unknown", "no service safe point unknown")])
def test_gc_and_unknown_services_cannot_be_released(pd: FakePd, service: str, why: str) -> None:
    """GC's own safe point is refused, and one that does not exist."""
    with pytest.raises(UsageError, match=why):
        find(pd, service)


def test_every_run_renews_while_it_is_watched() -> None:
    """Syncs, changefeeds and logs, and backups, which have the interval as a constant: the TTL is no limit."""
    assert handover.RENEW_SECONDS <= safepoint.RENEW_SECONDS < WATCH_SECONDS
