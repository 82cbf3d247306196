"""Transactional backups with the files that real stores wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import structs

from tests.support.ledgers import begin_backup
from tikv_br.backupset import backupmeta, layout
from tikv_br.backupset.files import FileEntry, FileWriter
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.backupset.manifest import Description, Manifest
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.storage.base import ObjectStore

CLUSTER_ID = 7710567106009038031


def recorded_files(folder: Path) -> Iterator[brpb_pb2.File]:
    """The files in the answers of a recorded backup."""
    for path in sorted(folder.glob("response-*.pb")):
        yield from brpb_pb2.BackupResponse.FromString(path.read_bytes()).files


def recorded_rows(folder: Path) -> list[tuple[bytes, bytes]]:
    """RPC keys and values that a recorded backup must hold."""
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())["rows"]
    return [(bytes.fromhex(row["key"]), recorded_value(row)) for row in rows]


def recorded_value(row: dict[str, Any]) -> bytes:
    """The value of a row, listed or by its rule."""
    if "value_rule" in row:
        assert row["value_rule"] == "byte i = (i * 131 + 7) % 251"
        return bytes((number * 131 + 7) % 251 for number in range(row["value_len"]))
    return bytes.fromhex(row.get("value", ""))


def backup_ts_of(folder: Path) -> int:
    """The end version of a recorded backup."""
    return brpb_pb2.BackupRequest.FromString((folder / "request.pb").read_bytes()).end_version


def recorded_codec(folder: Path) -> KeyCodec:
    """The codec of a recorded backup's keys."""
    is_v1 = folder.parent.name == "v1"
    return KeyCodec(ApiVersion.V1) if is_v1 else KeyCodec(ApiVersion.V2, 1)


def make_backup(store: ObjectStore, folder: Path) -> Manifest:
    """A backup by tikv-br, as `backup txn` makes it, of a recorded one."""
    codec = structs.replace(recorded_codec(folder), mode=KeyMode.TXN)
    writer, whole = begin_backup(store), codec.rpc_range()
    files = tuple(_copied(store, folder, file) for file in recorded_files(folder))
    description = Description(
        tool_version="0.1.0",
        engine="store",
        file_format="sst",
        compression="zstd",
        cluster_id=CLUSTER_ID,
        cluster_version="8.5.7",
        api_version=codec.api_version,
        dst_api_version=codec.api_version,
        source_ranges=(whole,),
        ranges=(whole,),
        keyspaces=(codec.keyspace_id,) if codec.is_v2 else (),
        backup_ts=backup_ts_of(folder),
        parent="",
        storage=store.location.redacted(),
        started_ms=1_795_256_305_000,
        key_mode=KeyMode.TXN,
    )
    return writer.commit(description, [LedgerEntry(whole.start, whole.end, "a1", files)])


def _copied(store: ObjectStore, folder: Path, file: brpb_pb2.File) -> FileEntry:
    with FileWriter(store, f"sst/0_a1/0/{file.name.rpartition('/')[2]}") as writer:
        writer.write((folder / "files" / file.name).read_bytes())
        stored = writer.close()
    return structs.replace(backupmeta.decode_file(file), **stored._asdict())


def make_foreign_backup(store: ObjectStore, folder: Path, *, is_flat: bool = False) -> None:
    """A backup by BR's ``backup txn`` of a recorded one; ``is_flat``: with file names as in Azure."""
    files = list(recorded_files(folder))
    for file in files:
        data = (folder / "files" / file.name).read_bytes()
        file.name = file.name.replace("/", "_") if is_flat else file.name
        store.put(file.name, data)
    version = kvrpcpb_pb2.V1 if recorded_codec(folder).api_version is ApiVersion.V1 else kvrpcpb_pb2.V2
    meta = brpb_pb2.BackupMeta(
        cluster_id=CLUSTER_ID,
        cluster_version="8.5.7",
        br_version="BR\nRelease Version: v8.5.3",
        is_txn_kv=True,
        api_version=version,
        end_version=backup_ts_of(folder),
        files=files,
    )
    store.put(layout.META, meta.SerializeToString())
