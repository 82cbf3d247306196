"""Transactions of the playground, request by request: what readers see, and what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastcrc import crc64

from tests.integration.playground.clients import Client, running
from tests.integration.playground.ssts import backup, download_everywhere, files_of, ingest, local, meta_for
from tests.support.txn import TTL, TxnClient, delete, put
from tests.support.waiting import eventually
from tikv_br.cluster.pb import brpb_pb2, coprocessor_pb2, import_sstpb_pb2, tikvpb_pb2, tipb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground.scheduler import KEYSPACE_BOUNDS

LONG = b"long" * 100


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TxnClient]:
    """A playground of V2 that the tests share, each with keys of its own."""
    with running(tmp_path_factory.mktemp("txn"), ApiVersion.V2, stores=2) as client:
        yield TxnClient(client)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> bytes:
    """The prefix of a test's keys, in keyspace 1."""
    return b"x\0\0\1%s/" % str(request.node.name).encode()


def lock_of(answer: kv.PrewriteResponse | kv.GetResponse) -> kv.LockInfo:
    """The lock that stopped a request."""
    error = answer.errors[0] if isinstance(answer, kv.PrewriteResponse) else answer.error
    assert error.HasField("locked"), answer
    return error.locked


def test_a_commit_is_seen_from_its_timestamp_on(shared: TxnClient, key: bytes) -> None:
    """Versions, a delete, a long value, and none of a transaction that is rolled back."""
    first = shared.write(put(key, b""))
    second = shared.write(put(key, LONG))
    third = shared.write(delete(key))
    start_ts = shared.ts()
    shared.prewrite(start_ts, [put(key, b"never")])
    rollback = kv.BatchRollbackRequest(keys=[key], start_version=start_ts)
    assert shared.call("KvBatchRollback", key, rollback) == kv.BatchRollbackResponse()
    seen = [shared.get(key, ts) for ts in (first - 1, first, second - 1, second, third, start_ts + 1)]
    none, empty, long = kv.GetResponse(not_found=True), kv.GetResponse(value=b""), kv.GetResponse(value=LONG)
    assert seen == [none, empty, empty, long, none, none]
    error = shared.commit(start_ts, shared.ts(), key)
    assert error is not None
    assert "TxnLockNotFound" in error.retryable


def test_writes_conflict(shared: TxnClient, key: bytes) -> None:
    """With a lock, with a commit after the start, and with the transaction's own rollback; a repeated prewrite does not."""
    start_ts, commit_ts = shared.ts(), shared.write(put(key))
    [conflict] = shared.prewrite(start_ts, [put(key)]).errors
    assert conflict.conflict.conflict_commit_ts == commit_ts
    assert conflict.conflict.reason == kv.WriteConflict.Optimistic
    start_ts = shared.ts()
    for _ in range(2):
        assert shared.prewrite(start_ts, [put(key)]) == kv.PrewriteResponse()
    assert lock_of(shared.prewrite(shared.ts(), [put(key + b"other"), put(key)])).lock_version == start_ts
    assert shared.get(key + b"other").not_found
    shared.call("KvBatchRollback", key, kv.BatchRollbackRequest(keys=[key], start_version=start_ts))
    [conflict] = shared.prewrite(start_ts, [put(key)]).errors
    assert conflict.conflict.reason == kv.WriteConflict.SelfRolledBack


def test_constraints(shared: TxnClient, key: bytes) -> None:
    """An insert of a key that exists, a check that it does not, and assertions both ways."""
    shared.write(put(key))
    for operation in (kv.Insert, kv.CheckNotExists):
        mutation = kv.Mutation(op=operation, key=key, value=b"v")
        assert shared.prewrite(shared.ts(), [mutation]).errors[0].already_exist.key == key
    new = kv.Mutation(op=kv.CheckNotExists, key=key + b"new")
    assert shared.prewrite(shared.ts(), [new]) == kv.PrewriteResponse()
    for mutation in (put(key, assertion=kv.NotExist), put(key + b"new", assertion=kv.Exist)):
        [error] = shared.prewrite(shared.ts(), [mutation], assertion_level=kv.Strict).errors
        assert error.assertion_failed.key == mutation.key
    assert (
        shared.prewrite(shared.ts(), [put(key, assertion=kv.Exist)], assertion_level=kv.Fast) == kv.PrewriteResponse()
    )


