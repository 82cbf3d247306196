"""The source ``tikv-backup``: reads the rows of a backup, a partition per file. An increment is read with all that it continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of, keyspace_codec
from tikv_br.backupset.files import FileEntry, verify_file_identity
from tikv_br.backupset.rows import keyspace_in, keyspaces_of
from tikv_br.dataflow.read import StoredRows
from tikv_br.datasource.options import CRYPTER_OPTIONS, KEY_OPTIONS, Options, use_this_python, with_hints
from tikv_br.datasource.rows import FilterPushdown, check_schema, intersections, spark_batches, spark_schema
from tikv_br.errors import UsageError
from tikv_br.formats.keys.codec import MAX_TS, KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

OPTIONS = ("path", *KEY_OPTIONS, "ttl", "ts", "pushdown", *CRYPTER_OPTIONS)


class TikvBackupDataSource(DataSource):
    """A backup of tikv-br or of the Go TiKV-BR. docs/spark.md describes the options."""

    @classmethod
    def name(cls) -> str:
        """Name for ``spark.read.format``; also calls `use_this_python`."""
        use_this_python()
        return "tikv-backup"

    def schema(self) -> StructType:
        """``key`` and ``value``; with these options also ``expire_ts`` and ``ts``. Raises `UsageError` for a wrong option."""
        with with_hints():
            return _reader(self.options).schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads without pushing filters down unless asked to: by default Spark refuses readers that can."""
        with with_hints():
            reader = _reader(self.options)
            check_schema(schema, reader.schema)
            reader.schema = schema
            return reader


def _reader(given: Mapping[str, str]) -> BackupReader:
    options = Options(given, OPTIONS)
    extra = [column for option, column in (("ttl", "expire_ts"), ("ts", "ts")) if options.flag(option)]
    cls = BackupPushdownReader if options.flag("pushdown") else BackupReader
    return cls(options.storage(), options.text("keyspace"), options.keys(), spark_schema(*extra))


@dataclass(frozen=True)
class FilesPartition(InputPartition):
    """RPC ranges of one keyspace, ascending, and where their rows are."""

    codec: KeyCodec
    ranges: tuple[KeyRange, ...]
    runs: tuple[tuple[StorageLocation, tuple[FileEntry, ...]], ...] = field(repr=False)
    """The files of the full backup, and of each increment on it."""
    now: int
    """Time of the newest backup: rows that expired before it are left out."""


@dataclass
class BackupReader(DataSourceReader):
    """Reads the rows that were live when the backup was made. Picklable."""

    location: StorageLocation
    keyspace: str
    """Id or recorded name; ``""`` = the only one."""
    ranges: tuple[KeyRange, ...]
    """Ranges of user keys."""
    schema: StructType

    def partitions(self) -> list[InputPartition]:
        """A partition for each file of the full backup with wanted keys. Reads the records of the backups; for the driver."""
        with with_hints():
            chain = BackupSet.open(open_store(self.location)).chain()
            base = chain[0]
            codec = self._codec(base)
            wanted = [codec.rpc_range(each) for each in self.ranges]
            parts = (
                (part, intersections([part], wanted))
                for whole in base.ranges
                if codec_of(base.api_version, whole) == codec
                for part in _cut(whole, [file.start_key for file in base.files])
            )
            found = [
                FilesPartition(codec, ranges, _runs(chain, part), chain[-1].seconds) for part, ranges in parts if ranges
            ]
            return [each for each in found if each.runs]

    def _codec(self, backup: BackupSet) -> KeyCodec:
        known = keyspaces_of(backup) or (0,)
        if not self.keyspace and len(known) > 1:
            raise UsageError(
                f"{backup.store.location} has the keyspaces {', '.join(map(str, known))}",
                hint="Pass option keyspace with the id or name of one.",
            )
        chosen = keyspace_in(backup, self.keyspace, "option keyspace") if self.keyspace else known[0]
        codec = keyspace_codec(backup.api_version, chosen, "option keyspace", "Leave it out.")
        if chosen not in known:
            raise UsageError(
                f"{backup.store.location} does not have keyspace {chosen}", hint=f"It has {', '.join(map(str, known))}."
            )
        return codec

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The live rows of a partition, by ascending key. Spark passes another partition if there is none."""
        if not isinstance(partition, FilesPartition):
            return
        with with_hints():
            for location, files in partition.runs:
                for file in files:
                    verify_file_identity(open_store(location), file, etag_counts=False)
            for span in partition.ranges:
                for rows in StoredRows(partition.runs, MAX_TS, partition.now).batches(span, partition.codec):
                    yield from spark_batches(rows, self.schema)


class BackupPushdownReader(FilterPushdown, BackupReader):
    """Reads only keys for which Spark's filters hold."""


def _cut(whole: KeyRange, starts: Sequence[bytes]) -> list[KeyRange]:
    inside = sorted({start for start in starts if start > whole.start and (not whole.end or start < whole.end)})
    return [KeyRange(start, end) for start, end in pairwise([whole.start, *inside, whole.end])]


def _runs(chain: Sequence[BackupSet], part: KeyRange) -> tuple[tuple[StorageLocation, tuple[FileEntry, ...]], ...]:
    """The files of each backup with keys of a range; backups without such files are left out."""
    found = (
        (each.store.location, tuple(file for file in each.files if not intersection(file.key_range, part).is_empty))
        for each in chain
    )
    return tuple(run for run in found if run[1])
