"""Validates a backup's files before a store reads them: a damaged file does not cause an error there, it crashes the store."""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from tikv_br import cancellation
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileEntry, FileKind
from tikv_br.backupset.rows import count_fences, file_errors, kind_of, open_file, read_rows, value_check
from tikv_br.cancellation import Cancellation, inherit, run_on_threads
from tikv_br.errors import BackupDamaged
from tikv_br.formats.keys.codec import DATA_PREFIX, ENCODED_GROUP, GROUP, KeyCodec
from tikv_br.formats.sst.block import FOOTER_SIZE, TRAILER_SIZE, ChecksumType
from tikv_br.formats.sst.check import check_structure
from tikv_br.formats.sst.coding import BlockHandle
from tikv_br.formats.sst.table import BLOCK_NAME, EndKeys, Table, runs

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_TS = "tikv.max_ts"
PIECE_BYTES = 4 << 20
"""The least of a file's keys and values that is worth a checksum request of its own."""


class FileCheck(enum.StrEnum):
    """Validation of each file before ingest."""

    IDENTITY = "identity"
    """Size, ETag, hash of the tail, and structure: a few small reads."""
    BLOCKS = "blocks"
    """`IDENTITY`, and the checksum that each block of a table has in the file; `CONTENT` for files that have none."""
    CONTENT = "content"
    """`IDENTITY`, and the SHA-256 of the whole file."""
    AUTO = "auto"
    """`IDENTITY` if the recorded ETag vouches for the content. Else `BLOCKS`; but `CONTENT` for encrypted files, whose blocks can be
    altered without the key, and for files whose tail has no recorded hash: the Go tool's."""


class FileFacts(Struct, frozen=True):
    """Facts from a file's own metadata."""

    max_ts: int
    """Largest known ts of its rows; 0 if they have none."""
    cuts: tuple[bytes, ...] = ()
    """RPC keys that divide the file into pieces of about equal size; may be empty."""
    rows: int = 0
    """Stored rows."""
    fences: int = 0
    """Rows of transactions that readers of another cluster take for deleted."""


RowCheck: TypeAlias = "Callable[[FileEntry, pa.RecordBatch], None]"
"""Checks raw rows of a file, with user keys."""