def test_locks_that_readers_pass(shared: TxnClient, key: bytes) -> None:
    """A newer one, one whose least commit ts is above the reader's, and those that the request names."""
    shared.write(put(key, b"old"))
    before, start_ts = shared.ts(), shared.ts()
    shared.prewrite(start_ts, [put(key, b"new")])
    ts = shared.ts()
    assert lock_of(shared.get(key, ts)).key == key
    assert shared.get(key, before).value == b"old"
    assert shared.get(key, ts, resolved_locks=[start_ts]).value == b"old"
    assert shared.get(key, ts, committed_locks=[start_ts]).value == b"new"
    assert shared.get(key, ts, isolation_level=kv.RC).value == b"old"
    status = kv.CheckTxnStatusRequest(primary_key=key, lock_ts=start_ts, caller_start_ts=ts, current_ts=ts)
    assert shared.call("KvCheckTxnStatus", key, status).action == kv.MinCommitTSPushed
    assert shared.get(key, ts).value == b"old"
    error = shared.commit(start_ts, ts, key)
    assert error is not None
    assert error.commit_ts_expired.min_commit_ts == ts + 1
    assert shared.commit(start_ts, shared.ts(), key) is None
    assert shared.get(key, ts).value == b"old"
    assert shared.get(key).value == b"new"


def test_pages_of_a_scan(shared: TxnClient, key: bytes) -> None:
    """Limits, both directions, keys alone, and errors in the places of locked rows."""
    keys = [key + b"%d" % number for number in range(6)]
    shared.write(*(put(each, each) for each in keys), delete(keys[2]))
    shared.prewrite(shared.ts(), [put(keys[4]), put(key + b"new")])
    pairs = shared.scan(key, key + b"~", shared.ts())
    assert [pair.key or pair.error.locked.key for pair in pairs] == [*keys[:2], *keys[3:6], key + b"new"]
    assert [pair.value for pair in shared.scan(key, key + b"~", shared.ts(), limit=3, key_only=True)] == [b""] * 3
    reverse = kv.ScanRequest(start_key=keys[4], end_key=key, version=shared.ts(), limit=3, reverse=True)
    assert [pair.key for pair in shared.call("KvScan", key, reverse).pairs] == [keys[3], keys[1], keys[0]]
    found = kv.BatchGetRequest(keys=[keys[1], keys[2], keys[4]], version=shared.ts())
    pairs = shared.call("KvBatchGet", key, found).pairs
    assert [pair.value or pair.error.locked.key for pair in pairs] == [keys[1], keys[4]]
    scan_lock = kv.ScanLockRequest(start_key=key, end_key=key + b"~", max_version=shared.ts(), limit=1)
    assert [lock.key for lock in shared.call("KvScanLock", key, scan_lock).locks] == [keys[4]]


