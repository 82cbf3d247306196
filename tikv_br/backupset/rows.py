"""Reads the rows of a backup's data files: all of them, or one key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tikv_br import cancellation
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import keyspace_codec, keyspaces_in, shown_keyspaces
from tikv_br.backupset.files import FileEntry, FileKind, FilePair, verify_file_identity
from tikv_br.errors import BackupDamaged, BackupUnsupported, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import FormatError, UnsupportedFormat
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, intersection
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.mvcc import DELETE, WriteRecord
from tikv_br.formats.sst.source import RandomAccess
from tikv_br.formats.sst.table import Table, first_row_from
from tikv_br.formats.values import StoredValue, decode_value
from tikv_br.storage.base import ObjectSource, ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa


def kind_of(file: FileEntry) -> FileKind:
    """The kind of a file, by its name. Raises `BackupUnsupported`."""
    kind = FileKind.of(file.name)
    if kind is None:
        raise BackupUnsupported(f"cannot read {file.name} row by row: its file format is unknown")
    return kind


def open_file(store: ObjectStore, file: FileEntry) -> ObjectSource:
    """The plain bytes of a file, to be read by ranges. Raises `StorageObjectMissing`."""
    return ObjectSource(store, file.name, file.cipher_iv)


def read_rows(
    store: ObjectStore, file: FileEntry, codec: KeyCodec, span: KeyRange | None = None, values: FileEntry | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a file, or those in ``span`` (RPC keys): batches of ``tikv_br.formats.columns.SCHEMA``, by ascending key.

    ``codec`` is for the file's keyspace, API version and mode. Of transactional data, ``file`` and ``values`` are the files of a
    `FilePair`, and each row has its commit ts. Older versions of a key (newest first), tombstones and
    expired rows are there where the file has them: ``tikv_br.formats.rows.LiveFilter`` drops them. No batch is empty. Raises
    `BackupDamaged` and `BackupUnsupported` that name the file, `StorageError`.
    """
    wanted = codec.user_range(span or file.key_range)
    with file_errors(file):
        if codec.mode is KeyMode.TXN:
            from tikv_br.formats.mvcc import join

            long = () if values is None else stored_rows(store, values, codec, wanted)
            yield from join(stored_rows(store, file, codec, wanted), long, codec.prefix)
            return
        match kind_of(file):
            case FileKind.SST:
                yield from _sst_records(open_file(store, file), codec, wanted)
            case FileKind.PARQUET:
                from tikv_br.formats.parquet import ParquetReader

                yield from ParquetReader(open_file(store, file), file.total_bytes).records(wanted)


def _sst_records(source: RandomAccess, codec: KeyCodec, span: KeyRange) -> Iterator[pa.RecordBatch]:
    from tikv_br.formats.rows import from_storage, within
    from tikv_br.formats.sst.reader import SstReader

    bounds = _data_range(codec, span)
    for rows in SstReader(source).batches(start=bounds.start, end=bounds.end):
        wanted = within(from_storage(rows, codec), span)
        if wanted.num_rows:
            yield wanted


def stored_rows(
    store: ObjectStore, file: FileEntry, codec: KeyCodec, span: KeyRange = EVERY_KEY
) -> Iterator[pa.RecordBatch]:
    """The rows of a file of transactional data with user keys in ``span``, as stores hold them: batches of ``STORAGE_SCHEMA``.

    Raises as `read_rows`.
    """
    from tikv_br.formats.rows import within
    from tikv_br.formats.sst.reader import SstReader

    bounds = _data_range(codec, span)
    with file_errors(file):
        for rows in SstReader(open_file(store, file)).batches(start=bounds.start, end=bounds.end):
            if (wanted := within(rows, bounds)).num_rows:
                yield wanted


def count_fences(store: ObjectStore, file: FileEntry) -> int:
    """The number of GC fences in a file of the column family ``write``, all of which is read. Raises as `read_rows`.

    Readers hide a row with a fence in a cluster that has no version of it at the fence, as after a restore.
    """
    from tikv_br.formats.mvcc import fences
    from tikv_br.formats.sst.reader import SstReader

    count = 0
    with file_errors(file):
        for rows in SstReader(open_file(store, file)).batches():
            cancellation.check()
            count += int((fences(rows) > 0).sum())
    return count