def inspect_files(
    backup: BackupSet,
    files: Sequence[FileEntry],
    check: FileCheck,
    threads: int,
    on_done: Callable[[FileEntry], None] = lambda _file: None,
    check_rows: RowCheck | None = None,
) -> dict[str, FileFacts]:
    """Inspect ``files`` in parallel; returns facts by name. Raises `BackupDamaged` for the first damaged file.

    If there are fewer files than ``threads``, `FileFacts.cuts` divides each file to use them all. With ``check_rows`` all rows are read.
    """

    def inspect(file: FileEntry) -> FileFacts:
        cancellation.check()
        facts = inspect_file(backup, file, check, max(threads // len(files), 1))
        if check_rows is not None:
            for rows in read_rows(backup.store, file, codec_of(backup.api_version, file.key_range)):
                cancellation.check()
                check_rows(file, rows)
        on_done(file)
        return facts

    facts = run_on_threads(inspect, files, _readers(backup, threads), "inspect")
    return dict(zip((file.name for file in files), facts, strict=True))


class BackgroundInspection:
    """`inspect_files` on threads of its own, from now on until `stop`."""

    def __init__(
        self,
        backup: BackupSet,
        files: Sequence[FileEntry],
        check: FileCheck,
        threads: int,
        check_rows: RowCheck | None = None,
    ) -> None:
        self._cancellation = Cancellation()
        self._began = time.monotonic()
        self._ended: float | None = None
        pool = ThreadPoolExecutor(1, thread_name_prefix="inspect-all")
        with self._cancellation.active():
            self._facts = pool.submit(inherit(inspect_files), backup, files, check, threads, check_rows=check_rows)
        self._facts.add_done_callback(lambda _facts: self._end())
        pool.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        """Return whether all files are inspected, or one has failed."""
        return self._facts.done()

    def result(self) -> dict[str, FileFacts]:
        """Wait for the result of `inspect_files`, and return or raise it."""
        return self._facts.result()

    def stop(self) -> None:
        """Inspect no other file; idempotent."""
        self._cancellation.cancel()

    def seconds_until(self, end: float) -> float:
        """Return the seconds spent on inspection before ``end``, on the monotonic clock."""
        return min(end, self._ended or end) - self._began

    def _end(self) -> None:
        self._ended = time.monotonic()


def inspect_file(backup: BackupSet, file: FileEntry, check: FileCheck, pieces: int = 1) -> FileFacts:
    """Check identity and structure of one file and, depending on ``check``, its content. Raises `BackupDamaged` with its name.

    `FileFacts.cuts` divides it into at most ``pieces``; its content is read by as many requests at a time.
    """
    backup.verify_identity(file)
    if check is FileCheck.AUTO:
        check = _sufficient_check(backup, file)
    if check is FileCheck.CONTENT:
        backup.verify_content(file, pieces)
    inspect = _inspect_parquet if kind_of(file) is FileKind.PARQUET else _inspect_sst
    with file_errors(file):
        inspected = inspect(backup, file, pieces, check)
    if file.cf == "default" and inspected.rows != file.total_kvs:
        raise rows_differ(file, inspected.rows, file.total_kvs)
    return inspected


def _sufficient_check(backup: BackupSet, file: FileEntry) -> FileCheck:
    """The check that `FileCheck.AUTO` stands for, of this file."""
    if backup.is_at_original_location and file.etag and file.tail_sha256:
        return FileCheck.IDENTITY
    is_plain = not backup.store.location.crypter.encrypts
    return FileCheck.BLOCKS if file.tail_sha256 and is_plain else FileCheck.CONTENT


def _readers(backup: BackupSet, threads: int) -> int:
    """Threads that help: those that read a directory only wait for each other beyond the number of processors."""
    return min(threads, os.cpu_count() or 1) if backup.store.location.scheme == "local" else threads


def rows_differ(file: FileEntry, rows: int, recorded: int) -> BackupDamaged:
    """The error for a file with another number of rows than recorded."""
    return BackupDamaged(f"{file.name} has {rows} rows, but the backup recorded {recorded}")


def _inspect_sst(backup: BackupSet, file: FileEntry, pieces: int, check: FileCheck) -> FileFacts:
    codec = KeyCodec(backup.api_version, mode=backup.key_mode)
    table = Table(open_file(backup.store, file))
    ends = check_structure(
        table, codec, codec.bound(file.start_key), codec.bound(file.end_key), value_check(codec, file)
    )
    if check is FileCheck.BLOCKS:
        blocks = table.every_block()
        if _have_checksums(table, blocks, file):
            _check_blocks(table, blocks, _readers(backup, pieces))
        else:
            backup.verify_content(file, pieces)
    cuts = _cuts(table.index.separators, codec, file, min(pieces, file.total_bytes // PIECE_BYTES))
    fences = count_fences(backup.store, file) if file.cf == "write" else 0
    return FileFacts(_max_ts(file, ends, table.properties, codec), cuts, table.entries, fences)


def _have_checksums(table: Table, blocks: Iterable[BlockHandle], file: FileEntry) -> bool:
    """Whether each byte before the part of the file that is hashed lies in a block with a checksum."""
    reached = 0
    for offset, size in blocks:
        if offset > reached:
            break
        reached = offset + size + TRAILER_SIZE
    hashed_from = table.source.size - max(file.tail_size, FOOTER_SIZE)
    return table.footer.checksum is not ChecksumType.NONE and reached >= hashed_from


_CHECKING = threading.Lock()
"""Each checksum releases the GIL for a microsecond, and threads that compete for it are slower than one thread."""


def _check_blocks(table: Table, blocks: Iterable[BlockHandle], readers: int) -> None:
    def check(run: Sequence[BlockHandle]) -> None:
        cancellation.check()
        stored = list(table.stored(run))
        with _CHECKING:
            for handle, block in zip(run, stored, strict=True):
                table.blocks.require_sound(block, handle)

    properties = table.metaindex[BLOCK_NAME]  # checked by `read_properties`: a store may have written into them since
    run_on_threads(check, runs(block for block in blocks if block != properties), readers, "blocks")


def _cuts(separators: Sequence[bytes], codec: KeyCodec, file: FileEntry, pieces: int) -> tuple[bytes, ...]:
    """Keys near the ends of blocks at equal distances. A separator may be shortened: no whole storage key, but in order."""
    found = set()
    for number in range(1, pieces):
        key = separators[number * len(separators) // pieces][len(DATA_PREFIX) :]
        if codec.is_encoded:
            key = b"".join(key[at : at + GROUP] for at in range(0, len(key), ENCODED_GROUP))
        if key > file.start_key and (not file.end_key or key < file.end_key):
            found.add(key)
    return tuple(sorted(found))


def _inspect_parquet(backup: BackupSet, file: FileEntry, pieces: int, check: FileCheck) -> FileFacts:
    from tikv_br.formats.parquet import ParquetReader

    if check is FileCheck.BLOCKS:
        backup.verify_content(file, pieces)
    return FileFacts(file.max_ts, rows=ParquetReader(open_file(backup.store, file)).rows)


def _max_ts(file: FileEntry, ends: EndKeys, properties: dict[str, bytes], codec: KeyCodec) -> int:
    if not codec.is_encoded:
        return 0
    if file.max_ts:
        return file.max_ts
    seen = (codec.parse_storage_key(key[len(DATA_PREFIX) :])[1] for key in ends)
    return max(int.from_bytes(properties.get(_MAX_TS, b""), "big"), *seen)