@pytest.mark.parametrize("mode", ["async", "one_pc"])
def test_commits_that_choose_their_timestamp(shared: TxnClient, key: bytes, mode: str) -> None:
    """Above every reader's so far; repeated they give the same answer; with an upper bound below it they do not choose."""
    start_ts, earlier = shared.ts(), shared.client.playground.transactions.max_ts
    read_ts = max(start_ts, earlier) + 1000
    assert shared.get(key, read_ts).not_found
    fields = {"use_async_commit": True, "secondaries": [key + b"2"]} if mode == "async" else {"try_one_pc": True}
    mutations = [put(key), put(key + b"2", LONG)]
    answer = shared.prewrite(start_ts, mutations, **fields)
    assert (answer.min_commit_ts or answer.one_pc_commit_ts) == read_ts + 1
    if mode == "async":
        assert lock_of(shared.get(key, read_ts + 1)).secondaries == [key + b"2"]
        assert shared.commit(start_ts, read_ts + 1, key, key + b"2") is None
    assert shared.prewrite(start_ts, mutations, **fields) == answer
    assert shared.get(key, read_ts).not_found
    assert shared.get(key + b"2", read_ts + 1).value == LONG
    other = [put(key + b"3")]
    bounded = shared.prewrite(shared.ts(), other, **fields, max_commit_ts=read_ts)
    assert bounded == kv.PrewriteResponse()
    assert not lock_of(shared.get(key + b"3", max(shared.ts(), read_ts) + 5000)).use_async_commit


def test_secondaries_decide(shared: TxnClient, key: bytes) -> None:
    """A missing secondary of an async commit rolls it back for good; a committed one gives the commit ts."""
    start_ts = shared.ts()
    shared.prewrite(start_ts, [put(key)], use_async_commit=True, secondaries=[key + b"2"])
    check = kv.CheckSecondaryLocksRequest(keys=[key + b"2"], start_version=start_ts)
    assert shared.call("KvCheckSecondaryLocks", key, check) == kv.CheckSecondaryLocksResponse()
    [error] = shared.prewrite(start_ts, [put(key + b"2")], key).errors
    assert error.conflict.reason == kv.WriteConflict.SelfRolledBack
    resolve = kv.ResolveLockRequest(start_version=start_ts)
    assert shared.call("KvResolveLock", key, resolve) == kv.ResolveLockResponse()
    assert shared.get(key).not_found
    start_ts = shared.ts()
    commit_ts = shared.prewrite(start_ts, [put(key), put(key + b"2")], use_async_commit=True).min_commit_ts
    resolve = kv.ResolveLockRequest(start_version=start_ts, commit_version=commit_ts, keys=[key + b"2"])
    shared.call("KvResolveLock", key, resolve)
    check = kv.CheckSecondaryLocksRequest(keys=[key, key + b"2"], start_version=start_ts)
    assert shared.call("KvCheckSecondaryLocks", key, check).commit_ts == commit_ts


def lock_request(
    key: bytes, start_ts: int, *, primary: bytes | None = None, wait: int = -1
) -> kv.PessimisticLockRequest:
    """A request for one pessimistic lock, which waits for other ones only if told to."""
    mutation = kv.Mutation(op=kv.PessimisticLock, key=key)
    return kv.PessimisticLockRequest(
        mutations=[mutation], primary_lock=primary or key, start_version=start_ts, for_update_ts=start_ts, lock_ttl=TTL,
        wait_timeout=wait, return_values=True,
    )  # fmt: skip


def test_pessimistic_locks(shared: TxnClient, key: bytes) -> None:
    """They return the value, stop other writers and no readers, live by heart beats, and become a prewrite's locks."""
    commit_ts = shared.write(put(key, b"old"))
    early = shared.call("KvPessimisticLock", key, lock_request(key, commit_ts - 1))
    assert early.errors[0].conflict.reason == kv.WriteConflict.PessimisticRetry
    start_ts = shared.ts()
    locked = shared.call("KvPessimisticLock", key, lock_request(key, start_ts))
    assert (list(locked.values), list(locked.not_founds)) == ([b"old"], [False])
    other = shared.call("KvPessimisticLock", key, lock_request(key, shared.ts()))
    assert other.errors[0].locked.lock_type == kv.PessimisticLock
    assert shared.get(key).value == b"old"
    beat = kv.TxnHeartBeatRequest(primary_lock=key, start_version=start_ts, advise_lock_ttl=9 * TTL)
    assert shared.call("KvTxnHeartBeat", key, beat).lock_ttl == 9 * TTL
    beat.start_version += 1
    assert shared.call("KvTxnHeartBeat", key, beat).error.txn_not_found.primary_key == key
    actions = [kv.PrewriteRequest.DO_PESSIMISTIC_CHECK]
    answer = shared.prewrite(start_ts, [put(key, b"new")], for_update_ts=start_ts, pessimistic_actions=actions)
    assert answer == kv.PrewriteResponse()
    assert lock_of(shared.get(key)).lock_ttl == 9 * TTL
    assert shared.commit(start_ts, shared.ts(), key) is None
    late = shared.prewrite(commit_ts + 1, [put(key)], for_update_ts=commit_ts + 1, pessimistic_actions=actions)
    assert "PessimisticLockNotFound" in late.errors[0].abort


