"""Writes the data files of one task into the storage, and computes what is recorded of them; and what tasks of both engines have in common.

A task may be retried, or run twice at once by Spark. Each attempt writes files with unique names, and only a finished attempt
writes a ledger entry.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field

from tikv_br.backupset import layout
from tikv_br.backupset.coverage import RegionPart
from tikv_br.backupset.files import Expiry, FileEntry, FileKind, FileWriter
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry, write_entry
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.regions import BoundInsideKey, RegionCache
from tikv_br.dataflow.convert import CONVERTED_TS, BatchStats, Conversion, ConvertedRows, Converter, join_expiry
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import RetryBudgetExhausted, StorageError, TikvBrError
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.rawscan import RawPage
from tikv_br.retry import Backoff, Backoffer, RetryPolicy
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    from tikv_br.formats.parquet import ParquetWriter
    from tikv_br.formats.sst.writer import SstWriter


Result = TypeVar("Result")
ATTEMPTS = 3
"""Attempts per task for retryable errors."""
_PAUSE = Backoff("task", 0.5, 5.0, jitter=True)
"""Pause between attempts."""


class Snapshot(Struct, frozen=True):
    """The state of transactional data that a backup reads. Picklable."""

    ts: int
    resolved_locks: frozenset[int] = frozenset()
    """Start ts of transactions that can only commit above `ts`: their locks do not count."""


class BackupJob(Struct, frozen=True):
    """Parameters that all tasks of a run share. Picklable."""

    run: str
    """Id of the run, for `LedgerEntry`."""
    options: BackupOptions
    conversion: Conversion
    """Conversion from the cluster's encoding to the files'."""
    rate_limit: RateLimit = field(default_factory=RateLimit)
    rewrites_files: bool = False
    """Store engine: whether the task rewrites the stores' files, because stores cannot write the requested form."""
    expiry_in_properties: bool = True
    """True if properties of the stores' files have the expiry of rows (store engine)."""
    snapshot: Snapshot | None = None
    """None = raw data, which has none."""

    @property
    def with_ttl(self) -> bool:
        """Return whether rows may expire."""
        return self.conversion.source.has_ttl and not self.options.assume_no_ttl


class PhaseSeconds(Struct):
    """A task's time per phase; scanning overlaps with the other phases."""

    scan: float = 0.0
    ttl: float = 0.0
    convert: float = 0.0
    """Conversion and checksums; 0 if pages are encoded directly."""
    encode: float = 0.0
    """Building and compressing SST blocks."""
    upload: float = 0.0
    """Seconds of hashing and upload."""
    store: float = 0.0
    """Waiting for stores that write files."""
    inspect: float = 0.0
    """Reading the files that stores wrote."""

    def add(self, other: PhaseSeconds) -> None:
        """Add the other's seconds to these."""
        for phase in self.__struct_fields__:
            setattr(self, phase, getattr(self, phase) + getattr(other, phase))


class TaskResult(Struct, frozen=True):
    """Identity and counts of the written ledger entry, and the time per phase. The entry itself stays in the ledger."""

    finished: FinishedTask
    seconds: PhaseSeconds


def try_task(context: TaskContext, attempt: Callable[[], Result]) -> Result:
    """Run a task, and retry it after retryable errors. Raises the `TikvBrError` of the last attempt.

    The progress of a failed attempt is retracted. `RetryBudgetExhausted` is not retried: another attempt would only wait for the same thing again.
    """
    backoffer = Backoffer("task", RetryPolicy(max_tries=ATTEMPTS, error=None))
    while True:
        try:
            with context.retract_on_error():
                return attempt()
        except TikvBrError as error:
            if not error.retryable or isinstance(error, RetryBudgetExhausted):
                raise
            backoffer.wait(_PAUSE, error)


log = logging.getLogger(__name__)
PARQUET_FORMAT_VERSION = "1"


