"""Reading a backup without our code: RocksDB ingests the SSTs and returns their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zstandard
from rocksdict import Options, Rdict

from tests.support.live_cluster import LiveCluster
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec

Rows = dict[bytes, bytes]
"""Internal keys (with z) and values."""
Expected = dict[bytes, tuple[bytes, int]]
"""User keys, user values and absolute expiry (0 = never)."""


def rocksdb_rows(backup: Path, scratch: Path, pattern: str = "*.sst") -> Rows:
    """Return all rows of all SSTs below a folder, as RocksDB reads them; files that overlap count as an error."""
    files = [str(path) for path in sorted(backup.rglob(pattern))]
    rows: Rows = {}
    for number, file in enumerate(files):
        place = str(scratch / f"rocksdb-{number}")
        database = Rdict(place, Options(raw_mode=True))
        database.ingest_external_file([file])
        found = {bytes(key): bytes(value) for key, value in database.items()}  # type: ignore[arg-type]
        database.close()
        Rdict.destroy(place)
        assert found, f"{file} is empty"
        assert not rows.keys() & found.keys(), f"{file} repeats rows"
        rows |= found
    return rows


def golden_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of an expected.jsonl.zst; keys and values are bytes."""
    with (folder / "expected.jsonl.zst").open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
        rows = [json.loads(line) for line in reader.read().splitlines()]
    return [{**row, "k": bytes.fromhex(row["k"]), "v": bytes.fromhex(row["v"])} for row in rows]


def stored(rows: Expected, api_version: ApiVersion, *, keyspace_id: int = 0, ts: int = 0) -> Rows:
    """Return rows as a store of that API version holds them, by the rules of the public documentation."""
    return {
        _stored_key(key, api_version, keyspace_id, ts): _stored_value(value, expire, api_version)
        for key, (value, expire) in rows.items()
    }


def _stored_key(key: bytes, api_version: ApiVersion, keyspace_id: int, ts: int) -> bytes:
    if api_version is not ApiVersion.V2:
        return b"z" + key
    prefixed = b"r" + keyspace_id.to_bytes(3, "big") + key
    return b"z" + codec.encode(prefixed) + (ts ^ (2**64 - 1)).to_bytes(8, "big")


def _stored_value(value: bytes, expire: int, api_version: ApiVersion) -> bytes:
    match api_version:
        case ApiVersion.V1:
            return value
        case ApiVersion.V1TTL:
            return value + expire.to_bytes(8, "big")
        case ApiVersion.V2:
            return value + (expire.to_bytes(8, "big") + b"\x01" if expire else b"\x00")


def ts_of(live: LiveCluster, key: bytes, scratch: Path) -> int:
    """Return the ts that the stores keep with a key, from an SST that they write themselves."""
    rpc_key = live.raw().codec.rpc_key(key)
    (scratch / "stores").mkdir()
    request = brpb_pb2.BackupRequest(
        cluster_id=live.cluster.cluster_id,
        start_key=rpc_key,
        end_key=rpc_key + b"\0",
        is_raw_kv=True,
        dst_api_version=kvrpcpb_pb2.V2,
        storage_backend=brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=str(scratch / "stores"))),
    )
    for store_id in live.store_ids:
        list(live.cluster.store(store_id).backup(request))
    (internal,) = rocksdb_rows(scratch / "stores", scratch)
    return int.from_bytes(internal[-8:], "big") ^ (2**64 - 1)
