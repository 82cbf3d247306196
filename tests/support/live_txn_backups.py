"""Rows of transactions in playgrounds, and backups of them as another tool writes them: stores' answers, and no manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.live_cluster import LiveCluster
from tikv_br.backupset import layout
from tikv_br.backupset.backupmeta import MetaContent, decode_file, encode
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.region_errors import check_region_error
from tikv_br.cluster.regions import Region
from tikv_br.cluster.scan import RangeWalk
from tikv_br.cluster.store import StoreClient
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.codec import encode as encode_key
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

PAGE = 1000


def hard_txn_rows(count: int) -> dict[bytes, bytes]:
    """Rows with keys of FF and zero bytes, keys of all lengths around a group, and values around the limit of a record."""
    rows = {b"row%05d" % number: b"value of %d" % number for number in range(count)}
    sizes = (0, 1, 254, 255, 256, 257, 5000)
    rows |= {b"size%07d" % size: bytes((7 * at + size) % 251 for at in range(size)) for size in sizes}
    rows |= {b"k" * size: b"key of %d" % size for size in range(1, 20)}
    rows |= {b"\xff" * size: b"FF" * size for size in (1, 7, 8, 9, 16)}
    rows |= {b"\0" * size: b"zero" for size in (1, 7, 8, 9)}
    return rows | {
        b"raw-like": b"r",
        b"r": b"r",
        b"z\xff\xff": b"x" * 300,
        b"m\xffeta": b"m",
        b"huge": b"h" * (1 << 20),
    }


def codec_of(live: LiveCluster, keyspace_id: int = 0) -> KeyCodec:
    """The codec of a keyspace, or of API V1."""
    version = live.cluster.api_version
    return KeyCodec(version, keyspace_id if version is ApiVersion.V2 else 0, KeyMode.TXN)


def write_rows(live: LiveCluster, rows: Mapping[bytes, bytes | None], keyspace_id: int = 0) -> int:
    """Write rows, or delete those that are None, in transactions of one row each; the last commit ts."""
    codec, commit_ts = codec_of(live, keyspace_id), 0
    for user_key, value in sorted(rows.items()):
        key, start_ts = codec.rpc_key(user_key), live.cluster.pd.tso()
        mutation = kv.Mutation(op=kv.Put if value is not None else kv.Del, key=key, value=value or b"")
        prewrite = kv.PrewriteRequest(
            mutations=[mutation], primary_lock=key, start_version=start_ts, lock_ttl=3000, min_commit_ts=start_ts + 1
        )
        assert not call(live, "KvPrewrite", key, prewrite).errors
        commit_ts = live.cluster.pd.tso()
        commit = kv.CommitRequest(keys=[key], start_version=start_ts, commit_version=commit_ts)
        assert not call(live, "KvCommit", key, commit).HasField("error")
    return commit_ts


def call(live: LiveCluster, rpc: str, key: bytes, request: Any) -> Any:  # noqa: ANN401
    """Send a request about a key to its region."""

    def send(region: Region, store: StoreClient) -> Any:  # noqa: ANN401
        request.context.CopyFrom(region.context(live.cluster.api_version, live.cluster.cluster_id))
        answer = store.call(getattr(store.kv, rpc), request)
        check_region_error(answer)
        return answer

    return live.cluster.router.call(encode_key(key) if key else b"", send, rpc)


def read_rows(live: LiveCluster, keyspace_id: int = 0, ts: int = 0) -> dict[bytes, bytes]:
    """All rows of a keyspace that a reader of now, or of a ts, finds, by user key."""
    codec = codec_of(live, keyspace_id)
    span, found = codec.rpc_range(), dict[bytes, bytes]()
    ts = ts or live.cluster.pd.tso()
    walk = RangeWalk(live.cluster.router, codec, live.cluster.cluster_id, span.start, span.end)

    def scan(store: StoreClient, context: kv.Context, start: bytes, end: bytes) -> kv.ScanResponse:
        request = kv.ScanRequest(context=context, start_key=start, end_key=end, limit=PAGE, version=ts)
        answer: kv.ScanResponse = store.call(store.kv.KvScan, request)
        check_region_error(answer)
        return answer

    while not walk.done:
        answer, reached = walk.send_part(scan, "KvScan")
        for pair in answer.pairs:
            assert not pair.HasField("error"), pair
            found[codec.user_key(pair.key)] = pair.value
        walk.advance(answer.pairs[-1].key + b"\0" if len(answer.pairs) == PAGE else reached)
    return found


def delete_range(live: LiveCluster, keyspace_id: int = 0) -> None:
    """Delete a keyspace physically, as DeleteRange does: without tombstones. Pessimistic locks, which stores keep in memory, are rolled back."""
    codec = codec_of(live, keyspace_id)
    span = codec.rpc_range()
    walk = RangeWalk(live.cluster.router, codec, live.cluster.cluster_id, span.start, span.end)

    def delete(store: StoreClient, context: kv.Context, start: bytes, end: bytes) -> None:
        asked = kv.ScanLockRequest(
            context=context, start_key=start, end_key=end, max_version=live.cluster.pd.tso(), limit=1000
        )
        locked = store.call(store.kv.KvScanLock, asked)
        check_region_error(locked)
        for lock in locked.locks:
            if lock.lock_type == kv.PessimisticLock:
                undo = kv.PessimisticRollbackRequest(
                    context=context,
                    start_version=lock.lock_version,
                    for_update_ts=lock.lock_for_update_ts,
                    keys=[lock.key],
                )
                check_region_error(store.call(store.kv.KVPessimisticRollback, undo))
        request = kv.DeleteRangeRequest(context=context, start_key=start, end_key=end or b"\xff" * 64)
        answer = store.call(store.kv.KvDeleteRange, request)
        check_region_error(answer)
        assert not answer.error, answer

    while not walk.done:
        walk.advance(walk.send_part(delete, "KvDeleteRange")[1])


def split_between(live: LiveCluster, keys: Sequence[bytes], pieces: int, keyspace_id: int = 0) -> None:
    """Split at user keys, into about so many regions."""
    codec, ordered = codec_of(live, keyspace_id), sorted(keys)
    chosen = ordered[:: -(-len(ordered) // pieces)][1:]
    live.split(*(codec.bound(codec.rpc_key(key)) for key in chosen))


def back_up(live: LiveCluster, folder: Path, *keyspaces: int) -> StorageLocation:
    """Have the stores back up keyspaces, by default 0, or all of API V1, and write `backupmeta` without ranges."""
    ts, files = live.cluster.pd.tso(), list[FileEntry]()
    folder.mkdir()
    for keyspace in keyspaces or (0,):
        span = codec_of(live, keyspace).rpc_range()
        files += _answered_files(live, folder, span, ts)
    location = parse(f"local://{folder}")
    write_meta(location, live.cluster.api_version, files, ts, live.cluster.cluster_id)
    return location


def write_meta(
    location: StorageLocation, api_version: ApiVersion, files: Sequence[FileEntry], ts: int, cluster_id: int
) -> None:
    """Write `backupmeta` as BR does."""
    content = MetaContent(
        cluster_id=cluster_id,
        cluster_version="8.5.7",
        tool="BR v8.5.7",
        api_version=api_version,
        ranges=(),
        files=tuple(files),
        backup_ts=ts,
        key_mode=KeyMode.TXN,
    )
    open_store(location).put(layout.META, encode(content))


def _answered_files(live: LiveCluster, folder: Path, span: KeyRange, ts: int) -> Iterator[FileEntry]:
    bounds = (encode_key(span.start) if span.start else b"", encode_key(span.end) if span.end else b"")
    regions = live.cluster.pd.scan_regions(*bounds, 10_000)
    request = brpb_pb2.BackupRequest(
        cluster_id=live.cluster.cluster_id,
        start_key=span.start,
        end_key=span.end,
        end_version=ts,
        compression_type=brpb_pb2.ZSTD,
        concurrency=1,
        storage_backend=brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=str(folder))),
    )
    for store_id in live.store_ids:
        for answer in live.cluster.store(store_id).backup(request, regions):
            assert not answer.HasField("error"), answer
            yield from map(decode_file, answer.files)
