"""Locks of transactions: what is asked, decided and sent for each answer of a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.cluster.fakes import KV, FakeCluster, region, region_error, with_leader
from tikv_br.cluster import locks, txn_calls
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import LockReport, LockResolver, SnapshotLocks
from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.timestamps import MAX_TS, compose
from tikv_br.errors import LocksRemain, RequestRefused
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode, encode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange

NOW_MS = 1_800_000_000_000
NOW = compose(NOW_MS, 7)
"""PD's timestamp."""
OLD = compose(NOW_MS - 60_000)
"""Start of a transaction whose TTL has ended."""
TTL = 3000
ALIVE = 120_000
"""TTL of one that is alive."""
COMMIT = OLD + 5


def lock(key: bytes, start_ts: int = OLD, primary: bytes = b"p", **fields: object) -> kv.LockInfo:
    """A lock as a scan shows it."""
    values = {"lock_ttl": TTL, "min_commit_ts": start_ts + 1} | fields
    return kv.LockInfo(key=key, primary_lock=primary, lock_version=start_ts, **values)  # type: ignore[arg-type]


def found(*held: kv.LockInfo) -> kv.ScanLockResponse:
    """A store's answer to a scan."""
    return kv.ScanLockResponse(locks=held)


def error(**fields: object) -> kv.KeyError:
    """An error about a key."""
    return kv.KeyError(**fields)  # type: ignore[arg-type]


COMMITTED = kv.CheckTxnStatusResponse(commit_version=COMMIT)
ROLLED_BACK = kv.CheckTxnStatusResponse(action=kv.TTLExpireRollback)


class Store:
    """A scripted store, and a resolver whose time passes only while it sleeps."""

    def __init__(self, fake: FakeCluster, version: ApiVersion = ApiVersion.V2) -> None:
        self.fake = fake
        self.now = NOW
        self.seconds = 0.0
        self.on_sleep: Callable[[], None] = lambda: None
        for method, answer in (
            ("KvScanLock", kv.ScanLockResponse()),
            ("KvResolveLock", kv.ResolveLockResponse()),
            ("KVPessimisticRollback", kv.PessimisticRollbackResponse()),
        ):
            fake.kv(method, answer)
        router = Cluster.connect(fake.config()).router
        pd = SimpleNamespace(tso=lambda: self.now)
        connected = SimpleNamespace(router=router, api_version=version, cluster_id=7, pd=pd)
        self.cluster = cast("Cluster", connected)
        self.resolver = LockResolver(self.cluster, sleep=self._sleep, clock=lambda: self.seconds)

    def _sleep(self, seconds: float) -> None:
        if seconds:
            self.seconds += seconds
            self.now += compose(round(seconds * 1000))
            self.on_sleep()

    def scan(self, *answers: kv.ScanLockResponse) -> None:
        """What scans find, one answer after another; after them nothing."""
        self.fake.kv("KvScanLock", *answers, kv.ScanLockResponse())

    def resolve(self, reader_ts: int = 0, patience: float = 0.0) -> LockReport:
        """Resolve everything of mode x up to now."""
        return self.resolver.resolve(KeyMode.TXN.keys, NOW, reader_ts=reader_ts, patience=patience)

    def scans(self) -> list[kv.ScanLockRequest]:
        """The requests so far."""
        return self.fake.stores[1].seen(KV + "KvScanLock", kv.ScanLockRequest)

    def checks(self) -> list[kv.CheckTxnStatusRequest]:
        """The requests so far."""
        return self.fake.stores[1].seen(KV + "KvCheckTxnStatus", kv.CheckTxnStatusRequest)

    def ended(self) -> list[tuple[int, int, list[bytes]]]:
        """Start ts, commit ts and keys of the requests to resolve so far."""
        seen = self.fake.stores[1].seen(KV + "KvResolveLock", kv.ResolveLockRequest)
        return [(each.start_version, each.commit_version, list(each.keys)) for each in seen]

    def rolled_back(self) -> list[kv.PessimisticRollbackRequest]:
        """The requests to remove pessimistic locks so far."""
        return self.fake.stores[1].seen(KV + "KVPessimisticRollback", kv.PessimisticRollbackRequest)


