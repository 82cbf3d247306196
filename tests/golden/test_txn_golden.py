"""The playground answers transactional requests as recorded stores did, from the same writes."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.integration.backup.reading import rocksdb_rows
from tests.integration.playground.clients import Client, running
from tests.integration.playground.ssts import download, ingest, local, meta_for
from tests.support.txn import Message, TxnClient, put
from tests.support.txn_backups import recorded_value
from tikv_br.cluster.pb import brpb_pb2, brpb_pb2_grpc, coprocessor_pb2, import_sstpb_pb2, tipb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground.region import Region

Write: TypeAlias = dict[str, Any]
OPERATIONS = {"put": kv.Put, "del": kv.Del, "lock": kv.Lock, "rollback": kv.Put}
LATER = 3600_000 << 18
"""An hour, in timestamps."""
BEHIND = 30 * 365 * 86400
"""Seconds by which a PD is behind any recording."""


@pytest.fixture(params=[ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)
def recorded(request: pytest.FixtureRequest, golden: Path) -> Path:
    """The folder of an API version."""
    return golden / "txn" / f"v{1 if request.param is ApiVersion.V1 else 2}"


@pytest.fixture
def txn(recorded: Path, tmp_path: Path) -> Iterator[TxnClient]:
    """A playground of the recording's API version, whose PD is not behind the recording's."""
    last = json.loads((recorded / "gc-fence" / "rows.json").read_text())["gc_fence"]
    ahead = max(0.0, ((last + LATER) >> 18) / 1000 - time.time())
    version = ApiVersion.V1 if recorded.name == "v1" else ApiVersion.V2
    with running(tmp_path / "playground", version, stores=1, clock_ahead=ahead) as client:
        yield TxnClient(client)


def message(path: Path, kind: type[Message]) -> Message:
    """A recorded message, without what was measured on the way."""
    found = kind.FromString(path.with_suffix(".pb").read_bytes())
    found.DiscardUnknownFields()
    return found


def replay(txn: TxnClient, path: Path) -> None:
    """Write everything at the recorded timestamps, key by key."""
    for write in json.loads(path.read_text())["writes"]:
        key, start_ts, commit_ts = bytes.fromhex(write["key"]), write["start_ts"], write["commit_ts"]
        mutation = kv.Mutation(op=OPERATIONS[write["op"]], key=key, value=recorded_value(write))
        assert txn.prewrite(start_ts, [mutation]) == kv.PrewriteResponse()
        if commit_ts:
            assert txn.commit(start_ts, commit_ts, key) is None
        else:
            rollback = kv.BatchRollbackRequest(keys=[key], start_version=start_ts)
            assert txn.call("KvBatchRollback", key, rollback) == kv.BatchRollbackResponse()


def rows_at(folder: Path) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Timestamp and rows of a recorded backup."""
    record = json.loads((folder / "rows.json").read_text())
    return record["backup_ts"], [(bytes.fromhex(row["key"]), recorded_value(row)) for row in record["rows"]]


def whole(recorded: Path) -> tuple[bytes, bytes]:
    """The range of a recording."""
    return (b"", b"") if recorded.name == "v1" else (b"x\0\0\1", b"x\0\0\2")


def sums(data: bytes) -> tipb_pb2.ChecksumResponse:
    """The coprocessor's data; a field that is 0 may be missing."""
    found = tipb_pb2.ChecksumResponse.FromString(data)
    return tipb_pb2.ChecksumResponse(checksum=found.checksum, total_kvs=found.total_kvs, total_bytes=found.total_bytes)


