"""Look at a backup's files before any store does: a wrong file does not come back as an error, the store dies of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from formats.api_version import ApiVersion
from formats.keys import DATA_PREFIX, KeyCodec
from formats.sst import SstFacts, Table
from formats.sst.check import check_table
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import FileEntry, FileKind
from tikv_br.errors import BackupDamaged
from tikv_br.proof.stored_rows import kind_of, naming, open_file

_MAX_TS = "tikv.max_ts"


class FileCheck(enum.StrEnum):
    """How much of each file is read before a store is given it."""

    IDENTITY = "identity"
    """Length, the storage's own mark, hash of the last part, structure: a few small reads."""
    CONTENT = "content"
    """The sha256 of all bytes besides."""
    AUTO = "auto"
    """`IDENTITY` where the storage's recorded mark vouches for the bytes, else `CONTENT`: moved backups, the Go tool's."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """What a file says of itself."""

    max_ts: int
    """The largest ts known of its rows; 0 before V2."""


def inspect_files(
    backup: BackupSet,
    files: Sequence[FileEntry],
    check: FileCheck,
    threads: int,
    on_done: Callable[[FileEntry], None] = lambda _file: None,
) -> dict[str, Inspected]:
    """Inspect all ``files``, several at once; facts by name. Raises `BackupDamaged` for the first that is not sound."""

    def inspect(file: FileEntry) -> Inspected:
        facts = inspect_file(backup, file, check)
        on_done(file)
        return facts

    with ThreadPoolExecutor(threads, thread_name_prefix="inspect") as pool:
        try:
            return dict(zip((file.name for file in files), pool.map(inspect, files), strict=True))
        finally:
            pool.shutdown(cancel_futures=True)


def inspect_file(backup: BackupSet, file: FileEntry, check: FileCheck) -> Inspected:
    """Check identity, structure and, where wanted, content of one file. Raises `BackupDamaged` with its name."""
    backup.verify_identity(file)
    vouched_for = backup.at_home and file.etag and file.tail_sha256
    if check is FileCheck.CONTENT or (check is FileCheck.AUTO and not vouched_for):
        backup.verify_content(file)
    inspect = _inspect_parquet if kind_of(file) is FileKind.PARQUET else _inspect_sst
    with naming(file):
        rows, inspected = inspect(backup, file)
    if rows != file.total_kvs:
        raise BackupDamaged(f"{file.name} has {rows} rows, the backup recorded {file.total_kvs}")
    return inspected


def _inspect_sst(backup: BackupSet, file: FileEntry) -> tuple[int, Inspected]:
    """How many rows the file says to have, and the rest."""
    codec = KeyCodec(backup.api_version)
    table = Table(open_file(backup.store, file))
    facts = check_table(table, backup.api_version, codec.bound(file.start_key), codec.bound(file.end_key))
    return facts.entries, Inspected(_max_ts(file, facts, table.properties, codec))


def _inspect_parquet(backup: BackupSet, file: FileEntry) -> tuple[int, Inspected]:
    from formats.parquet_reader import ParquetReader

    return ParquetReader(open_file(backup.store, file)).rows, Inspected(file.max_ts)


def _max_ts(file: FileEntry, facts: SstFacts, properties: dict[str, bytes], codec: KeyCodec) -> int:
    if codec.api_version is not ApiVersion.V2:
        return 0
    if file.max_ts:
        return file.max_ts
    ends = (codec.parse_storage_key(key[len(DATA_PREFIX) :])[1] for key in (facts.first_key, facts.last_key))
    return max(int.from_bytes(properties.get(_MAX_TS, b""), "big"), *ends)
