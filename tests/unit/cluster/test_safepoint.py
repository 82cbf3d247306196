"""A safe point that is held, renewed, lost and left."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.waiting import eventually
from tests.unit.cluster.fakes import FakeSafePoints
from tikv_br.cluster import safepoint
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.safepoint import SafePointKeeper, protect, release, safe_point_keeper
from tikv_br.errors import ClusterUnreachable, SafePointError, TikvBrError, UsageError
from tikv_br.storage.url import parse


def wait_until_lost(keeper: SafePointKeeper) -> None:
    """Until the keeper's thread has given up."""
    for thread in threading.enumerate():
        if thread.name == f"safe-point-{keeper.service_id}":
            thread.join(60)
    assert keeper.lost is not None


def test_a_safe_point_ahead_of_gc_is_registered() -> None:
    """Timestamps ahead of GC can be protected, and released again."""
    pd = FakeSafePoints()
    pd.gc = 100
    protect(pd, "br", 100, 60)
    assert pd.services == {"br": (100, 60)}
    release(pd, "br")
    assert not pd.services


def test_a_safe_point_behind_gc_is_lost() -> None:
    """PD answers OK with a larger minimum; that is an error here."""
    pd = FakeSafePoints()
    pd.gc = 101
    with pytest.raises(SafePointError, match="has passed 100"):
        protect(pd, "br", 100, 60)


def test_gc_that_passed_unseen_by_the_services_is_noticed() -> None:
    """GC's own safe point counts, even when the minimum over the services looks fine."""
    pd = FakeSafePoints()
    pd.gc_safe_point = lambda: 200  # type: ignore[method-assign]
    with pytest.raises(SafePointError):
        protect(pd, "br", 100, 60)


def test_a_keeper_renews_and_releases() -> None:
    """While it runs it renews; at the end the safe point is gone."""
    pd = FakeSafePoints()
    with SafePointKeeper(pd, "br", 100, ttl_seconds=0.09) as keeper:  # type: ignore[arg-type]
        pd.wait_for_calls(4)
        keeper.check()
        assert pd.services["br"][0] == 100
    assert not pd.services


@pytest.mark.parametrize(
    ("happens", "words"), [({"gc": 500}, "GC is at 500"), ({"fail": True}, "cannot renew")], ids=["GC", "silence"]
)
def test_a_keeper_notices_the_loss(happens: dict[str, int], words: str) -> None:
    """GC has overtaken the safe point, or no renewal came through for a whole TTL, after which PD forgets it."""
    pd = FakeSafePoints()
    keeper = SafePointKeeper(pd, "br", 100, ttl_seconds=0.05)  # type: ignore[arg-type]
    keeper.start()
    vars(pd).update(happens)
    wait_until_lost(keeper)
    with pytest.raises(SafePointError, match=words):
        keeper.check()


@pytest.mark.parametrize("error", [ClusterUnreachable("PD is silent"), UsageError("--ca cannot be read")])
def test_a_short_silence_of_pd_is_survived(error: TikvBrError) -> None:
    """A renewal that fails within the TTL, for whatever reason, is tried again; nothing is lost."""
    pd = FakeSafePoints()
    pd.error = error
    with SafePointKeeper(pd, "br", 100, ttl_seconds=3, renew_every=0.01, clock=lambda: 1.0) as keeper:
        pd.fail = True
        pd.wait_for_calls(4)
        pd.fail = False
        pd.wait_for_calls(7)
        keeper.check()


def test_silence_is_told_long_before_the_next_renewal(caplog: pytest.LogCaptureFixture) -> None:
    """A keeper that probes knows since when PD does not answer; it warns after 10 s, not with each look, and forgets it afterwards."""
    pd, now = FakeSafePoints(), [100.0]
    asked = threading.Semaphore(0)

    def gc_safe_point() -> int:
        if pd.fail:
            asked.release()
            raise pd.error
        return 0

    pd.gc_safe_point = gc_safe_point  # type: ignore[method-assign]
    keeper = SafePointKeeper(pd, "br", 100, 600, renew_every=60.0, probe_every=0.01, clock=lambda: now[0])
    with keeper:
        assert keeper.silent_seconds == 0
        pd.fail = True
        eventually(lambda: asked.acquire(blocking=False) and keeper.silent_seconds == 0 and _unanswered(keeper), 60)
        for moment, warnings in ((109.0, 0), (110.0, 1), (111.0, 1), (170.0, 2)):
            now[0] = moment
            keeper.check()
            assert keeper.silent_seconds == moment - 100
            assert caplog.text.count("has not answered for") == warnings
        assert "has not answered for 10 s: the safe point br expires in 590 s" in caplog.text
        pd.fail = False
        eventually(lambda: keeper.silent_seconds == 0, 60)
        keeper.check()
        pd.gc_safe_point = lambda: 101  # type: ignore[method-assign]
        wait_until_lost(keeper)
        assert keeper.passed