@pytest.mark.parametrize("backup", ["full", "full-later"])
def test_rows_checksums_and_records(txn: TxnClient, recorded: Path, backup: str) -> None:
    """Scans both ways, gets and checksums at backup-ts are the recorded ones, and the records are those of the SSTs."""
    replay(txn, recorded / "writes.json")
    folder = recorded / backup
    ts, rows = rows_at(folder)
    start, end = whole(recorded)
    assert [(pair.key, pair.value) for pair in txn.scan(start, end, ts)] == rows
    key = rows[len(rows) // 2][0]
    region_rows = [row for row in rows if txn.region(row[0]) == txn.region(key) and row[0] < key]
    reverse = kv.ScanRequest(start_key=key, end_key=start, version=ts, limit=5, reverse=True)
    assert [(pair.key, pair.value) for pair in txn.call("KvScan", key, reverse).pairs] == region_rows[::-1][:5]
    for key, value in rows:
        assert txn.get(key, ts) == kv.GetResponse(value=value)
    for number in itertools.count():
        path = folder / f"checksum-request-{number}"
        if not path.with_suffix(".pb").exists():
            assert number
            break
        request = message(path, coprocessor_pb2.Request)
        request.ClearField("context")
        expected = message(folder / f"checksum-response-{number}", coprocessor_pb2.Response)
        answer = txn.call("Coprocessor", request.ranges[0].start, request)
        assert sums(answer.data) == sums(expected.data)


def test_locks_stop_readers(txn: TxnClient, recorded: Path) -> None:
    """Three locks of a living transaction: in a scan each in the place of its row, in a checksum the first; then it is pushed."""
    folder = recorded / "locked"
    scanned = message(folder / "scan-response", kv.ScanResponse)
    locks = [pair.error.locked for pair in scanned.pairs if pair.HasField("error")]
    for pair in scanned.pairs:
        if pair.key:
            assert txn.prewrite(1, [put(pair.key, pair.value)]) == kv.PrewriteResponse()
            assert txn.commit(1, 2, pair.key) is None
    prewrite(txn, *locks)
    request = coprocessor_pb2.Request()
    for number in itertools.count():
        path = folder / f"checksum-response-{number}"
        if not path.with_suffix(".pb").exists():
            break
        request = message(folder / f"checksum-request-{number}", coprocessor_pb2.Request)
        request.ClearField("context")
        answer = txn.call("Coprocessor", request.ranges[0].start, request)
        assert answer.locked == message(path, coprocessor_pb2.Response).locked
    first, last = (pairs[0].key for pairs in (scanned.pairs, scanned.pairs[::-1]))
    assert txn.scan(first, last + b"\0", request.start_ts) == list(scanned.pairs)
    alive = message(folder / "check-txn-status-alive", kv.CheckTxnStatusResponse)
    check = kv.CheckTxnStatusRequest(
        primary_key=locks[0].key,
        lock_ts=locks[0].lock_version,
        caller_start_ts=request.start_ts,
        current_ts=alive.lock_info.min_commit_ts,
    )
    assert txn.call("KvCheckTxnStatus", locks[0].key, check) == alive


def prewrite(txn: TxnClient, *locks: kv.LockInfo) -> None:
    """Make locks of one transaction as they were recorded."""
    txn.client.playground.transactions.max_ts = 0  # before any reader
    first = locks[0]
    request = {"lock_ttl": first.lock_ttl, "txn_size": first.txn_size, "use_async_commit": first.use_async_commit}
    answer = txn.prewrite(
        first.lock_version,
        [
            kv.Mutation(op=lock.lock_type, key=lock.key, value=b"" if lock.lock_type == kv.Del else b"v")
            for lock in locks
        ],
        first.primary_lock,
        **request,
        secondaries=first.secondaries,
    )
    assert answer == kv.PrewriteResponse(min_commit_ts=first.min_commit_ts if first.use_async_commit else 0)


CASES = ["live-two-phase", "dead-two-phase", "primary-committed", "primary-committed-later", "dead-primary-missing",
         "dead-async-commit-complete", "dead-async-commit-incomplete"]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_resolving_locks(txn: TxnClient, recorded: Path, case: str) -> None:
    """Every request while the lock of a dead, living or committed transaction was resolved has the recorded answer."""
    folder = recorded / "resolver" / case
    status = message(folder / "check-txn-status-1-request", kv.CheckTxnStatusRequest)
    answer = message(folder / "check-txn-status-1-response", kv.CheckTxnStatusResponse)
    if answer.HasField("lock_info"):
        locks = [answer.lock_info]
        if (folder / "check-secondary-locks-1-response.pb").exists():
            secondary = message(folder / "check-secondary-locks-1-response", kv.CheckSecondaryLocksResponse)
            locks += secondary.locks
        prewrite(txn, *locks)
    elif answer.commit_version:
        assert txn.prewrite(status.lock_ts, [put(status.primary_key)]) == kv.PrewriteResponse()
        assert txn.commit(status.lock_ts, answer.commit_version, status.primary_key) is None
    requests = sorted(folder.glob("check-txn-status-*-request.pb")) + sorted(folder.glob("check-sec*-request.pb"))
    for path in requests:
        is_status = path.name.startswith("check-txn-status")
        rpc = "KvCheckTxnStatus" if is_status else "KvCheckSecondaryLocks"
        request = message(path, kv.CheckTxnStatusRequest if is_status else kv.CheckSecondaryLocksRequest)
        request.ClearField("context")
        key = request.primary_key if is_status else request.keys[0]
        expected = message(
            path.with_name(path.name.replace("request", "response")),
            kv.CheckTxnStatusResponse if is_status else kv.CheckSecondaryLocksResponse,
        )
        assert txn.call(rpc, key, request) == expected


def recorded_answers(folder: Path) -> Iterator[brpb_pb2.BackupResponse]:
    """The answers of a recorded backup, in the order in which they came."""
    for number in range(len(list(folder.glob("response-*.pb")))):
        yield message(folder / f"response-{number}", brpb_pb2.BackupResponse)


def answers(folder: Path) -> list[brpb_pb2.BackupResponse]:
    """The answers of a recorded backup, by their start keys, without what differs from run to run."""
    return comparable(recorded_answers(folder))


def comparable(responses: Iterable[brpb_pb2.BackupResponse]) -> list[brpb_pb2.BackupResponse]:
    """Answers in the order of their ranges, with the column families as the names of their files."""
    found = sorted(responses, key=lambda response: response.start_key)
    for response in found:
        for file in response.files:
            assert file.name.endswith(f"_{file.cf}.sst")
            file.name = ""
            for field in ("sha256", "size", "cipher_iv"):
                file.ClearField(field)
        response.error.msg = re.sub(r"\d{12,}", "TS", response.error.msg)
        if not response.error.ByteSize():
            response.ClearField("error")
    return found


def back_up(txn: TxnClient, folder: Path, target: Path) -> list[brpb_pb2.BackupResponse]:
    """The answers to a recorded request."""
    request = message(folder / "request", brpb_pb2.BackupRequest)
    target.mkdir()
    request.storage_backend.local.path = str(target)
    request.cluster_id = txn.client.playground.state.cluster_id
    stub = brpb_pb2_grpc.BackupStub(txn.client.channel(txn.client.playground.nodes[1].address))
    return comparable(stub.backup(request, timeout=60))


@pytest.mark.parametrize("backup", ["full", "full-later", "incremental", "gc-fence"])
def test_backups(txn: TxnClient, recorded: Path, tmp_path: Path, backup: str) -> None:
    """Ranges, sums and, byte by byte, all rows of both column families, with overlapped rollbacks and their GC fences."""
    folder = recorded / backup
    if backup == "gc-fence":
        replay(txn, folder / "writes.json")
        record = json.loads((folder / "rows.json").read_text())
        for row in record["rows"]:
            key = bytes.fromhex(row["key"])
            if not key.endswith(b"fence/plain"):
                cleanup = kv.CleanupRequest(key=key, start_version=record["overlapped_rollback_at"])
                assert txn.call("KvCleanup", key, cleanup) == kv.CleanupResponse()
    else:
        replay(txn, recorded / "writes.json")
    assert back_up(txn, folder, tmp_path / "backup") == answers(folder)
    assert rocksdb_rows(tmp_path / "backup", tmp_path) == rocksdb_rows(folder / "files", tmp_path)


@pytest.mark.parametrize("case", ["locked", "locked-async-commit"])
def test_backups_meet_locks(txn: TxnClient, recorded: Path, tmp_path: Path, case: str) -> None:
    """The answer of a region is its first lock."""
    folder = recorded / case
    expected = answers(folder)
    lock = next(answer.error.kv_error.locked for answer in expected if answer.error.HasField("kv_error"))
    prewrite(txn, lock)
    assert back_up(txn, folder, tmp_path / "backup") == expected


@pytest.mark.parametrize("target", [ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)
def test_restores_of_recorded_backups(recorded: Path, tmp_path: Path, target: ApiVersion) -> None:
    """Downloads of type ``Keyspace`` with a new timestamp, cut at regions: all rows, and by a rule the recorded sums."""
    folder = recorded / "full"
    (old, _), new = whole(recorded), b"" if target is ApiVersion.V1 else b"x\0\0\2"
    rows = sorted((new + key.removeprefix(old), value) for key, value in rows_at(folder)[1])
    files = sorted((file for answer in recorded_answers(folder) for file in answer.files), key=lambda file: file.cf)
    with running(tmp_path, target, stores=1) as client:
        txn, regions = TxnClient(client), client.playground.regions
        for key, _ in rows[len(rows) // 4 :: len(rows) // 4]:
            regions.split(regions.locate(codec.encode(key)).id, [codec.encode(key)])
        ts, high = txn.ts(), codec.successor(new)
        rule = import_sstpb_pb2.RewriteRule(old_key_prefix=old, new_key_prefix=new, new_timestamp=ts)
        spans = list(plain_spans(client, new, high))
        for file, (region, start, end) in itertools.product(files, spans):
            asked = {"name": file.name, "storage_backend": local(folder / "files"), "rewrite_rule": rule}
            span = import_sstpb_pb2.Range(start=start, end=end)
            meta = meta_for(client, region, range=span, cf_name=file.cf, length=file.size)
            answer = download(client, meta, 1, request_type=import_sstpb_pb2.Keyspace, **asked)
            assert not answer.HasField("error"), answer
            if not answer.is_empty:
                meta.range.CopyFrom(answer.range)
                assert ingest(client, region, meta) == import_sstpb_pb2.IngestResponse()
        assert txn.scan(new, high, ts - 1) == []
        assert [(pair.key, pair.value) for pair in txn.scan(new, high, ts)] == rows
        crc64xor = total_kvs = total_bytes = 0
        checksum = tipb_pb2.ChecksumRequest(rule=tipb_pb2.ChecksumRewriteRule(old_prefix=old, new_prefix=new))
        for _, start, end in spans:
            request = coprocessor_pb2.Request(tp=105, start_ts=ts, data=checksum.SerializeToString())
            request.ranges.add(start=start, end=end or b"\xff" * 64)
            counted = sums(txn.call("Coprocessor", start, request).data)
            crc64xor ^= counted.checksum
            total_kvs, total_bytes = total_kvs + counted.total_kvs, total_bytes + counted.total_bytes
    assert total_kvs == sum(file.total_kvs for file in files) == len(rows)
    assert total_bytes == sum(file.total_bytes for file in files)
    assert crc64xor == functools.reduce(operator.xor, (file.crc64xor for file in files))


def plain_spans(client: Client, start: bytes, end: bytes) -> Iterator[tuple[Region, bytes, bytes]]:
    """Regions and their parts of a range, in plain keys."""
    low, high = (codec.encode(key) if key else b"" for key in (start, end))
    for region in client.playground.regions.overlapping(low, high):
        first, last = (codec.decode(bound)[0] if bound else b"" for bound in (region.start, region.end))
        yield region, max(start, first), min(filter(None, (end, last)), default=b"")


def test_a_backup_ahead_of_pd(recorded: Path, golden: Path, tmp_path: Path) -> None:
    """8.5.7 refuses it region by region."""
    del golden
    version = ApiVersion.V1 if recorded.name == "v1" else ApiVersion.V2
    with running(tmp_path / "playground", version, stores=1, tikv_version="8.5", clock_ahead=-BEHIND) as client:
        found = back_up(TxnClient(client), recorded / "end-version-ahead", tmp_path / "backup")
    assert found == answers(recorded / "end-version-ahead")
