"""The rows of a backup's data file, whatever its kind: the one place that opens data files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from formats.errors import FormatError, UnsupportedFormat
from formats.keys import KeyCodec
from formats.sst import RandomAccess
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import FileEntry, FileKind
from tikv_br.errors import BackupDamaged, BackupUnsupported
from tikv_br.proof.ranges import user_range
from tikv_br.proof.stored_file import StoredFile
from tikv_br.storage.base import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa


def kind_of(file: FileEntry) -> FileKind:
    """The kind of a file, by its name. Raises `BackupUnsupported`."""
    kind = FileKind.of(file.name)
    if kind is None:
        raise BackupUnsupported(f"{file.name} is of no kind that can be read row by row")
    return kind


def open_file(store: ObjectStore, file: FileEntry) -> StoredFile:
    """The plain bytes of a file, to be read by ranges. Raises `StorageObjectMissing`."""
    return StoredFile(store, file.name, file.cipher_iv)


def records(
    store: ObjectStore, file: FileEntry, codec: KeyCodec, span: KeyRange | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a file, or those in ``span`` (RPC keys): batches of ``formats.records.SCHEMA``, by ascending key.

    ``codec`` is that of the file's keyspace and API version. Older versions of a key (newest first), tombstones and
    expired rows are there where the file has them: ``formats.rows.LiveFilter`` drops them. No batch is empty. Raises
    `BackupDamaged` and `BackupUnsupported` that name the file, `StorageError`.
    """
    start, end = user_range(codec, span or file.key_range)
    with naming(file):
        match kind_of(file):
            case FileKind.SST:
                yield from _sst_records(open_file(store, file), codec, start, end)
            case FileKind.PARQUET:
                from formats.parquet_reader import ParquetReader

                yield from ParquetReader(open_file(store, file)).records(start, end)


def _sst_records(source: RandomAccess, codec: KeyCodec, start: bytes, end: bytes) -> Iterator[pa.RecordBatch]:
    from formats.rows import from_storage, within
    from formats.sst import SstReader

    for rows in SstReader(source).batches():
        wanted = within(from_storage(rows, codec), start, end)
        if wanted.num_rows:
            yield wanted


@contextlib.contextmanager
def naming(file: FileEntry) -> Iterator[None]:
    """Turn what is wrong with bytes into what is wrong with a file of a backup."""
    try:
        yield
    except UnsupportedFormat as error:
        raise BackupUnsupported(f"{file.name}: {error}") from None
    except FormatError as error:
        raise BackupDamaged(f"{file.name} is not sound: {error}") from None