SAMPLE_FILES, SAMPLE_KEYS = 8, 1000


def sample_keys(backup: BackupSet, keyspace_id: int, span: KeyRange, now: int) -> list[bytes]:
    """Some user keys of a keyspace and range, from the smallest files; only keys of rows that are live at ``now``.

    Raises as `read_rows`.
    """
    from tikv_br.formats.rows import live

    codec = chosen_codec(backup, str(keyspace_id) if backup.api_version is ApiVersion.V2 else "")
    rpc_span, keys = codec.rpc_range(span), list[bytes]()
    files = [each for each in backup.files if each.total_kvs and not intersection(each.key_range, rpc_span).is_empty]
    for file in sorted(files, key=lambda each: (each.total_kvs, each.name))[:SAMPLE_FILES]:
        for rows in read_rows(backup.store, file, codec, intersection(file.key_range, rpc_span)):
            keys += live(rows, now)["key"][: SAMPLE_KEYS - len(keys)].to_pylist()
            if len(keys) >= SAMPLE_KEYS:
                return keys
    return keys


def value_check(codec: KeyCodec, file: FileEntry) -> Callable[[bytes], object] | None:
    """The argument of `check_structure` for a file."""
    if codec.mode is KeyMode.RAW:
        return None
    return WriteRecord.decode if file.cf == "write" else bytes


def _data_range(codec: KeyCodec, span: KeyRange) -> KeyRange:
    """Bounds of stored keys for a range of user keys; an empty bound stays empty."""
    start, end = (DATA_PREFIX + codec.bound(codec.rpc_key(key)) if key else b"" for key in (span.start, span.end))
    return KeyRange(start, end)


def has_rows(backup: BackupSet, spans: Sequence[KeyRange]) -> bool:
    """Return whether a backup has rows in RPC ranges, expired ones included. Reads files only if none lies wholly in a range."""
    wanted = [
        (pair, part)
        for pair in backup.pairs
        for span in spans
        if pair.sums.total_kvs and not (part := intersection(pair.file.key_range, span)).is_empty
    ]
    if any(part == pair.file.key_range for pair, part in wanted):
        return True
    return any(
        True
        for (file, values), part in wanted
        for _ in read_rows(backup.store, file, backup.codec_of(file.key_range), part, values)
    )


@contextlib.contextmanager
def file_errors(file: FileEntry) -> Iterator[None]:
    """Turn what is wrong with bytes into what is wrong with a file of a backup."""
    try:
        yield
    except UnsupportedFormat as error:
        raise BackupUnsupported(f"{file.name}: {error}") from None
    except FormatError as error:
        raise BackupDamaged(f"{file.name} is damaged: {error}") from None


class FoundValue(NamedTuple):
    """The newest version of a key in a backup."""

    stored: StoredValue
    ts: int
    """0 = the API version has none."""
    file: str


def find_value(backup: BackupSet, user_key: bytes, keyspace_id: int | str | None = None) -> FoundValue | None:
    """Return the value of a user key, also an expired one or a tombstone; None if the backup has none.

    ``keyspace_id`` may be left out where the backup has one keyspace only. Raises `UsageError` for a key that the backup
    does not cover, `BackupDamaged` naming the file, `BackupUnsupported` for files that cannot be read row by row.
    """
    codec = chosen_codec(backup, "" if keyspace_id is None else str(keyspace_id))
    rpc_key = codec.rpc_key(user_key)
    here = KeyRange(rpc_key, rpc_key + b"\0")
    if not any(whole.contains(here) for whole in backup.ranges):
        raise UsageError(f"the key is outside the backup's ranges: {', '.join(map(str, backup.ranges))}")
    pair = next((pair for pair in backup.pairs if pair.file.key_range.contains(here)), None)
    return None if pair is None else _find_in(backup, pair, codec, rpc_key)


