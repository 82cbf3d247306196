"""The GC worker: how far it goes, and that only the leader of the election does anything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import PATIENCE, eventually
from tests.unit.gc.fakes import FakeEtcd, FakePd
from tikv_br import cancellation
from tikv_br.cluster.etcd import LeaseHolder
from tikv_br.cluster.etcd_values import KeyValue
from tikv_br.cluster.locks import LiveLock, LockReport
from tikv_br.errors import ClusterError, ClusterUnfit, ClusterUnreachable, EtcdLeaseExpired, EtcdUnreachable
from tikv_br.gc.metrics import WorkerFigures
from tikv_br.gc.status import GcReport
from tikv_br.gc.worker import PREFIX, Candidate, GcWorker, WorkerOptions, describe, run_round

LIFE = 600.0


def agreed() -> None:
    """Nobody else leads."""


@pytest.fixture(params=[False, True], ids=["safe points", "barriers"])
def pd(request: pytest.FixtureRequest) -> FakePd:
    """A PD of either kind."""
    return FakePd(barriers=request.param)


def test_gc_follows_the_life_time(pd: FakePd) -> None:
    """Without services both safe points are the life time back; later they move with the time, and PD is asked once a round."""
    done = run_round(pd, LIFE, agreed)
    assert (pd.worker, pd.state.safe_point, done.has_advanced) == (pd.ago(LIFE), pd.ago(LIFE), True)
    assert not run_round(pd, LIFE, agreed).has_advanced
    pd.seconds += 60
    assert run_round(pd, LIFE, agreed).report.safe_point == pd.ago(LIFE) == pd.state.safe_point
    assert len(pd.updates) == 2


def test_gc_waits_for_the_oldest_service(pd: FakePd) -> None:
    """Up to it and no further, until it is gone or has expired."""
    pd.update_service_safe_point("tikv-br-sync-a", 1000, pd.ago(7200))
    pd.update_service_safe_point("b", 3600, pd.ago(3600))
    old, young = pd.ago(7200), pd.ago(3600)
    done = run_round(pd, LIFE, agreed)
    assert done.report.safe_point == old
    pd.seconds += 1001
    assert run_round(pd, LIFE, agreed).report.safe_point == young
    pd.update_service_safe_point("b", 0, 0)
    assert run_round(pd, LIFE, agreed).report.safe_point == pd.ago(LIFE)


def test_a_service_at_the_very_beginning() -> None:
    """A safe point of 1, as of one who wants everything, is respected: nothing below it, nothing above it."""
    pd = FakePd()
    pd.update_service_safe_point("all", 1000, 1)
    assert run_round(pd, LIFE, agreed).report.safe_point == 1


def test_a_worker_with_a_shorter_life_time() -> None:
    """Its safe point of gc_worker does not step back, and GC goes no further than our own life time allows."""
    pd = FakePd()
    pd.set_worker(pd.ago(60))
    ahead = pd.worker
    assert run_round(pd, LIFE, agreed).report.safe_point == pd.ago(LIFE)
    assert pd.worker == ahead
    pd.update_service_safe_point("late", 1000, pd.ago(30))
    pd.seconds += 60
    assert run_round(pd, LIFE, agreed).report.safe_point == pd.ago(LIFE)


def test_a_clock_that_went_back() -> None:
    """After PD was restored with an older time nothing moves, in either direction."""
    pd = FakePd()
    run_round(pd, LIFE, agreed)
    before = (pd.worker, pd.state.safe_point)
    pd.seconds -= 10_000
    assert not run_round(pd, LIFE, agreed).has_advanced
    assert (pd.worker, pd.state.safe_point) == before


@pytest.mark.parametrize("calls", [0, 1])
def test_a_candidate_that_does_not_lead_changes_nothing(calls: int) -> None:
    """The election is checked before each change; a loss after the first leaves the GC safe point unchanged."""
    pd, asked = FakePd(), list[int]()

    def confirm() -> None:
        asked.append(1)
        if len(asked) > calls:
            raise EtcdLeaseExpired("lost")

    with pytest.raises(EtcdLeaseExpired):
        run_round(pd, LIFE, confirm)
    assert (pd.worker > 0, pd.state.safe_point, pd.updates) == (calls > 0, 0, [])


def live(start_ts: int) -> LiveLock:
    """A lock of a transaction that is alive."""
    return LiveLock(b"xkey", start_ts, 20_000, 35.0)


def test_locks_are_resolved_before_gc_advances(pd: FakePd) -> None:
    """Up to where GC may go, after the safe point of gc_worker is registered; not again if GC cannot advance."""
    pd.update_service_safe_point("b", 3600, pd.ago(3600))
    asked = list[tuple[int, int, int]]()

    def resolve(safe_point: int) -> LockReport:
        asked.append((safe_point, pd.worker, pd.state.safe_point))
        return LockReport(3, (), frozenset())

    done = run_round(pd, LIFE, agreed, resolve)
    held, wanted = pd.ago(3600), pd.ago(LIFE)
    assert asked == [(held, held if pd.state.has_barriers else wanted, 0)]
    assert (pd.state.safe_point, done.locks.resolved) == (held, 3)
    assert "; resolved 3 locks" in describe(done)
    run_round(pd, LIFE, agreed, resolve)
    assert len(asked) == 1


def test_gc_stays_below_live_transactions(pd: FakePd) -> None:
    """Below the oldest one that still has a lock; if that is older than the GC safe point, that stays. Neither steps back."""
    oldest = pd.ago(LIFE + 60)

    def resolve(_safe_point: int) -> LockReport:
        return LockReport(0, (live(oldest), live(oldest + 5)), frozenset())

    done = run_round(pd, LIFE, agreed, resolve)
    assert pd.state.safe_point == oldest - 1
    assert f"the transaction that began at {oldest}" in describe(done)
    assert describe(done).endswith(", 35 s ago, with a TTL of 20 s holds it back")
    assert done.report.lock == live(oldest)
    pd.seconds += 60
    assert not run_round(pd, LIFE, agreed, resolve).has_advanced
    oldest = 5
    assert not run_round(pd, LIFE, agreed, resolve).has_advanced
    assert run_round(pd, LIFE, agreed).report.safe_point == pd.ago(LIFE)


def test_locks_that_cannot_be_resolved(pd: FakePd) -> None:
    """The GC safe point stays where it is."""

    def resolve(_safe_point: int) -> LockReport:
        raise ClusterUnreachable("a store is away")

    with pytest.raises(ClusterUnreachable):
        run_round(pd, LIFE, agreed, resolve)
    assert pd.updates == []


ACTION = st.tuples(st.integers(0, 3), st.integers(0, 3000), st.integers(0, 500))


@given(barriers=st.booleans(), moves=st.lists(st.tuples(ACTION, ACTION), max_size=25))
def test_gc_never_passes_a_service_and_never_steps_back(
    barriers: bool, moves: list[tuple[tuple[int, int, int], tuple[int, int, int]]]
) -> None:
    """Whatever services do between rounds and in the middle of one, with a second worker of another life time."""
    pd = FakePd(barriers=barriers)
    granted: dict[str, tuple[int, float]] = {}
    highest = 0

    def act(action: tuple[int, int, int]) -> None:
        who, back, ttl = action
        name, ts = f"service-{who}", pd.ago(back)
        minimum = pd.update_service_safe_point(name, ttl, ts)
        granted.pop(name, None)
        if ttl and minimum <= ts:  # as `safepoint.protect` reads the answer
            granted[name] = (ts, pd.seconds + ttl)

    for between, within in moves:
        pd.seconds += 37
        act(between)
        run_round(pd, LIFE if between[0] % 2 else LIFE / 4, partial(act, within))
        held = [ts for ts, end in granted.values() if end > pd.seconds]
        assert pd.state.safe_point <= min(held, default=pd.state.safe_point)
        assert pd.state.safe_point >= highest
        highest = pd.state.safe_point


def test_the_first_candidate_leads() -> None:
    """The second waits until the first is gone; one without a key gets an error, also if the key was created again."""
    etcd = FakeEtcd()
    with LeaseHolder(etcd, 60) as first, LeaseHolder(etcd, 60) as second:
        one, two = Candidate(etcd, first, "one"), Candidate(etcd, second, "two")
        two_key = f"{PREFIX}{second.lease:x}"
        one.join()
        two.join()
        one.join()  # its answer was lost
        assert (one.is_leader(), two.is_leader(), two.leader().value) == (True, False, b"one")
        with pytest.raises(EtcdLeaseExpired, match="another"):
            two.confirm(1)
        with pytest.raises(EtcdLeaseExpired, match="less than 100"):
            one.confirm(100)
        one.confirm(30)
        etcd.expire(first.lease)
        with pytest.raises(EtcdLeaseExpired):
            one.confirm(1)
        two.confirm(1)
        etcd.items[two_key] = KeyValue(two_key, b"two", 999, 999, second.lease)
        with pytest.raises(EtcdLeaseExpired, match="created again"):
            two.confirm(1)


def test_the_election_of_the_other_gc_worker() -> None:
    """A leader of tikv/migration's gc-worker, whose key is its lease in hex below /gc-worker/election/, keeps us waiting."""
    etcd = FakeEtcd()
    etcd.leases[0x7587] = 5
    etcd.items["/gc-worker/election/7587"] = KeyValue("/gc-worker/election/7587", b"local", 1, 1, 0x7587)
    etcd.revision = 10
    with LeaseHolder(etcd, 60) as lease:
        ours = Candidate(etcd, lease, "ours")
        ours.join()
        assert not ours.is_leader()
        assert ours.key == f"/gc-worker/election/{lease.lease:x}"
        etcd.expire(0x7587)
        assert ours.is_leader()