def test_a_pessimistic_rollback_leaves_no_trace(shared: TxnClient, key: bytes) -> None:
    """The transaction may lock the key again; after its TTL a resolver may remove the lock just so."""
    start_ts = shared.ts()
    for _ in range(2):
        assert not shared.call("KvPessimisticLock", key, lock_request(key, start_ts)).errors
        rollback = kv.PessimisticRollbackRequest(start_version=start_ts, for_update_ts=start_ts, keys=[key])
        assert not shared.call("KVPessimisticRollback", key, rollback).errors
    shared.call("KvPessimisticLock", key, lock_request(key, start_ts))
    status = kv.CheckTxnStatusRequest(
        primary_key=key, lock_ts=start_ts, current_ts=start_ts + (2 * TTL << 18), resolving_pessimistic_lock=True
    )
    assert shared.call("KvCheckTxnStatus", key, status).action == kv.TTLExpirePessimisticRollback
    status.rollback_if_not_exist = True
    assert shared.call("KvCheckTxnStatus", key, status).action == kv.LockNotExistDoNothing


def test_waiting_for_a_lock(shared: TxnClient, key: bytes) -> None:
    """A pessimistic lock waits until the other one is gone, also within a stream that commits the other transaction."""
    first, second = shared.ts(), shared.ts()
    assert not shared.call("KvPessimisticLock", key, lock_request(key, first)).errors
    waiting = lock_request(key, second, wait=1000)
    rollback = kv.PessimisticRollbackRequest(start_version=first, for_update_ts=first, keys=[key])
    for request in (waiting, rollback):
        request.context.CopyFrom(shared.client.context(shared.region(key)))
    commands = tikvpb_pb2.BatchCommandsRequest.Request
    batches = [
        tikvpb_pb2.BatchCommandsRequest(requests=[commands(PessimisticLock=waiting)], request_ids=[7]),
        tikvpb_pb2.BatchCommandsRequest(requests=[commands(PessimisticRollback=rollback)], request_ids=[8]),
    ]

    over = threading.Event()

    def requests() -> Iterator[tikvpb_pb2.BatchCommandsRequest]:
        yield from batches
        over.wait(60)

    store = shared.client.store(shared.region(key).leader_store)
    answers = store.BatchCommands(requests(), timeout=60)
    received = [next(answers), next(answers)]
    over.set()
    assert [list(answer.request_ids) for answer in received] == [[8], [7]]
    assert not received[1].responses[0].PessimisticLock.errors
    began = time.monotonic()
    late = shared.call("KvPessimisticLock", key, lock_request(key, shared.ts(), wait=300))
    assert late.errors[0].locked.lock_version == second
    assert time.monotonic() - began >= 0.3


