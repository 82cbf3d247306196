"""Checksums of transactional rows: what is requested after each answer of a store."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.cluster.fakes import KV, FakeCluster, region, region_error, with_leader
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.pb import coprocessor_pb2, errorpb_pb2, tipb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.txnkv import LAST_KEY, PrefixRule, txn_checksum
from tikv_br.errors import LocksRemain, RequestRefused, RetryBudgetExhausted
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import encode
from tikv_br.formats.keys.ranges import KeyRange

TS = 1000


def answer(number: int) -> coprocessor_pb2.Response:
    """A checksum of so many rows."""
    sums = tipb_pb2.ChecksumResponse(checksum=number, total_kvs=number, total_bytes=10 * number)
    return coprocessor_pb2.Response(data=sums.SerializeToString())


LATE = "Coprocessor task terminated due to exceeding the deadline"
TOO_SLOW = [
    coprocessor_pb2.Response(
        region_error=errorpb_pb2.Error(
            message=LATE, server_is_busy=errorpb_pb2.ServerIsBusy(reason="deadline is exceeded")
        )
    ),
    coprocessor_pb2.Response(other_error=LATE),
]
LOCK = kv.LockInfo(key=b"k", primary_lock=b"k", lock_version=5, lock_ttl=3000, min_commit_ts=6)
LOCKED = coprocessor_pb2.Response(locked=LOCK)


class Store:
    """A scripted store of API V1, with three regions."""

    def __init__(self, fake: FakeCluster) -> None:
        self.fake = fake
        bounds = [b"", encode(b"g"), encode(b"p"), b""]
        fake.regions = [with_leader(region(at, *ends)) for at, ends in enumerate(itertools.pairwise(bounds), 1)]
        self._cluster = Cluster.connect(fake.config())
        fake.kv("KvScanLock", kv.ScanLockResponse())

    def checksum(
        self, start: bytes = b"", end: bytes = b"", rule: PrefixRule | None = None, *, resolved: tuple[int, ...] = ()
    ) -> Checksum:
        """The checksum of a range."""
        cluster = SimpleNamespace(
            router=self._cluster.router,
            api_version=ApiVersion.V1,
            cluster_id=7,
            config=self._cluster.config,
            pd=SimpleNamespace(tso=lambda: TS),
        )
        locks = SnapshotLocks(cast("Cluster", cluster), TS, resolved, patience=0)
        return txn_checksum(cast("Cluster", cluster), KeyRange(start, end), locks, rule)

    def requests(self) -> list[coprocessor_pb2.Request]:
        """The requests for checksums so far."""
        return self.fake.stores[1].seen(KV + "Coprocessor", coprocessor_pb2.Request)

    def ranges(self) -> list[tuple[bytes, bytes]]:
        """The ranges of the requests so far."""
        return [(each.ranges[0].start, each.ranges[0].end) for each in self.requests()]


@pytest.fixture
def store(fake: FakeCluster) -> Store:
    """One scripted store."""
    return Store(fake)


def test_a_request_for_each_region(store: Store) -> None:
    """Each gets its part; the last one has an end even if the range has none. Parts are added up."""
    store.fake.kv("Coprocessor", answer(1), answer(2), answer(4))
    assert store.checksum(resolved=(8, 5)) == Checksum(7, 7, 70)
    assert store.ranges() == [(b"", b"g"), (b"g", b"p"), (b"p", LAST_KEY)]
    for each in store.requests():
        assert (each.tp, each.start_ts, list(each.context.resolved_locks)) == (105, TS, [5, 8])
        sent = tipb_pb2.ChecksumRequest.FromString(each.data)
        assert (sent.scan_on, sent.algorithm, sent.HasField("rule")) == (tipb_pb2.Table, tipb_pb2.Crc64_Xor, False)


def test_parts_and_no_range(store: Store) -> None:
    """A range within a region is one request; an empty one is none."""
    store.fake.kv("Coprocessor", answer(3))
    assert store.checksum(b"h", b"i", PrefixRule(old=b"", new=b"h")) == Checksum(3, 3, 30)
    assert store.ranges() == [(b"h", b"i")]
    rule = tipb_pb2.ChecksumRequest.FromString(store.requests()[0].data).rule
    assert (rule.old_prefix, rule.new_prefix, rule.HasField("old_prefix")) == (b"", b"h", True)
    assert store.checksum(b"h", b"h") == Checksum()
    assert len(store.requests()) == 1


def test_regions_that_move(store: Store) -> None:
    """A region error is retried; what has been counted is not counted again."""
    moved = coprocessor_pb2.Response(region_error=region_error(not_leader=errorpb_pb2.NotLeader()))
    store.fake.kv("Coprocessor", answer(1), moved, answer(2), answer(4))
    assert store.checksum() == Checksum(7, 7, 70)
    assert store.ranges() == [(b"", b"g"), (b"g", b"p"), (b"g", b"p"), (b"p", LAST_KEY)]


def test_locks_are_resolved(store: Store) -> None:
    """Those of the region's part; then it is requested again."""
    store.fake.kv("Coprocessor", answer(1), LOCKED, LOCKED, answer(2), answer(4))
    store.fake.kv("KvScanLock", kv.ScanLockResponse(), kv.ScanLockResponse(locks=[LOCK]))
    store.fake.kv("KvCheckTxnStatus", kv.CheckTxnStatusResponse(lock_ttl=1, action=kv.MinCommitTSPushed))
    assert store.checksum(b"a", b"z") == Checksum(7, 7, 70)
    scans = store.fake.stores[1].seen(KV + "KvScanLock", kv.ScanLockRequest)
    assert [(each.start_key, each.end_key, each.max_version) for each in scans] == [(b"g", b"p", TS)] * 2
    assert [list(each.context.resolved_locks) for each in store.requests()] == [[], [], [], [5], [5]]