class Watched:
    """A worker in a thread, and what it showed."""

    def __init__(self, etcd: FakeEtcd, pd: FakePd) -> None:
        self.reports: list[GcReport] = []
        self.figures = WorkerFigures()
        self.error: Exception | None = None
        self.stop = threading.Event()
        self.refusal: ClusterError | None = None
        self.waits = False
        """Whether locks are waited for, without end."""
        self.retries = False
        """Whether that is in the retries of a request, which last long."""
        self.is_waiting = threading.Event()
        options = WorkerOptions(LIFE, interval=0.01, lease=2)
        self._worker = GcWorker(etcd, pd, options, self._show, check=self._check, resolve=self._resolve)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._worker.run(self.stop)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def _resolve(self, _safe_point: int, sleep: Callable[[float], None]) -> LockReport:
        while self.waits:
            self.is_waiting.set()
            (cancellation.sleep if self.retries else sleep)(3600.0 if self.retries else 0.01)
        return LockReport(0, (), frozenset())

    def _show(self, found: GcReport | None, figures: WorkerFigures) -> None:
        self.figures = figures
        if found is not None:
            self.reports.append(found)


def test_a_worker_survives_pd_and_etcd() -> None:
    """Rounds fail while PD is away; without its lease it is no leader, and it leads again with a new one."""
    pd, etcd = FakePd(), FakeEtcd()
    with Watched(etcd, pd) as worker:
        eventually(lambda: worker.figures.rounds > 1)
        pd.failure = ClusterUnreachable("PD is away")
        eventually(lambda: worker.figures.failures > 1)
        pd.failure = None
        before = worker.figures.rounds
        eventually(lambda: worker.figures.rounds > before)
        old = set(etcd.leases)
        etcd.failure = EtcdUnreachable("etcd is away")
        for lease in old:
            etcd.expire(lease)
        eventually(lambda: not worker.figures.is_leader)
        etcd.failure = None
        eventually(lambda: worker.figures.is_leader)
        assert not set(etcd.leases) & old
    assert not etcd.leases
    assert not etcd.items
    assert not worker.figures.is_leader
    assert worker.error is None


