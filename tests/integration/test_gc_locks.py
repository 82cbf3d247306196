"""Locks of transactions, resolved on playgrounds with and without a prefix of keyspaces, and GC beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.live_txns import ALIVE, NAMES, Txns, prefix_of
from tikv_br.cluster.locks import LockReport, LockResolver
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.errors import ClusterUnfit
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import encode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.gc.worker import resolve_locks, run_round


@pytest.fixture(scope="module", params=[ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A playground with regions between the names."""
    with live_cluster(tmp_path_factory.mktemp("locks"), request.param, stores=2) as live:
        prefix = prefix_of(live, "ks1")
        live.split(*(encode(prefix + name) for name in NAMES[5::10]))
        yield live


@pytest.fixture
def txns(shared: LiveCluster) -> Iterator[Txns]:
    """Transactions without rows and locks before, in keyspace 1."""
    made = Txns(shared, prefix_of(shared, "ks1"))
    yield made
    made.clear()


@pytest.mark.core("gc")
def test_every_kind_of_lock_that_was_left(txns: Txns) -> None:
    """All are resolved in one go, over several regions, and every transaction is there as a whole, or not at all."""
    dead = txns.prewrite(*NAMES[0:10:4])
    committed = txns.prewrite(NAMES[1], NAMES[11], NAMES[21])
    txns.commit(committed, NAMES[1])
    complete = txns.async_prewrite(NAMES[2], NAMES[12], NAMES[22])
    txns.async_prewrite(NAMES[3], NAMES[13], NAMES[23], missing=1)
    txns.prewrite(NAMES[14], primary=NAMES[24])
    txns.lock_pessimistically(NAMES[15])
    many = txns.prewrite(*NAMES[25:])
    txns.commit(many, NAMES[25])
    assert dead != committed
    time.sleep(0.01)
    report = txns.resolve()
    assert (report.resolved, report.live) == (3 + 2 + 3 + 2 + 1 + 1 + 14, ())
    expected = dict.fromkeys(NAMES, 0)
    expected |= dict.fromkeys((NAMES[1], NAMES[11], NAMES[21]), committed)
    expected |= dict.fromkeys((NAMES[2], NAMES[12], NAMES[22]), complete)
    expected |= dict.fromkeys(NAMES[25:], many)
    assert {name: txns.written_by(name) for name in NAMES} == expected
    assert txns.resolve() == LockReport(0, (), frozenset())


@pytest.mark.parametrize("kind", ["two-phase", "async", "pessimistic", "primary still to come"])
def test_a_live_transaction_commits_afterwards(txns: Txns, kind: str) -> None:
    """Its locks stay and are named, whatever reader meets them; its client commits it."""
    names = NAMES[7], NAMES[17]
    begin: dict[str, Callable[[], int]] = {
        "two-phase": partial(txns.prewrite, *names, ttl=ALIVE),
        "async": partial(txns.async_prewrite, *names, ttl=ALIVE),
        "pessimistic": partial(txns.lock_pessimistically, names[0], ttl=ALIVE),
        "primary still to come": partial(txns.prewrite, names[1], primary=names[0], ttl=ALIVE),
    }
    start_ts = begin[kind]()
    (left,) = txns.resolve(patience=0.1).live
    assert (left.start_ts, left.ttl_ms, left.key in map(txns.key, names)) == (start_ts, ALIVE, True)
    if kind in {"two-phase", "async"}:
        txns.commit(start_ts, *names)
        assert [txns.written_by(name) for name in names] == [start_ts] * 2
    else:
        held = names[0] if kind == "pessimistic" else names[1]
        request = kv.TxnHeartBeatRequest(primary_lock=txns.key(held), start_version=start_ts, advise_lock_ttl=ALIVE)
        assert txns.call("KvTxnHeartBeat", txns.key(held), request).lock_ttl == ALIVE


def test_the_ttl_of_a_live_transaction(txns: Txns) -> None:
    """It is that of the primary lock, which the client keeps alive, also where only another lock is in the way."""
    start_ts = txns.prewrite(NAMES[7], NAMES[17], ttl=3000)
    request = kv.TxnHeartBeatRequest(primary_lock=txns.key(NAMES[7]), start_version=start_ts, advise_lock_ttl=ALIVE)
    assert txns.call("KvTxnHeartBeat", txns.key(NAMES[7]), request).lock_ttl == ALIVE
    second = KeyRange(txns.key(NAMES[17]), txns.key(NAMES[17]) + b"\0")
    (left,) = LockResolver(txns.live.cluster).resolve(second, txns.ts()).live
    assert (left.key, left.ttl_ms) == (txns.key(NAMES[17]), ALIVE)
    txns.commit(start_ts, NAMES[7], NAMES[17])