def write_interval(
    options: BackupOptions, run: str, interval: KeyRange, converter: Converter, rows: Iterable[ConvertedRows]
) -> TaskResult:
    """Write the rows of a task's interval, and its ledger entry; after an error the files are removed.

    Takes the rows one after another; the time that this needs counts as encoding.
    """
    attempt, began = secrets.token_hex(8), time.perf_counter()
    store = open_store(options.storage)
    files = DataFiles(store, interval, attempt, converter, options)
    source = Checksum()
    try:
        for each in rows:
            files.add(each)
            source += each.source
        entry = LedgerEntry(interval.start, interval.end, attempt, files.finish(), source=source, run=run)
        write_entry(store, entry)
    except BaseException:
        files.abandon()
        raise
    uploading = files.seconds_uploading
    seconds = PhaseSeconds(encode=time.perf_counter() - began - uploading, upload=uploading)
    return TaskResult(FinishedTask.of(entry), seconds)


class RegionCounts(Struct):
    """Counts rows and bytes per region. Takes pages in key order, each from one region."""

    regions: RegionCache
    converter: Converter
    interval: KeyRange
    """The task's interval, in RPC keys of the source."""
    _here: KeyRange | None = None
    """The part of the interval in the last page's region."""
    _reached: bytes = b""
    """End of the previous region's part."""
    _sums: Checksum = field(default_factory=Checksum)
    _done: list[RegionPart] = field(default_factory=list)

    def add(self, first_key: bytes, rows: Checksum) -> None:
        """Count a page by its first RPC key; ``rows`` are its sums in the target's encoding. Raises `ClusterError`."""
        if self._here is None or (self._here.end and first_key >= self._here.end):
            self._close()
            self._here = self._region_of(first_key)
        self._sums += rows

    def narrow(self, end: bytes) -> None:
        """End the interval at this RPC key, which must be above all pages so far."""
        self.interval = KeyRange(self.interval.start, end)
        if self._here is not None:
            self._here = intersection(self._here, self.interval)

    def parts(self) -> tuple[RegionPart, ...]:
        """The counts of all regions with rows."""
        self._close()
        return tuple(self._done)

    def _close(self) -> None:
        if self._here is not None:
            self._reached = self._here.end
            if self._sums.total_kvs:
                self._done.append(part_of(self.converter.target_range(self._here), self._sums))
        self._here, self._sums = None, Checksum()

    def _region_of(self, key: bytes) -> KeyRange:
        codec = self.converter.source
        region = self.regions.locate(codec.bound(key))
        try:
            start = codec.from_bound(region.start)
        except DamagedBytes:  # PD can be made to split anywhere
            start = key
        start = max(start, self._reached)  # it may have merged with the region before
        try:
            end = region.end_within(codec, KeyRange(key, self.interval.end))
        except BoundInsideKey:
            end = key + b"\0"
        return intersection(self.interval, KeyRange(start, end))


def part_of(span: KeyRange, sums: Checksum) -> RegionPart:
    """The counts of one region, in RPC keys of the target."""
    return RegionPart(span.start, span.end, sums.total_kvs, sums.total_bytes)


class _OpenFile(Struct):
    start: bytes
    """Start of its range."""
    file: FileWriter
    writer: SstWriter | ParquetWriter
    """Turns rows into bytes for `file`."""
    sums: Checksum = field(default_factory=Checksum)
    expiry: Expiry = field(default_factory=Expiry)
    timestamps: list[int] = field(default_factory=list)

    def count(self, rows: BatchStats) -> None:
        self.sums += rows.target
        self.expiry = join_expiry(self.expiry, rows.expiry)
        self.timestamps += rows.timestamps