def test_a_round_that_must_not_be_done_changes_nothing() -> None:
    """A worker that has done GC stops doing it, and goes on once it may."""
    pd, etcd = FakePd(), FakeEtcd()
    with Watched(etcd, pd) as worker:
        eventually(lambda: worker.figures.rounds > 0)
        worker.refusal = ClusterUnfit("there are transactions now")
        eventually(lambda: worker.figures.failures > 0)
        pd.seconds += 60
        before = len(pd.updates)
        eventually(lambda: worker.figures.failures > 2)
        assert len(pd.updates) == before
        worker.refusal = None
        eventually(lambda: len(pd.updates) > before)
    assert worker.error is None


def test_a_worker_that_waits_for_locks() -> None:
    """It ends when it is stopped, and stops waiting when it has lost its lease; GC has not advanced then."""
    pd, etcd = FakePd(), FakeEtcd()
    worker = Watched(etcd, pd)
    worker.waits = True
    with worker:
        eventually(worker.is_waiting.is_set)
        old = set(etcd.leases)
        for lease in old:
            etcd.expire(lease)
        eventually(lambda: etcd.leases and not set(etcd.leases) & old)
        worker.is_waiting.clear()
        eventually(worker.is_waiting.is_set)
    assert pd.updates == []
    assert not etcd.items
    assert worker.error is None


def test_a_worker_that_is_stopped_while_a_store_is_away() -> None:
    """Its wait for the store ends at once, and nothing has changed."""
    pd, etcd = FakePd(), FakeEtcd()
    worker = Watched(etcd, pd)
    worker.waits = worker.retries = True
    with worker:
        eventually(worker.is_waiting.is_set)
    assert (pd.updates, etcd.items, worker.error) == ([], {}, None)


def test_permanent_errors_end_the_worker() -> None:
    """If the first round fails permanently, the command fails, and leaves the election."""
    pd, etcd = FakePd(), FakeEtcd()
    pd.failure = ClusterUnfit("the cluster is of another kind")
    with Watched(etcd, pd) as worker:
        eventually(lambda: worker.error is not None)
    assert isinstance(worker.error, ClusterUnfit)
    assert not etcd.items