@pytest.fixture
def store(fake: FakeCluster) -> Store:
    """One store with one region."""
    return Store(fake)


@pytest.mark.parametrize(("status", "commit_ts"), [(COMMITTED, COMMIT), (ROLLED_BACK, 0)])
def test_locks_of_ended_transactions(store: Store, status: kv.CheckTxnStatusResponse, commit_ts: int) -> None:
    """Are ended as the primary was; the primary is asked once for all of them, at a fresh timestamp of PD."""
    store.scan(found(lock(b"xa"), lock(b"xb"), lock(b"xc", OLD + 1)))
    store.fake.kv("KvCheckTxnStatus", status)
    assert store.resolve() == LockReport(3, (), frozenset())
    assert store.ended() == [(OLD, commit_ts, [b"xa", b"xb"]), (OLD + 1, commit_ts, [b"xc"])]
    checks = store.checks()
    assert [(each.primary_key, each.lock_ts, each.current_ts) for each in checks] == [
        (b"p", OLD, NOW),
        (b"p", OLD + 1, NOW),
    ]
    assert all(each.verify_is_primary and each.caller_start_ts == 0 for each in checks)
    (scan,) = store.scans()
    assert (scan.start_key, scan.end_key, scan.max_version) == (b"x", b"y", NOW)
    assert store.resolve() == LockReport(0, (), frozenset())
    assert len(store.checks()) == 2


def test_many_locks_of_a_transaction(store: Store) -> None:
    """The store looks for them itself."""
    store.scan(found(*(lock(b"x%03d" % number) for number in range(txn_calls.LITE_LOCKS + 1))))
    store.fake.kv("KvCheckTxnStatus", COMMITTED)
    assert store.resolve().resolved == txn_calls.LITE_LOCKS + 1
    assert store.ended() == [(OLD, COMMIT, [])]