def test_deadlocks_are_found(shared: TxnClient, key: bytes) -> None:
    """Two transactions that wait for each other: the second one to wait is refused."""
    one, two, first, second = key + b"1", key + b"2", shared.ts(), shared.ts()
    shared.call("KvPessimisticLock", one, lock_request(one, first))
    shared.call("KvPessimisticLock", two, lock_request(two, second))
    answers: list[kv.PessimisticLockResponse] = []
    request = lock_request(two, first, primary=one, wait=1000)
    waiter = threading.Thread(target=lambda: answers.append(shared.call("KvPessimisticLock", two, request)))
    waiter.start()
    state = shared.client.playground.transactions
    eventually(lambda: bool(state.waiting))
    refused = shared.call("KvPessimisticLock", one, lock_request(one, second, primary=two, wait=1000))
    deadlock = refused.errors[0].deadlock
    assert (deadlock.lock_ts, deadlock.lock_key) == (first, one)
    assert [(each.txn, each.wait_for_txn) for each in deadlock.wait_chain] == [(second, first), (first, second)]
    rollback = kv.PessimisticRollbackRequest(start_version=second, for_update_ts=second, keys=[two])
    shared.call("KVPessimisticRollback", two, rollback)
    waiter.join(60)
    assert not answers[0].errors


def test_ranges_are_deleted_with_all_their_locks(shared: TxnClient, key: bytes) -> None:
    """By a request to a region, and by one to a store; an announced delete deletes nothing."""
    keys = [key + b"%d" % number for number in range(4)]
    shared.write(*(put(each, LONG) for each in keys))
    shared.prewrite(shared.ts(), [put(keys[1])])
    request = kv.DeleteRangeRequest(start_key=keys[0], end_key=keys[2], notify_only=True)
    assert shared.call("KvDeleteRange", key, request) == kv.DeleteRangeResponse()
    assert len(shared.scan(key, key + b"~", shared.ts())) == 4
    request.notify_only = False
    shared.call("KvDeleteRange", key, request)
    assert [pair.key for pair in shared.scan(key, key + b"~", shared.ts())] == keys[2:]
    destroy = kv.UnsafeDestroyRangeRequest(start_key=key, end_key=keys[3])
    store = shared.client.store(shared.region(key).leader_store)
    assert store.UnsafeDestroyRange(destroy, timeout=60) == kv.UnsafeDestroyRangeResponse()
    assert [pair.key for pair in shared.scan(key, key + b"~", shared.ts())] == keys[3:]


def test_checksums_by_a_rule(shared: TxnClient, key: bytes) -> None:
    """As if the rows had the old prefix; without an end nothing is counted, which is no error."""
    shared.write(put(key + b"1", b"v"), put(key + b"2", LONG))
    rule = tipb_pb2.ChecksumRewriteRule(old_prefix=b"old", new_prefix=key)
    data = tipb_pb2.ChecksumRequest(rule=rule).SerializeToString()
    request = coprocessor_pb2.Request(tp=105, data=data, start_ts=shared.ts())
    request.ranges.add(start=key, end=key + b"~")
    sums = tipb_pb2.ChecksumResponse.FromString(shared.call("Coprocessor", key, request).data)
    pairs = [b"old1v", b"old2" + LONG]
    expected = (crc64.xz(pairs[0]) ^ crc64.xz(pairs[1]), 2, sum(map(len, pairs)))
    assert (sums.checksum, sums.total_kvs, sums.total_bytes) == expected
    request.ranges[0].end = b""
    sums = tipb_pb2.ChecksumResponse.FromString(shared.call("Coprocessor", key, request).data)
    assert (sums.total_kvs, sums.total_bytes) == (0, 0)
    request.tp = 103
    assert "103" in shared.call("Coprocessor", key, request).other_error


def test_keys_must_be_of_the_mode(shared: TxnClient) -> None:
    """V2 takes keys with x from transactions, and no others."""
    assert "InvalidKeyMode" in shared.get(b"r\0\0\0raw").error.abort
    assert "InvalidKeyMode" in shared.prewrite(shared.ts(), [put(b"raw")]).errors[0].abort


