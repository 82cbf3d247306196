"""backup-ts and the keeper of its safe point, against a PD that answers by script."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from tikv_br.backup import backup_ts
from tikv_br.backup.backup_ts import SafePointKeeper, backup_ts_before
from tikv_br.errors import ClusterUnreachable, SafePointError

SAFE_POINT = 1000


class ScriptedPd:
    """Holds service safe points; ``script`` says what the next updates do, after that they succeed."""

    def __init__(self, gc: int = 0, script: str = "") -> None:
        self.gc = gc
        self.script = list(script)
        self.calls: list[tuple[str, int, int]] = []
        self.called = threading.Condition()

    def gc_safe_point(self) -> int:
        """Answer with the ts that GC has reached."""
        return self.gc

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """Do what the script says: ``E`` no answer, ``P`` GC has passed, ``.`` accepted."""
        with self.called:
            self.calls.append((service_id, ttl_seconds, safe_point))
            self.called.notify_all()
        match self.script.pop(0) if self.script else ".":
            case "E":
                raise ClusterUnreachable("PD is away")
            case "P":
                return safe_point + 1
        return safe_point

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the calls so far meet the condition."""
        with self.called:
            assert self.called.wait_for(condition, timeout=10)


@contextlib.contextmanager
def keeping(pd: ScriptedPd, ttl: int = 300) -> Iterator[SafePointKeeper]:
    """Give a keeper whose thread ends with the block."""
    keeper = SafePointKeeper(pd, "tikv-br-backup-x", SAFE_POINT, ttl)
    yield keeper
    keeper.stop()


def test_backup_ts_is_earlier_on_the_physical_part_only() -> None:
    """A minute is 60,000 in the bits above the logical counter, which is kept; an interval before the epoch gives 1."""
    now = (1_795_256_304_900 << 18) + 77
    assert backup_ts_before(now, 60) == ((1_795_256_304_900 - 60_000) << 18) + 77
    assert backup_ts_before(now, 0.5) == ((1_795_256_304_900 - 500) << 18) + 77
    assert backup_ts_before(5 << 18, 60) == 1


def test_start_registers_before_it_returns() -> None:
    """No scan can begin unprotected: the first registration is made by the caller's own thread."""
    pd = ScriptedPd()
    with keeping(pd) as kept:
        kept.start()
        assert pd.calls == [("tikv-br-backup-x", 300, SAFE_POINT)]


def test_a_short_ttl_is_lengthened_while_the_backup_runs() -> None:
    """--gcttl says how long the safe point outlives the run; during it one missed renewal must not lose it."""
    pd = ScriptedPd()
    with keeping(pd, ttl=1) as kept:
        kept.start()
        kept.settle(1)
    assert [ttl for _, ttl, _ in pd.calls] == [backup_ts.SHORTEST_TTL, 1]


@pytest.mark.parametrize("pd", [ScriptedPd(gc=SAFE_POINT + 1), ScriptedPd(script="P")])
def test_start_refuses_when_gc_has_passed(pd: ScriptedPd) -> None:
    """PD tells it by its GC safe point, or only by the answer to the registration."""
    with keeping(pd) as kept, pytest.raises(SafePointError, match=r"past the 1000"):
        kept.start()


def test_renewal_goes_on_and_survives_an_absent_pd() -> None:
    """Errors of PD are asked again; they lose nothing while the TTL lasts."""
    pd = ScriptedPd(script=".EE.E")
    with keeping(pd) as kept:
        kept.start(renew_every=0.01)
        pd.wait_for(lambda: len(pd.calls) >= 8)
        kept.check()
        assert set(pd.calls) == {("tikv-br-backup-x", 300, SAFE_POINT)}


def test_a_lost_safe_point_is_told() -> None:
    """When PD has let GC pass, `check` raises, and so does `settle` instead of pretending."""
    pd = ScriptedPd(script="..P")
    with keeping(pd) as kept:
        kept.start(renew_every=0.01)
        pd.wait_for(lambda: len(pd.calls) == 3)
        with pytest.raises(SafePointError, match="1001"):
            kept.settle(300)
        with pytest.raises(SafePointError):
            kept.check()
    assert len(pd.calls) == 3


def test_a_pd_absent_for_the_whole_ttl_loses_the_safe_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the TTL the safe point is gone whatever PD would say."""
    monkeypatch.setattr(backup_ts, "SHORTEST_TTL", 0)
    pd = ScriptedPd(script="." + "E" * 1000)
    with keeping(pd, ttl=0) as kept:
        kept.start(renew_every=0.01)
        pd.wait_for(lambda: len(pd.calls) >= 2)
        kept.stop()
        with pytest.raises(SafePointError, match="could not be renewed"):
            kept.check()


def test_settle_leaves_it_and_release_removes_it() -> None:
    """After success the safe point stands for the tail to take over; after a failure nothing is left in PD."""
    pd = ScriptedPd()
    with keeping(pd) as kept:
        kept.start()
        kept.settle(120)
    assert pd.calls[-1] == ("tikv-br-backup-x", 120, SAFE_POINT)
    with keeping(pd) as kept:
        kept.start()
        kept.release()
    assert pd.calls[-1] == ("tikv-br-backup-x", 0, SAFE_POINT)
    with keeping(pd) as kept:
        kept.start()
        kept.settle(0)
    assert pd.calls[-1] == ("tikv-br-backup-x", 0, SAFE_POINT)