def test_pages(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full page is followed by one that starts after its last key."""
    monkeypatch.setattr(locks, "PAGE_LOCKS", 2)
    store.scan(found(lock(b"xa"), lock(b"xb")), found(lock(b"xc")))
    store.fake.kv("KvCheckTxnStatus", COMMITTED)
    assert store.resolve().resolved == 3
    assert [(each.start_key, each.limit) for each in store.scans()] == [(b"x", 2), (b"xb\0", 2)]


def alive(**fields: object) -> kv.CheckTxnStatusResponse:
    """The answer for a transaction that is alive."""
    return kv.CheckTxnStatusResponse(lock_ttl=ALIVE, lock_info=lock(b"p", **fields))  # type: ignore[arg-type]


def test_a_live_transaction_stays(store: Store) -> None:
    """Its oldest lock is named, with key, start and TTL; others are resolved beside it."""
    held, dead = lock(b"xk" + bytes(300), lock_ttl=ALIVE), lock(b"xa", OLD - 1)
    store.scan(found(dead, lock(b"xb", OLD + 9, lock_ttl=ALIVE), held))
    store.fake.kv("KvCheckTxnStatus", COMMITTED, alive(), alive())
    report = store.resolve()
    assert (report.resolved, [each.start_ts for each in report.live], report.pushed) == (1, [OLD, OLD + 9], frozenset())
    shown = str(report.live[0])
    assert f"the transaction that began at {OLD} = 2027-01-15 07:59:00 UTC" in shown
    assert "with a TTL of 120 s" in shown
    assert "(302 bytes)" in shown
    assert len(shown) < 350
    assert store.ended() == [(OLD - 1, COMMIT, [b"xa"])]


def test_live_transactions_are_waited_for(fake: FakeCluster) -> None:
    """Only the regions with their locks are looked at again, until they have ended or the time is over."""
    fake.regions = [
        with_leader(region(1, b"", encode(b"xg"))),
        with_leader(region(2, encode(b"xg"), encode(b"xm"))),
        with_leader(region(3, encode(b"xm"), b"")),
    ]
    store = Store(fake)
    held = found(lock(b"xh", lock_ttl=ALIVE))
    fake.kv("KvScanLock", found(), held, found(), held, held, found())
    fake.kv("KvCheckTxnStatus", alive())
    assert store.resolve(patience=20) == LockReport(0, (), frozenset())
    assert [each.start_key for each in store.scans()] == [b"x", b"xg", b"xm", *[b"xg"] * 3]
    assert store.seconds == 3
    fake.kv("KvScanLock", held)
    assert [each.start_ts for each in store.resolve(patience=5).live] == [OLD]
    assert store.seconds == 8


def test_work_that_is_stopped(store: Store) -> None:
    """What the sleep raises ends a wait."""
    store.fake.kv("KvScanLock", found(lock(b"xh", lock_ttl=ALIVE)))
    store.fake.kv("KvCheckTxnStatus", alive())

    def stop() -> None:
        raise InterruptedError

    store.on_sleep = stop
    with pytest.raises(InterruptedError):
        store.resolve(patience=20)


def test_readers_push_live_transactions(store: Store) -> None:
    """One that must commit later is not waited for. One of async commit is: the store does not push it."""
    pushed, not_pushed = lock(b"xa", lock_ttl=ALIVE), lock(b"xb", OLD + 1, lock_ttl=ALIVE, use_async_commit=True)
    store.fake.kv("KvScanLock", found(pushed, not_pushed), found(pushed))
    answer = alive()
    answer.action = kv.MinCommitTSPushed
    store.fake.kv("KvCheckTxnStatus", answer, alive(use_async_commit=True), answer)
    report = store.resolve(reader_ts=OLD + 3, patience=5)
    assert ([each.start_ts for each in report.live], set(report.pushed)) == ([OLD], {OLD})
    assert store.seconds == 1
    assert {each.caller_start_ts for each in store.checks()} == {OLD + 3}
    assert store.ended() == []


READER = OLD + 3
NOT_IN_THE_WAY = [
    lock(b"xa", lock_ttl=ALIVE, lock_type=kv.PessimisticLock),
    lock(b"xb", lock_ttl=ALIVE, lock_type=kv.Lock),
    lock(b"xc", lock_ttl=ALIVE, min_commit_ts=READER + 1),
    lock(b"xd", lock_ttl=ALIVE, min_commit_ts=READER + 1, use_async_commit=True),
    lock(b"xe", lock_ttl=ALIVE, lock_type=7),  # shared, of newer stores
]


def test_locks_that_no_reader_minds(store: Store) -> None:
    """Nothing is asked about them; GC must not pass them."""
    store.scan(found(*NOT_IN_THE_WAY))
    assert store.resolve(reader_ts=READER, patience=60) == LockReport(0, (), frozenset())
    assert (store.checks(), store.seconds) == ([], 0)
    for held in NOT_IN_THE_WAY:
        store.scan(found(held))
        store.fake.kv("KvCheckTxnStatus", alive())
        assert len(store.resolve().live) == 1


@pytest.mark.parametrize("lock_type", [kv.Put, kv.Del])
def test_locks_that_a_reader_minds(store: Store, lock_type: kv.Op.ValueType) -> None:
    """A put or delete that may commit at the reader's timestamp, also if the store does not know from when on."""
    locks_ = [lock(b"xa", lock_type=lock_type, min_commit_ts=ts) for ts in (READER, OLD + 1, 0)]
    store.scan(*(found(held) for held in locks_))
    store.fake.kv("KvCheckTxnStatus", COMMITTED)
    assert [store.resolve(reader_ts=READER).resolved for _ in locks_] == [1, 1, 1]


def test_a_snapshot(store: Store) -> None:
    """Pushed transactions are passed over from then on, ended ones are resolved; both up to the snapshot's timestamp only."""
    pushed = alive()
    pushed.action = kv.MinCommitTSPushed
    store.scan(found(lock(b"xa", lock_ttl=ALIVE), lock(b"xb", OLD + 1)), found(lock(b"xc", OLD + 2, lock_ttl=ALIVE)))
    store.fake.kv("KvCheckTxnStatus", pushed, COMMITTED, pushed)
    snapshot = SnapshotLocks(store.cluster, READER, [5], patience=0)
    assert (snapshot.clear(KeyRange(b"xa", b"xc")), snapshot.resolved) == (1, {5, OLD})
    assert (snapshot.clear(KeyRange(b"xc", b"xd")), snapshot.resolved) == (0, {5, OLD, OLD + 2})
    assert [(each.max_version, each.start_key, each.end_key) for each in store.scans()] == [
        (READER, b"xa", b"xc"),
        (READER, b"xc", b"xd"),
    ]
    assert {each.caller_start_ts for each in store.checks()} == {READER}


def test_a_snapshot_behind_live_async_commits(store: Store) -> None:
    """The error names the oldest ones with key, start and age. They never count as passed over."""
    held = [lock(b"x%02d" % age, OLD - age, lock_ttl=ALIVE, use_async_commit=True) for age in range(5)]
    store.fake.kv("KvScanLock", found(*held))
    answer = alive(use_async_commit=True)
    answer.action = kv.MinCommitTSPushed
    store.fake.kv("KvCheckTxnStatus", answer)
    snapshot = SnapshotLocks(store.cluster, READER, patience=0)
    with pytest.raises(LocksRemain) as remain:
        snapshot.clear(KeyRange(b"x", b"y"))
    assert snapshot.resolved == set()
    said = remain.value.message
    assert said.startswith(f"after 0 s live transactions still hold locks below {READER} = ")
    assert said.index("key 783034 ") < said.index("key 783033 ") < said.index("key 783032 ")
    assert said.endswith("; and 2 more")
    assert f"began at {OLD - 4} = " in said
    assert " UTC, 60 s ago, with a TTL of 120 s" in said
    assert remain.value.exit_code == 17


def test_a_primary_that_is_missing(store: Store) -> None:
    """Within the lock's TTL it may still come; after it, the store may roll back the transaction in its place."""
    missing = kv.CheckTxnStatusResponse(error=error(txn_not_found=kv.TxnNotFound(start_ts=OLD, primary_key=b"p")))
    store.fake.kv("KvScanLock", found(lock(b"xa", lock_ttl=62_000)))
    store.fake.kv("KvCheckTxnStatus", missing)
    assert len(store.resolve().live) == 1
    store.fake.kv("KvCheckTxnStatus", missing, missing, missing, ROLLED_BACK)
    store.on_sleep = lambda: store.scan(found(lock(b"xa", lock_ttl=62_000))) if store.seconds == 3 else None
    assert store.resolve(patience=20).live == ()
    assert [each.rollback_if_not_exist for each in store.checks()] == [False] * 4 + [True]
    assert store.ended() == [(OLD, 0, [b"xa"])]


def secondaries(*answers: kv.LockInfo, commit_ts: int = 0) -> kv.CheckSecondaryLocksResponse:
    """The answer for secondary keys."""
    return kv.CheckSecondaryLocksResponse(locks=answers, commit_ts=commit_ts)


@pytest.mark.parametrize(
    ("answer", "commit_ts"),
    [
        (
            secondaries(
                lock(b"xa", use_async_commit=True, min_commit_ts=OLD + 9),
                lock(b"xb", use_async_commit=True, min_commit_ts=OLD + 4),
            ),
            OLD + 9,
        ),
        (secondaries(lock(b"xb", use_async_commit=True, min_commit_ts=OLD + 4)), 0),
        (secondaries(commit_ts=COMMIT), COMMIT),
    ],
    ids=["complete", "one missing", "one committed"],
)
def test_async_commit_after_its_ttl(store: Store, answer: kv.CheckSecondaryLocksResponse, commit_ts: int) -> None:
    """It is committed at the largest least commit ts if every key is locked, else as the missing key was."""
    primary = lock(b"p", use_async_commit=True, min_commit_ts=OLD + 2, secondaries=[b"xb", b"xa"])
    store.scan(found(lock(b"xa", use_async_commit=True)))
    store.fake.kv("KvCheckTxnStatus", kv.CheckTxnStatusResponse(lock_ttl=TTL, lock_info=primary))
    store.fake.kv("KvCheckSecondaryLocks", answer)
    assert store.resolve() == LockReport(1, (), frozenset())
    assert store.ended() == [(OLD, commit_ts, [b"xa"])]
    (asked,) = store.fake.stores[1].seen(KV + "KvCheckSecondaryLocks", kv.CheckSecondaryLocksRequest)
    assert (list(asked.keys), asked.start_version) == ([b"xa", b"xb"], OLD)


def test_async_commit_within_its_ttl(store: Store) -> None:
    """It is alive: its other keys are not asked for, which would roll back what is still to be locked."""
    store.scan(found(lock(b"xa", use_async_commit=True)))
    store.fake.kv("KvCheckTxnStatus", alive(use_async_commit=True, secondaries=[b"xa"]))
    assert len(store.resolve().live) == 1
    assert store.ended() == []


def test_async_commit_that_became_two_phase(store: Store) -> None:
    """If a key was locked without async commit, the primary alone decides."""
    primary = lock(b"p", use_async_commit=True, secondaries=[b"xa"])
    store.scan(found(lock(b"xa")))
    store.fake.kv("KvCheckTxnStatus", kv.CheckTxnStatusResponse(lock_ttl=TTL, lock_info=primary), ROLLED_BACK)
    store.fake.kv("KvCheckSecondaryLocks", secondaries(lock(b"xa")))
    assert store.resolve().resolved == 1
    assert [each.force_sync_commit for each in store.checks()] == [False, True]
    assert store.ended() == [(OLD, 0, [b"xa"])]


@pytest.mark.parametrize(
    "status",
    [
        kv.CheckTxnStatusResponse(action=kv.TTLExpirePessimisticRollback),
        kv.CheckTxnStatusResponse(action=kv.LockNotExistDoNothing),
        kv.CheckTxnStatusResponse(error=error(primary_mismatch=kv.PrimaryMismatch(lock_info=lock(b"p")))),
        COMMITTED,
    ],
    ids=["expired", "no primary", "another primary", "committed"],
)
def test_pessimistic_locks(store: Store, status: kv.CheckTxnStatusResponse) -> None:
    """Of a transaction that has ended they go without a trace; that decides nothing about its other locks."""
    pessimistic = lock(b"xa", lock_type=kv.PessimisticLock, lock_for_update_ts=OLD + 3)
    store.scan(found(pessimistic), found(lock(b"xb")))
    store.fake.kv("KvCheckTxnStatus", status, COMMITTED)
    assert store.resolve().resolved == 1
    (sent,) = store.rolled_back()
    assert (sent.start_version, sent.for_update_ts, list(sent.keys)) == (OLD, OLD + 3, [b"xa"])
    assert store.checks()[0].resolving_pessimistic_lock
    assert store.resolve().resolved == 1
    assert len(store.checks()) == (1 if status is COMMITTED else 2)
    assert store.ended() == [(OLD, COMMIT, [b"xb"])]


def test_live_pessimistic_locks_stay(store: Store) -> None:
    """Also if their primary is another one: the TTL of the lock itself has not ended."""
    held = lock(b"xa", lock_type=kv.PessimisticLock, lock_ttl=ALIVE)
    store.scan(found(held), found(held))
    mismatch = error(primary_mismatch=kv.PrimaryMismatch(lock_info=lock(b"p")))
    store.fake.kv("KvCheckTxnStatus", alive(), kv.CheckTxnStatusResponse(error=mismatch))
    assert len(store.resolve().live) == len(store.resolve().live) == 1
    assert store.rolled_back() == []


def test_a_pessimistic_lock_of_an_old_store(store: Store) -> None:
    """One that does not say its for-update ts is removed whatever that is."""
    store.scan(found(lock(b"xa", lock_type=kv.PessimisticLock)))
    store.fake.kv("KvCheckTxnStatus", ROLLED_BACK)
    store.resolve()
    assert [each.for_update_ts for each in store.rolled_back()] == [MAX_TS]


def test_locks_in_memory_are_waited_for(store: Store) -> None:
    """A transaction that is just being written has no lock to be resolved: the region is asked again."""
    written = kv.ScanLockResponse(error=error(locked=lock(b"xa")))
    store.scan(written, written, found(lock(b"xb")))
    store.fake.kv("KvCheckTxnStatus", COMMITTED)
    assert store.resolve().resolved == 1
    assert len(store.scans()) == 3


def test_a_region_that_splits_before_its_locks_are_resolved(fake: FakeCluster) -> None:
    """Each new region gets its own keys."""
    store = Store(fake)
    left, right = region(1, b"", encode(b"xb"), version=2), region(2, encode(b"xb"), b"", version=2)
    moved = region_error(epoch_not_match=errorpb_pb2.EpochNotMatch(current_regions=[left, right]))
    store.scan(found(lock(b"xa"), lock(b"xb"), lock(b"xc")))
    fake.kv("KvCheckTxnStatus", COMMITTED)

    def answer(data: bytes) -> kv.ResolveLockResponse:
        fake.regions = [with_leader(left), with_leader(right)]
        is_old = kv.ResolveLockRequest.FromString(data).context.region_epoch.version == 1
        return kv.ResolveLockResponse(region_error=moved if is_old else None)

    fake.kv("KvResolveLock", answer)
    assert store.resolve().resolved == 3
    assert [keys for _, _, keys in store.ended()] == [[b"xa", b"xb", b"xc"], [b"xa"], [b"xb", b"xc"]]


def test_api_v1(fake: FakeCluster) -> None:
    """Keys have no prefix there, and bounds are memcomparable all the same."""
    fake.regions = [with_leader(region(1, b"", encode(b"m"))), with_leader(region(2, encode(b"m"), b""))]
    store = Store(fake, ApiVersion.V1)
    assert store.resolver.resolve(EVERY_KEY, NOW).resolved == 0
    assert [(each.start_key, each.end_key) for each in store.scans()] == [(b"", b"m"), (b"m", b"")]
    assert {each.context.api_version for each in store.scans()} == {kv.V1}


def check(failure: kv.KeyError) -> Sequence[tuple[str, object]]:
    """A script in which the primary cannot be asked."""
    return [("KvCheckTxnStatus", kv.CheckTxnStatusResponse(error=failure))]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (check(error(primary_mismatch=kv.PrimaryMismatch())), "CheckTxnStatus: a store answered primary_mismatch"),
        (check(error(abort="broken")), "broken"),
        (
            [
                ("KvCheckTxnStatus", COMMITTED),
                ("KvResolveLock", kv.ResolveLockResponse(error=error(retryable="TxnLockNotFound"))),
            ],
            "TxnLockNotFound",
        ),
        ([("KvScanLock", kv.ScanLockResponse(error=error(conflict=kv.WriteConflict())))], "ScanLock: .*conflict"),
    ],
)
def test_errors_that_the_protocol_does_not_have(store: Store, script: Sequence[tuple[str, object]], text: str) -> None:
    """They are raised with what the store said, and nothing is resolved."""
    store.fake.kv("KvScanLock", found(lock(b"xa")))
    for method, answer in script:
        store.fake.kv(method, answer)  # type: ignore[arg-type]
    with pytest.raises(RequestRefused, match=text):
        store.resolve()
