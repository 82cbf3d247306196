"""A safe point that is held, renewed, lost and left."""

from __future__ import annotations

import threading

import pytest

from tikv_br.cluster.safepoint import SafePointKeeper, protect, release
from tikv_br.errors import ClusterUnreachable, SafePointError, TikvBrError, UsageError


class Pd:
    """PD's safe points in memory; `fail` makes every call end with `error`."""

    def __init__(self) -> None:
        self.services: dict[str, tuple[int, int]] = {}
        self.gc = 0
        self.fail = False
        self.error: TikvBrError = ClusterUnreachable("PD is silent")
        self.calls = 0
        self.called = threading.Condition()

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """As PD before 9.0: the minimum over all services, and no error for one that is behind."""
        with self.called:
            self.calls += 1
            self.called.notify_all()
        if self.fail:
            raise self.error
        if ttl_seconds <= 0:
            self.services.pop(service_id, None)
        elif safe_point >= self.gc:
            self.services[service_id] = (safe_point, ttl_seconds)
        return min([self.gc, *(ts for ts, _ in self.services.values())]) if safe_point >= self.gc else self.gc

    def gc_safe_point(self) -> int:
        """Where GC stands."""
        return self.gc

    def wait_for_calls(self, calls: int) -> None:
        """Until so many updates were tried."""
        with self.called:
            assert self.called.wait_for(lambda: self.calls >= calls, timeout=60)


def wait_until_lost(keeper: SafePointKeeper) -> None:
    """Until the keeper's thread has given up."""
    for thread in threading.enumerate():
        if thread.name == f"safe-point-{keeper.service_id}":
            thread.join(60)
    assert keeper.lost is not None


def test_a_safe_point_ahead_of_gc_is_registered() -> None:
    """What GC has not reached can be protected, and released again."""
    pd = Pd()
    pd.gc = 100
    protect(pd, "br", 100, 60)
    assert pd.services == {"br": (100, 60)}
    release(pd, "br")
    assert not pd.services


def test_a_safe_point_behind_gc_is_lost() -> None:
    """PD answers OK with a larger minimum; that is an error here."""
    pd = Pd()
    pd.gc = 101
    with pytest.raises(SafePointError, match="has passed 100"):
        protect(pd, "br", 100, 60)


def test_gc_that_passed_unseen_by_the_services_is_noticed() -> None:
    """GC's own safe point counts, even when the minimum over the services looks fine."""
    pd = Pd()
    pd.gc_safe_point = lambda: 200  # type: ignore[method-assign]
    with pytest.raises(SafePointError):
        protect(pd, "br", 100, 60)


def test_a_keeper_renews_and_releases() -> None:
    """While it runs it renews; at the end the safe point is gone."""
    pd = Pd()
    with SafePointKeeper(pd, "br", 100, ttl_seconds=0.09) as keeper:  # type: ignore[arg-type]
        pd.wait_for_calls(4)
        keeper.check()
        assert pd.services["br"][0] == 100
    assert not pd.services


def test_a_keeper_notices_that_gc_passed() -> None:
    """GC that overtakes a held safe point is told by check."""
    pd = Pd()
    keeper = SafePointKeeper(pd, "br", 100, ttl_seconds=0.03)  # type: ignore[arg-type]
    keeper.start()
    pd.gc = 500
    wait_until_lost(keeper)
    with pytest.raises(SafePointError, match="GC stands at 500"):
        keeper.check()


@pytest.mark.parametrize("error", [ClusterUnreachable("PD is silent"), UsageError("--ca cannot be read")])
def test_a_short_silence_of_pd_is_survived(error: TikvBrError) -> None:
    """A renewal that fails within the TTL, for whatever reason, is tried again; nothing is lost."""
    pd = Pd()
    pd.error = error
    with SafePointKeeper(pd, "br", 100, ttl_seconds=3, renew_every=0.01, clock=lambda: 1.0) as keeper:
        pd.fail = True
        pd.wait_for_calls(4)
        pd.fail = False
        pd.wait_for_calls(7)
        keeper.check()


def test_a_silence_longer_than_the_ttl_loses_it() -> None:
    """When no renewal came through for a whole TTL, PD has forgotten the safe point."""
    pd = Pd()
    keeper = SafePointKeeper(pd, "br", 100, ttl_seconds=0.05)  # type: ignore[arg-type]
    keeper.start()
    pd.fail = True
    wait_until_lost(keeper)
    with pytest.raises(SafePointError, match="could not be renewed"):
        keeper.check()


def test_a_keeper_can_leave_its_safe_point() -> None:
    """For the tail to take over, the safe point stays for the TTL asked for; nothing renews or removes it."""
    pd = Pd()
    with SafePointKeeper(pd, "br", 100, ttl_seconds=60) as keeper:
        keeper.leave_for(3600)
    assert pd.services == {"br": (100, 3600)}


def test_what_is_lost_cannot_be_left() -> None:
    """A hand-over on a lost safe point is refused."""
    pd = Pd()
    keeper = SafePointKeeper(pd, "br", 100, ttl_seconds=60)
    keeper.start()
    keeper.lost = SafePointError("gone")
    with pytest.raises(SafePointError, match="gone"):
        keeper.leave_for(3600)


def test_a_keeper_advances_but_never_back() -> None:
    """A tail moves its safe point forward as it confirms."""
    keeper = SafePointKeeper(Pd(), "cdc", 100, ttl_seconds=60)
    keeper.advance(200)
    keeper.advance(150)
    assert keeper.safe_point == 200