def keyspaces_of(backup: BackupSet) -> tuple[int, ...]:
    """The ids of the keyspaces that a backup's ranges begin in; none before API V2."""
    return keyspaces_in(backup.api_version, backup.ranges)


def keyspace_in(backup: BackupSet, given: str, option: str = "--keyspace") -> int:
    """The id in a backup of a keyspace that is given by its id or its recorded name. Raises `UsageError`."""
    if given.isascii() and given.isdecimal():
        return int(given)
    names = _names(backup)
    found = next((id_ for id_, name in names.items() if name == given), None)
    if found is None:
        known = ", ".join(f"{name} ({id_})" for id_, name in names.items())
        raise UsageError(
            f"{option}: the backup records no keyspace {given!r}{f', only {known}' if known else ', and no names'}",
            hint="Pass the id; `tikv-br show` prints the ids and names.",
        )
    return found


def _names(backup: BackupSet) -> Mapping[int, str]:
    return {} if backup.manifest is None else backup.manifest.description.names


def chosen_codec(backup: BackupSet, keyspace: str) -> KeyCodec:
    """The codec of the keyspace with an id or a recorded name; for ``""`` of the only keyspace. Raises `UsageError`."""
    ids = keyspaces_of(backup) or (0,)
    if not keyspace and len(ids) > 1:
        raise UsageError(
            f"the backup has several keyspaces: {shown_keyspaces(ids, [_names(backup).get(each, '') for each in ids])}",
            hint="Choose one with --keyspace.",
        )
    number = keyspace_in(backup, keyspace) if keyspace else ids[0]
    return keyspace_codec(backup.api_version, number, "--keyspace", mode=backup.key_mode)


def _find_in(backup: BackupSet, pair: FilePair, codec: KeyCodec, rpc_key: bytes) -> FoundValue | None:
    file = pair.file
    if kind_of(file) is FileKind.PARQUET:
        verify_file_identity(backup.store, file, etag_counts=False)
        with file_errors(file):
            return _find_in_rows(backup, file, codec, rpc_key)
    found = _find_in_sst(backup, file, codec, rpc_key)
    if found is None:
        return None
    ts, stored = found
    with file_errors(file):
        if codec.mode is KeyMode.RAW:
            return FoundValue(decode_value(codec.api_version, stored), ts, file.name)
        record = WriteRecord.decode(stored)
    if record.kind == DELETE or record.value is not None:
        return FoundValue(StoredValue(record.value or b"", deleted=record.kind == DELETE), ts, file.name)
    long = None if pair.values is None else _find_in_sst(backup, pair.values, codec, rpc_key)
    if pair.values is None or long is None or long[0] != record.start_ts:
        raise BackupDamaged(f"{file.name} is damaged: the backup lacks the value of key {show_key(rpc_key)}")
    return FoundValue(StoredValue(long[1]), ts, pair.values.name)


def _find_in_sst(backup: BackupSet, file: FileEntry, codec: KeyCodec, rpc_key: bytes) -> tuple[int, bytes] | None:
    """The ts and the stored value of the newest version of a key."""
    verify_file_identity(backup.store, file, etag_counts=False)
    wanted = DATA_PREFIX + codec.bound(rpc_key)
    with file_errors(file):
        row = first_row_from(Table(open_file(backup.store, file)), wanted)
        if row is None or not row.key.startswith(wanted):
            return None
        found, ts = codec.parse_storage_key(row.key[len(DATA_PREFIX) :])
    return (ts, row.value) if found == rpc_key else None


def _find_in_rows(backup: BackupSet, file: FileEntry, codec: KeyCodec, rpc_key: bytes) -> FoundValue | None:
    """Find the key by reading the one part of the file that may contain it."""
    for batch in read_rows(backup.store, file, codec, KeyRange(rpc_key, rpc_key + b"\0")):
        newest = batch.slice(0, 1).to_pylist()[0]
        stored = StoredValue(newest["value"], newest["expire_ts"], newest["deleted"])
        return FoundValue(stored, newest["ts"], file.name)
    return None