def test_a_program_that_ignores_the_safe_points_of_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup notices within seconds, long before its next renewal, and the hint names such programs."""
    monkeypatch.setattr(safepoint, "PROBE_SECONDS", 0.01)
    pd = FakeSafePoints()
    keeper = safe_point_keeper(cast("Cluster", SimpleNamespace(pd=pd)), "run", 201, 3600)
    keeper.start()
    calls = pd.calls
    pd.gc = 201
    wait_until_lost(keeper)
    assert (keeper.passed, pd.calls) == (True, calls)
    with pytest.raises(SafePointError, match=r"GC is at 201 .*has passed 200") as lost:
        keeper.check()
    assert all(
        name in lost.value.hint for name in ("JuiceFS", "gc-interval=0", "client-go", "TiDB", "same command again")
    )


def test_the_last_look_at_gc() -> None:
    """`confirm` asks PD at once, whenever the last look was; a loss that it finds is one for all."""
    pd = FakeSafePoints()
    keeper = SafePointKeeper(pd, "br", 100, ttl_seconds=3600)
    pd.gc = 100
    keeper.confirm()
    pd.gc = 101
    keeper.check()
    with pytest.raises(SafePointError, match="has passed 100"):
        keeper.confirm()
    assert keeper.passed
    pd.gc = 0
    for look in (keeper.check, keeper.confirm):
        with pytest.raises(SafePointError, match="has passed 100"):
            look()


def test_a_last_look_that_pd_does_not_answer() -> None:
    """Is an error of its own: nothing is known, and nothing lost."""
    pd = FakeSafePoints()
    keeper = SafePointKeeper(pd, "br", 100, ttl_seconds=3600)

    def silence() -> int:
        raise pd.error

    pd.gc_safe_point = silence  # type: ignore[method-assign]
    with pytest.raises(ClusterUnreachable):
        keeper.confirm()
    keeper.check()


def _unanswered(keeper: SafePointKeeper) -> bool:
    return keeper._asked_at is not None


def test_a_keeper_can_leave_its_safe_point() -> None:
    """For the tail to take over, the safe point stays for the TTL asked for; nothing renews or removes it."""
    pd = FakeSafePoints()
    with SafePointKeeper(pd, "br", 100, ttl_seconds=60) as keeper:
        keeper.stop_with_ttl(3600)
    assert pd.services == {"br": (100, 3600)}


def test_a_lost_safe_point_cannot_be_handed_over() -> None:
    """A hand-over on a lost safe point is refused."""
    pd = FakeSafePoints()
    keeper = SafePointKeeper(pd, "br", 100, ttl_seconds=60)
    keeper.start()
    keeper.lost = SafePointError("gone")
    with pytest.raises(SafePointError, match="gone"):
        keeper.stop_with_ttl(3600)


def test_a_keeper_advances_but_never_back() -> None:
    """A tail moves its safe point forward as it confirms."""
    keeper = SafePointKeeper(FakeSafePoints(), "cdc", 100, ttl_seconds=60)
    keeper.advance(200)
    keeper.advance(150)
    assert keeper.safe_point == 200


def test_the_name_of_a_backups_safe_point_has_its_place() -> None:
    """A run record elsewhere with the id of a run, or with the whole name of its safe point, names another one."""
    name = safepoint.service_id("20260502-9f3a1c", parse("s3://bucket/monday"))
    for forged in ("20260502-9f3a1c", name, name.removeprefix(safepoint.BACKUP_SERVICES)):
        assert safepoint.service_id(forged, parse("s3://bucket/forged")) != name
    assert name == safepoint.service_id("20260502-9f3a1c", parse("s3://bucket/monday/"))