def test_v1_and_v1ttl(tmp_path: Path) -> None:
    """V1 takes any key, beside raw rows; V1TTL has no transactions."""
    with running(tmp_path / "v1") as client:
        txn = TxnClient(client)
        for user in (b"", b"r", b"\xff" * 9):
            txn.write(put(user, b"of " + user))
        client.put(b"k", b"raw")
        assert [pair.key for pair in txn.scan(b"", b"", txn.ts())] == [b"", b"r", b"\xff" * 9]
        assert client.get(b"k") == b"raw"
    with running(tmp_path / "v1ttl", ApiVersion.V1TTL) as client:
        assert "ApiVersionNotMatched" in TxnClient(client).get(b"k").error.abort


def test_data_survive_a_restart(tmp_path: Path) -> None:
    """Rows and locks; and a commit that chooses its timestamp comes above readers of before."""
    with running(tmp_path) as client:
        txn = TxnClient(client)
        txn.write(put(b"k", LONG))
        txn.prewrite(txn.ts(), [put(b"l")])
        read_ts = txn.ts()
    with running(tmp_path) as client:
        txn = TxnClient(client)
        assert txn.get(b"k").value == LONG
        assert lock_of(txn.get(b"l")).key == b"l"
        assert txn.prewrite(read_ts - 1, [put(b"m")], try_one_pc=True).one_pc_commit_ts > read_ts


def test_gc_removes_what_no_reader_sees(tmp_path: Path) -> None:
    """At PD's safe point: older versions, deletes and rollbacks, with their long values; nothing above it, and no lock."""
    with running(tmp_path) as client:
        txn = TxnClient(client)
        txn.write(put(b"a", LONG))
        before = txn.write(put(b"b", b"1"))
        start_ts = txn.ts()
        txn.prewrite(start_ts, [put(b"c")])
        txn.call("KvBatchRollback", b"c", kv.BatchRollbackRequest(keys=[b"c"], start_version=start_ts))
        safe_point = txn.write(put(b"a", b"2"), delete(b"b"))
        txn.prewrite(txn.ts(), [put(b"d")])
        after = txn.write(put(b"a", b"3"))
        engine = client.playground.engine

        def count(family: str) -> int:
            return sum(1 for _ in engine.iterate(b"", b"", family=family))

        assert [count(family) for family in ("default", "lock", "write")] == [1, 1, 6]
        assert txn.get(b"a", before).value == LONG
        client.playground.state.gc.advance(safe_point)
        eventually(lambda: [count(family) for family in ("default", "lock", "write")] == [0, 1, 2])
        seen = [txn.get(b"a", ts) for ts in (before, safe_point, after)]
        assert seen == [kv.GetResponse(not_found=True), kv.GetResponse(value=b"2"), kv.GetResponse(value=b"3")]


def test_regions_of_transactions_split(tmp_path: Path) -> None:
    """By their size, also of short values, between keys and not between versions of a key."""
    with running(tmp_path, region_split_size=20_000) as client:
        txn = TxnClient(client)
        keys = [b"k%02d" % number for number in range(30)]
        for value in (b"v" * 200, LONG * 4):  # each in one request
            assert txn.prewrite(txn.ts(), [put(key, value) for key in keys], try_one_pc=True).one_pc_commit_ts
        eventually(lambda: len(client.playground.regions.all()) > len(KEYSPACE_BOUNDS) + 1)
        for region in client.playground.regions.all()[1:]:
            user, size = codec.decode(region.start)
            assert len(region.start) == size, user
        assert [pair.key for pair in txn.scan(b"", b"", txn.ts())] == keys


ROWS = {b"a": b"1", b"b": LONG, b"c": b"3"}


def back_up(folder: Path) -> tuple[int, list[brpb_pb2.File]]:
    """Backup-ts and files of `ROWS` and a deleted row."""
    with running(folder / "source", stores=1) as client:
        ts = TxnClient(client).write(*(put(*row) for row in ROWS.items()), put(b"d"), delete(b"d"))
        files = files_of(backup(client, is_raw_kv=False, end_version=ts, storage_backend=local(folder / "backup")))
    assert [file.cf for file in files] == ["default", "write"]
    return ts, files


