"""One row of a backup, found by reading a few KiB of the one file that can hold it."""

from __future__ import annotations

from typing import NamedTuple

from formats.errors import UnsupportedFormat
from formats.keys import DATA_PREFIX, PREFIX_SIZE, KeyCodec
from formats.sst import RandomAccess, Table
from formats.sst.lookup import first_row_from
from formats.values import StoredValue, decode_value
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import FileEntry, FileKind
from tikv_br.backupset.identity import verify_file_identity
from tikv_br.errors import UsageError
from tikv_br.proof.stored_rows import kind_of, naming, open_file, records


class FoundValue(NamedTuple):
    """The newest version of a key in a backup."""

    stored: StoredValue
    ts: int
    """0 = the API version has none."""
    file: str


def find_value(backup: BackupSet, user_key: bytes, keyspace_id: int | None = None) -> FoundValue | None:
    """What the backup has for a user key, expired values and tombstones too; None when it has nothing.

    ``keyspace_id`` may be left out where the backup has one keyspace only. Raises `UsageError` for a key that the backup
    does not cover, `BackupDamaged` naming the file, `BackupUnsupported` for files that cannot be read row by row.
    """
    codec = _codec(backup, keyspace_id)
    rpc_key = codec.rpc_key(user_key)
    here = KeyRange(rpc_key, rpc_key + b"\0")
    if not any(whole.contains(here) for whole in backup.ranges):
        raise UsageError(f"the key lies outside of what was backed up: {', '.join(map(str, backup.ranges))}")
    file = next((file for file in backup.files if file.key_range.contains(here)), None)
    return None if file is None else _find_in(backup, file, codec, rpc_key)


def keyspaces_of(backup: BackupSet) -> tuple[int, ...]:
    """The ids of the keyspaces that a backup's ranges begin in; none before API V2."""
    if not KeyCodec(backup.api_version).is_v2:
        return ()
    return tuple(sorted({int.from_bytes(part.start[1:PREFIX_SIZE], "big") for part in backup.ranges}))


def _codec(backup: BackupSet, keyspace_id: int | None) -> KeyCodec:
    ids = keyspaces_of(backup) or (0,)
    if keyspace_id is None and len(ids) > 1:
        raise UsageError(f"the backup has keyspaces {', '.join(map(str, ids))}", hint="Say --keyspace.")
    try:
        return KeyCodec(backup.api_version, ids[0] if keyspace_id is None else keyspace_id)
    except UnsupportedFormat as error:
        raise UsageError(f"--keyspace: {error}") from None


def _find_in(backup: BackupSet, file: FileEntry, codec: KeyCodec, rpc_key: bytes) -> FoundValue | None:
    kind = kind_of(file)
    verify_file_identity(backup.store, file, etag_counts=False)
    with naming(file):
        if kind is FileKind.SST:
            return _find_in_sst(open_file(backup.store, file), file, codec, rpc_key)
        return _find_in_rows(backup, file, codec, rpc_key)


def _find_in_sst(source: RandomAccess, file: FileEntry, codec: KeyCodec, rpc_key: bytes) -> FoundValue | None:
    wanted = DATA_PREFIX + codec.bound(rpc_key)
    row = first_row_from(Table(source), wanted)
    if row is None or not row.key.startswith(wanted):
        return None
    found, ts = codec.parse_storage_key(row.key[len(DATA_PREFIX) :])
    return FoundValue(decode_value(codec.api_version, row.value), ts, file.name) if found == rpc_key else None


def _find_in_rows(backup: BackupSet, file: FileEntry, codec: KeyCodec, rpc_key: bytes) -> FoundValue | None:
    """By reading the one part of the file that may hold the key."""
    for batch in records(backup.store, file, codec, KeyRange(rpc_key, rpc_key + b"\0")):
        newest = batch.slice(0, 1).to_pylist()[0]
        stored = StoredValue(newest["value"], newest["expire_ts"], newest["deleted"])
        return FoundValue(stored, newest["ts"], file.name)
    return None