def test_a_transaction_that_ends_in_time(txns: Txns) -> None:
    """It is waited for: until its client commits it, or its TTL has ended."""
    start_ts = txns.prewrite(*NAMES[8:12], ttl=ALIVE)
    committer = threading.Timer(0.3, lambda: txns.commit(start_ts, *NAMES[8:12]))
    committer.start()
    assert txns.resolve(patience=60).live == ()
    committer.join()
    assert [txns.written_by(name) for name in NAMES[8:12]] == [start_ts] * 4
    txns.prewrite(*NAMES[8:12], ttl=500)
    assert txns.resolve(patience=60) == LockReport(4, (), frozenset())
    assert txns.written_by(NAMES[9]) == start_ts


def test_a_reader_pushes(txns: Txns) -> None:
    """A live two-phase transaction can then commit above the reader only. An async commit is not pushed, and never counts as pushed."""
    pushed = txns.prewrite(NAMES[4], NAMES[14], ttl=ALIVE)
    not_pushed = txns.async_prewrite(NAMES[5], NAMES[15], ttl=ALIVE)
    reader_ts = txns.ts()
    report = LockResolver(txns.live.cluster).resolve(txns.span, reader_ts, reader_ts=reader_ts)
    assert [each.start_ts for each in report.live] == [pushed, not_pushed]
    assert report.pushed == {pushed}
    request = kv.CommitRequest(start_version=pushed, keys=[txns.key(NAMES[4])], commit_version=reader_ts)
    assert txns.call("KvCommit", txns.key(NAMES[4]), request).error.HasField("commit_ts_expired")
    txns.commit(pushed, NAMES[4], NAMES[14])
    txns.commit(not_pushed, NAMES[5], NAMES[15])


def test_regions_that_split_meanwhile(tmp_path: Path) -> None:
    """Between two pages, so that a page's locks, and those to come, are in other regions than before."""
    with live_cluster(tmp_path, ApiVersion.V2, stores=2) as live:
        txns = Txns(live, b"x\0\0\1")
        start_ts = txns.prewrite(*NAMES)
        txns.commit(start_ts, NAMES[0])
        time.sleep(0.01)
        splits = iter([NAMES[30], NAMES[10], NAMES[20]])

        def split(_seconds: float) -> None:
            for name in splits:
                live.split(encode(txns.key(name)))
                break

        assert txns.resolve(sleep=split) == LockReport(len(NAMES) - 1, (), frozenset())
        assert {txns.written_by(name) for name in NAMES} == {start_ts}
        assert next(splits, None) is None


def test_raw_data_beside_transactions(tmp_path: Path) -> None:
    """Of API V1: a region that ends at a raw key is refused by name, and nothing is skipped silently."""
    with live_cluster(tmp_path, ApiVersion.V1, stores=1) as live:
        live.raw().put(b"raw-5", b"raw")
        txns = Txns(live, b"")
        txns.prewrite(NAMES[0])
        live.split(b"raw-5")
        with pytest.raises(ClusterUnfit, match="which is not a valid key"):
            txns.resolve()


def test_gc_stays_below_a_live_transaction(tmp_path: Path) -> None:
    """In any keyspace, while it lives; the locks of others are resolved, and old versions are kept only as long."""
    with live_cluster(tmp_path, ApiVersion.V2, stores=1) as live:
        here, there = Txns(live, b"x\0\0\1"), Txns(live, b"x\0\0\2")
        dead = here.prewrite(*NAMES[:3])
        alive = there.prewrite(NAMES[0], ttl=ALIVE)
        later = here.prewrite(*NAMES[3:6])
        here.commit(later, NAMES[3])
        time.sleep(0.01)
        pd = live.cluster.pd

        def resolve(safe_point: int) -> LockReport:
            return LockResolver(live.cluster).resolve(here.span, safe_point)

        done = run_round(pd, 0, lambda: None, resolve)
        assert (live.cluster.pd.gc_safe_point(), done.locks.resolved) == (alive - 1, 5)
        assert alive > dead
        assert [here.written_by(name) for name in NAMES[:6]] == [0] * 3 + [later] * 3
        there.commit(alive, NAMES[0])
        time.sleep(0.01)
        assert (
            run_round(
                pd, 0, lambda: None, partial(resolve_locks, live.cluster, sleep=lambda _seconds: None)
            ).report.safe_point
            > alive
        )
        assert minus_seconds(live.cluster.pd.tso(), 60) < live.cluster.pd.gc_safe_point()