class DataFiles:
    """Writes the rows of one interval into files whose ranges together cover it; without rows there is no file.

    For one thread. Call `finish` or `abandon` at the end.
    """

    def __init__(
        self,
        store: ObjectStore,
        interval: KeyRange,
        attempt: str,
        converter: Converter,
        options: BackupOptions,
        part: KeyRange | None = None,
    ) -> None:
        """``interval`` and ``attempt`` name the files. They cover ``part``, which is by default the interval."""
        self.seconds_uploading = 0.0
        """The part of the time in `add` and `finish` that was spent on hashing and uploading finished files."""
        self._store = store
        self._interval = interval
        self._attempt = attempt
        self._converter = converter
        self._options = options
        covered = converter.target_range(part or interval)
        self._next_start, self._end = covered.start, covered.end
        self._open: _OpenFile | None = None
        self._done: list[FileEntry] = []

    def add(self, rows: ConvertedRows) -> None:
        """Append rows that follow those before. Raises `StorageError`, `UnsortedKeys`."""
        from tikv_br.formats.rows import to_storage
        from tikv_br.formats.sst.writer import SstWriter

        file = self._file_from(rows.first_key)
        is_sst = isinstance(file.writer, SstWriter)
        file.writer.append(to_storage(rows.records, self._converter.target) if is_sst else rows.records)
        file.count(rows)

    def add_page(self, page: RawPage) -> BatchStats:
        """Convert and append a scan's page of rows without expiry; returns their sums.

        Raises as `add` does, and `DamagedBytes` for keys outside the source's keyspace.
        """
        from tikv_br.formats.sst.writer import SstWriter

        converter = self._converter
        file = self._file_from(converter.first_key(page))
        if not isinstance(file.writer, SstWriter):
            converted = converter.convert_page(page.split())
            self.add(converted)
            return converted
        folded = file.writer.append_page(page, converter.source, converter.target, converter.ts or CONVERTED_TS)
        sums = converter.page_sums(folded)
        file.count(sums)
        return sums

    def narrow(self, end: bytes) -> None:
        """End the range at this RPC key of the target."""
        self._end = end

    def finish(self) -> tuple[FileEntry, ...]:
        """Close the last file; all files are in the storage then."""
        if self._open is not None:
            self._close(self._open, self._end)
        return tuple(self._done)

    def abandon(self) -> None:
        """Remove all files. Files that cannot be removed are logged; nothing refers to them."""
        from tikv_br.formats.sst.writer import SstWriter

        if self._open is not None:
            with self._open.file:  # aborts the upload
                if not isinstance(self._open.writer, SstWriter):
                    self._open.writer.abort()
            self._open = None
        for file in self._done:
            try:
                self._store.delete(file.name)
            except StorageError as error:
                log.warning("cannot remove %s of a failed task: %s", file.name, error.message)
        self._done.clear()

    def _file_from(self, first_key: bytes) -> _OpenFile:
        """The file for rows from this key on; starts a new one if the last is full."""
        if self._open is not None and self._open.sums.total_bytes >= self._options.file_bytes:
            self._close(self._open, first_key)
        if self._open is None:
            name = layout.data_name(self._options.file_kind, self._interval, self._attempt, len(self._done))
            file = FileWriter(self._store, name)
            self._open = _OpenFile(self._next_start, file, self._writer(file))
        return self._open

    def _writer(self, file: FileWriter) -> SstWriter | ParquetWriter:
        options = self._options
        if options.file_kind is FileKind.SST:
            from tikv_br.formats.sst.writer import SstOptions, SstWriter

            return SstWriter(file.write, SstOptions(options.compression, options.compression_level))
        from tikv_br.formats.parquet import ParquetOptions, ParquetWriter

        return ParquetWriter(file.write, ParquetOptions(options.compression, options.compression_level))

    def _close(self, file: _OpenFile, end: bytes) -> None:
        from tikv_br.formats.sst.writer import SstWriter

        if isinstance(file.writer, SstWriter):
            file.writer.finish()
        else:
            file.writer.finish(self._parquet_metadata(KeyRange(file.start, end)))
        stored = file.file.close()
        self.seconds_uploading += file.file.seconds
        self._done.append(
            FileEntry(
                **stored._asdict(),
                start_key=file.start,
                end_key=end,
                crc64xor=file.sums.crc64xor,
                total_kvs=file.sums.total_kvs,
                total_bytes=file.sums.total_bytes,
                min_ts=min(file.timestamps),
                max_ts=max(file.timestamps),
                expiry=file.expiry,
            )
        )
        self._open, self._next_start = None, end

    def _parquet_metadata(self, span: KeyRange) -> dict[str, str]:
        codec = self._converter.target
        keys = codec.user_range(span)
        facts = {
            "format_version": PARQUET_FORMAT_VERSION,
            "api_version": codec.api_version.label,
            "start_key": keys.start.hex(),
            "end_key": keys.end.hex(),
        }
        return facts | {"keyspace_id": str(codec.keyspace_id)} if codec.is_v2 else facts