def test_locks_that_stay(store: Store) -> None:
    """Live transactions are named in the error; if none is found, the retry budget ends the request."""
    store.fake.kv("Coprocessor", LOCKED)
    store.fake.kv("KvScanLock", kv.ScanLockResponse(locks=[LOCK]))
    store.fake.kv("KvCheckTxnStatus", kv.CheckTxnStatusResponse(lock_ttl=1, lock_info=LOCK))
    with pytest.raises(LocksRemain, match="the lock at key 6b "):
        store.checksum()


def test_locks_that_nobody_sees(fake: FakeCluster) -> None:
    """The retry budget ends the requests."""
    fake.config = lambda **changes: FakeCluster.config(fake, **({"retry_budget": 0.2} | changes))  # type: ignore[method-assign]
    store = Store(fake)
    fake.kv("Coprocessor", LOCKED)
    with pytest.raises(RetryBudgetExhausted, match=r"locked key in \[start, 67\)"):
        store.checksum()


def row(key: bytes) -> kv.ScanResponse:
    """The answer of a scan that finds a row."""
    return kv.ScanResponse(pairs=[kv.KvPair(key=key)])


@pytest.mark.parametrize("late", TOO_SLOW, ids=["busy", "other"])
def test_a_slow_range_is_halved(store: Store, late: coprocessor_pb2.Response) -> None:
    """Between the first and the last row, as often as needed; a row that is locked counts. The parts are the range."""
    store.fake.kv("Coprocessor", late, late, answer(1), answer(2), answer(4), answer(8), answer(16))
    locked = kv.ScanResponse(pairs=[kv.KvPair(error=kv.KeyError(locked=kv.LockInfo(key=b"a1")))])
    store.fake.kv("KvScan", row(b"a1"), row(b"a9"), locked, row(b"a4"))
    assert store.checksum(b"", b"q") == Checksum(31, 31, 310)
    cut = [(b"", b"a2\x80"), (b"a2\x80", b"a5"), (b"a5", b"g"), (b"g", b"p"), (b"p", b"q")]
    assert store.ranges() == [(b"", b"g"), (b"", b"a5"), *cut]
    scans = store.fake.stores[1].seen(KV + "KvScan", kv.ScanRequest)
    assert [(each.start_key, each.end_key, each.reverse) for each in scans] == [
        (b"", b"g", False),
        (b"g", b"", True),
        (b"", b"a5", False),
        (b"a5", b"", True),
    ]
    assert {(each.version, each.limit, each.key_only) for each in scans} == {(TS, 1, True)}


def test_rows_that_cannot_be_halved(store: Store) -> None:
    """One row, or none: the range is named."""
    store.fake.kv("Coprocessor", TOO_SLOW[0])
    for answers in ([row(b"key")], [kv.ScanResponse()]):
        store.fake.kv("KvScan", *answers)
        with pytest.raises(RetryBudgetExhausted, match=r"the checksum of \[start, 67\) within 60 s"):
            store.checksum()


def test_errors_of_the_rows(store: Store) -> None:
    """They are raised as the store said them; missing values are explained."""
    store.fake.kv("Coprocessor", coprocessor_pb2.Response(other_error="anything else"))
    with pytest.raises(RequestRefused, match="anything else"):
        store.checksum()
    store.fake.kv("Coprocessor", coprocessor_pb2.Response(other_error="default not found: key:6B"))
    with pytest.raises(
        RequestRefused, match="values of transactions are missing in the cluster: default not found: key:6B"
    ):
        store.checksum()