def fetch(client: Client, folder: Path, file: brpb_pb2.File, new_ts: int) -> import_sstpb_pb2.SSTMeta:
    """Download a file of `back_up`; its meta for the ingest."""
    region = client.region(b"a")
    return download_everywhere(
        client,
        region,
        meta_for(client, region, cf_name=file.cf, length=file.size),
        name=file.name,
        storage_backend=local(folder / "backup"),
        rewrite_rule=import_sstpb_pb2.RewriteRule(new_timestamp=new_ts),
    )


def test_rows_come_back_by_ingest(tmp_path: Path) -> None:
    """The files of a backup, in both column families, with their timestamps or new ones; values without records are no rows."""
    ts, files = back_up(tmp_path)
    for new_ts in (0, ts + 1):
        with running(tmp_path / f"target-{new_ts}") as client:
            txn = TxnClient(client)
            values, records = (fetch(client, tmp_path, file, new_ts) for file in files)
            assert ingest(client, client.region(b"a"), values) == import_sstpb_pb2.IngestResponse()
            assert txn.scan(b"", b"", ts + 1) == []
            assert ingest(client, client.region(b"a"), records) == import_sstpb_pb2.IngestResponse()
            assert {pair.key: pair.value for pair in txn.scan(b"", b"", ts + 1)} == ROWS
            assert bool(txn.scan(b"", b"", ts)) == (not new_ts)


def test_records_without_their_values(tmp_path: Path) -> None:
    """Ingested before them: a scan reports it in the row's place, a checksum as its error; then the values come."""
    ts, files = back_up(tmp_path)
    with running(tmp_path / "target") as client:
        txn = TxnClient(client)
        values, records = (fetch(client, tmp_path, file, 0) for file in files)
        assert ingest(client, client.region(b"a"), records) == import_sstpb_pb2.IngestResponse()
        first, broken, last = txn.scan(b"", b"", ts)
        assert (first.value, last.value) == (ROWS[b"a"], ROWS[b"c"])
        assert "DefaultNotFound" in broken.error.abort
        request = coprocessor_pb2.Request(tp=105, start_ts=ts)
        request.ranges.add(start=b"a", end=b"z")
        assert "default not found" in txn.call("Coprocessor", b"k", request).other_error
        assert ingest(client, client.region(b"a"), values) == import_sstpb_pb2.IngestResponse()
        assert {pair.key: pair.value for pair in txn.scan(b"", b"", ts)} == ROWS


@pytest.mark.parametrize(("version", "expected"), [("8.5", "refused"), ("8.1", "accepted"), ("", "fatal")])
def test_timestamps_above_those_of_pd(tmp_path: Path, version: str, expected: str) -> None:
    """8.5.7 refuses a reader's; 9.0 ends itself if it is more than a minute ahead; others believe it."""
    with running(tmp_path, tikv_version=version) as client:
        txn = TxnClient(client)
        ahead = txn.ts() + (120_000 << 18)
        request = kv.GetRequest(key=b"k", version=ahead, context=client.context(txn.region(b"k")))
        store = client.store(txn.region(b"k").leader_store)
        if expected == "fatal":
            with pytest.raises(Exception, match="Socket closed"):
                store.KvGet(request, timeout=60)
            [fatal] = client.playground.fatal_requests.all()
            assert "invalid max_ts update" in fatal.what
            return
        answer = store.KvGet(request, timeout=60)
        assert answer.not_found == (expected == "accepted")
        assert ("invalid max_ts update" in answer.region_error.message) == (expected == "refused")


def test_encoded_keys_are_those_of_the_formats(shared: TxnClient, key: bytes) -> None:
    """What is in the column families is addressed by the keys that the formats package makes."""
    commit_ts = shared.write(put(key, b"v"))
    stored = b"z" + codec.encode(key) + (codec.MAX_TS - commit_ts).to_bytes(8, "big")
    assert (shared.client.playground.engine.get(stored, "write") or b"")[:1] == b"P"
