"""Requests of a backup of transactions: checksums beside locks and splits, and what must never be sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path

import pytest
from fastcrc import crc64

from tests.support.live_cluster import live_cluster
from tests.support.live_txns import ALIVE, NAMES, Txns, prefix_of
from tikv_br.cluster import store
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.txnkv import PrefixRule, txn_checksum
from tikv_br.errors import ClusterUnfit, ClusterUnreachable, DangerousRequest, LocksRemain
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import encode
from tikv_br.formats.keys.ranges import KeyRange


@pytest.fixture(params=[ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)
def txns(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Txns]:
    """An empty playground."""
    with live_cluster(tmp_path, request.param, stores=2) as live:
        yield Txns(live, prefix_of(live, "ks1"))


def expected(rows: Mapping[bytes, bytes], prefix: bytes) -> Checksum:
    """The checksum of rows, by names."""
    pairs = [prefix + name + value for name, value in rows.items()]
    return reduce(Checksum.merge, (Checksum(crc64.xz(pair), 1, len(pair)) for pair in pairs), Checksum())


def checksum(txns: Txns, locks: SnapshotLocks, rule: PrefixRule | None = None) -> Checksum:
    """The checksum of all rows at the timestamp of the locks."""
    return txn_checksum(txns.live.cluster, txns.span, locks, rule)


def test_checksums_beside_splits(txns: Txns) -> None:
    """They are those of the rows at their timestamp, whatever regions do and whatever is written later; with a rule as under another prefix."""
    start_ts = txns.prewrite(*NAMES)
    txns.commit(start_ts, *NAMES)
    rows = dict.fromkeys(NAMES, b"of %d" % start_ts)
    ts = txns.ts()
    later = txns.prewrite(*NAMES[::2])
    txns.commit(later, *NAMES[::2])
    cluster = txns.live.cluster
    with ThreadPoolExecutor(1) as pool:
        splits = pool.submit(lambda: [txns.live.split(encode(txns.key(name))) for name in NAMES[1::3]])
        counted = 0
        while not splits.done() or not counted:
            assert checksum(txns, SnapshotLocks(cluster, ts)) == expected(rows, txns.prefix)
            counted += 1
        splits.result()
    rows |= dict.fromkeys(NAMES[::2], b"of %d" % later)
    assert checksum(txns, SnapshotLocks(cluster, txns.ts())) == expected(rows, txns.prefix)
    rule = PrefixRule(old=b"elsewhere", new=txns.prefix)
    assert checksum(txns, SnapshotLocks(cluster, txns.ts()), rule) == expected(rows, b"elsewhere")
    part = KeyRange(txns.key(NAMES[3]), txns.key(NAMES[30]))
    inside = {name: rows[name] for name in NAMES[3:30]}
    assert txn_checksum(cluster, part, SnapshotLocks(cluster, txns.ts())) == expected(inside, txns.prefix)


@pytest.mark.core("backup")
def test_checksums_beside_locks(txns: Txns) -> None:
    """Transactions that ended are counted as they ended; live transactions commit later, and none of their rows is counted."""
    txns.live.split(*(encode(txns.key(name)) for name in NAMES[5::10]))
    first = txns.prewrite(*NAMES)
    txns.commit(first, *NAMES)
    committed = txns.prewrite(NAMES[0], NAMES[10], NAMES[20])
    txns.commit(committed, NAMES[0])
    txns.prewrite(NAMES[1], NAMES[11])
    complete = txns.async_prewrite(NAMES[2], NAMES[12])
    txns.lock_pessimistically(NAMES[3], ttl=ALIVE)
    live = txns.prewrite(NAMES[4], NAMES[14], NAMES[24], ttl=ALIVE)
    ending = txns.async_prewrite(NAMES[6], NAMES[16], ttl=ALIVE)
    time.sleep(0.01)
    locks = SnapshotLocks(txns.live.cluster, txns.ts())
    committer = threading.Timer(0.5, lambda: txns.commit(ending, NAMES[6], NAMES[16]))
    committer.start()
    found = checksum(txns, locks)
    committer.join()
    rows = dict.fromkeys(NAMES, b"of %d" % first)
    rows |= dict.fromkeys((NAMES[0], NAMES[10], NAMES[20]), b"of %d" % committed)
    rows |= dict.fromkeys((NAMES[2], NAMES[12]), b"of %d" % complete)
    assert found == expected(rows, txns.prefix)
    assert locks.resolved == {live}
    assert checksum(txns, SnapshotLocks(txns.live.cluster, locks.ts, locks.resolved)) == found
    txns.commit(live, NAMES[4], NAMES[14], NAMES[24])
    rows |= dict.fromkeys((NAMES[4], NAMES[14], NAMES[24]), b"of %d" % live)
    rows |= dict.fromkeys((NAMES[6], NAMES[16]), b"of %d" % ending)
    assert checksum(txns, SnapshotLocks(txns.live.cluster, txns.ts())) == expected(rows, txns.prefix)


def test_a_live_async_commit(txns: Txns) -> None:
    """Is waited for, then named; it is not harmed."""
    held = txns.async_prewrite(NAMES[0], NAMES[1], ttl=ALIVE)
    locks = SnapshotLocks(txns.live.cluster, txns.ts(), patience=0.2)
    with pytest.raises(LocksRemain, match=f"the transaction that began at {held} = "):
        checksum(txns, locks)
    assert locks.resolved == set()
    txns.commit(held, NAMES[0], NAMES[1])
    assert txns.written_by(NAMES[1]) == held


def test_a_bound_of_raw_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup of transactions over it is refused, and beside it is answered. Without the guard the store dies."""
    with live_cluster(tmp_path, ApiVersion.V1, stores=1) as live:
        txns = Txns(live, b"")
        txns.commit(txns.prewrite(b"a", b"s"), b"a", b"s")
        live.split(b"raw-5")
        client = live.cluster.store(1)

        def backup(start: bytes, end: bytes) -> list[brpb_pb2.BackupResponse]:
            request = brpb_pb2.BackupRequest(
                cluster_id=live.cluster.cluster_id,
                start_key=start,
                end_key=end,
                end_version=txns.ts(),
                storage_backend=brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=str(tmp_path))),
            )
            first, last = (encode(key) if key else b"" for key in (start, end))
            return list(client.backup(request, live.cluster.pd.scan_regions(first, last)))

        with pytest.raises(ClusterUnfit, match=r'the bound "raw-5" .* of region'):
            backup(b"", b"")
        with pytest.raises(DangerousRequest, match="empty range"):
            backup(b"a", b"a")
        (answer,) = backup(b"a", b"b")
        assert {file.cf for file in answer.files} == {"write"}
        live.assert_innocent()
        monkeypatch.setattr(store, "check_backup", lambda *_request: None)
        for number, ends in enumerate([(b"", b""), (b"a", b"a")], 1):
            with pytest.raises(ClusterUnreachable):
                backup(*ends)
            assert len(live.fatal_requests()) == number
        live.pardon()
