"""Writes a log archive: data files, each followed by the segment that makes it valid."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from tikv_br.archive.records import (
    DESCRIPTION,
    SEGMENTS,
    TRUNCATION,
    InexactPeriod,
    LogDescription,
    MissedIngest,
    Segment,
    SegmentName,
    Truncation,
    data_name,
    merge_periods,
)
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileEntry, FileWriter
from tikv_br.backupset.sealed import read_record, seal, with_key_of, write_record
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.timestamps import show_ts
from tikv_br.errors import BackupDamaged, LogDamaged, StorageConflict, StorageObjectMissing, SyncStateMismatch
from tikv_br.formats import columns, parquet
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, gaps, intersection
from tikv_br.formats.order import by_version
from tikv_br.records import dump
from tikv_br.storage.base import ObjectStore

BATCH_OVERHEAD = 2048
"""Estimated memory of a batch besides its buffers; a feed may deliver single rows."""
ROW_GROUPS = 16
"""Approximate number of row groups of a file: a task that merges some of the keys reads only theirs."""
SMALLEST_GROUP = 256 << 10
"""Bytes of keys and values of a row group, at least."""


@dataclass(frozen=True, slots=True)
class FlushOptions:
    """Options of flushes."""

    interval: float = 30.0
    """Seconds: how far the storage lags behind the source, about."""
    size: int = 64 << 20
    """Bytes of keys and values in memory after which a data file is written."""
    rate_limit: int = 0
    """Maximum upload rate in bytes per second; 0 = unlimited."""


def write_rows(
    store: ObjectStore,
    log_id: str,
    span: KeyRange,
    codec: KeyCodec,
    rows: pa.RecordBatch,
    rate_limit: RateLimit,
    row_groups: int = ROW_GROUPS,
) -> FileEntry:
    """Write a data file of a span: rows by ascending key, the newest version of a key first. Raises `StorageError`."""
    ts = columns.numbers(rows["ts"])
    min_ts, max_ts = int(ts.min()), int(ts.max())
    with FileWriter(store, data_name(log_id, span, min_ts, max_ts, secrets.token_hex(4))) as file:

        def write(data: bytes) -> None:
            file.write(data)
            rate_limit.spend(0, len(data))

        groups = min(row_groups, rows.nbytes // SMALLEST_GROUP + 1)
        parquet.write_rows(write, rows, -(-rows.num_rows // groups))
        stored = file.close()
    return FileEntry(
        **stored._asdict(),
        start_key=codec.rpc_key(rows["key"][0].as_py()),
        end_key=codec.rpc_key(rows["key"][-1].as_py()) + b"\0",
        crc64xor=0,
        total_kvs=rows.num_rows,
        total_bytes=int(columns.row_sizes(rows).sum()),
        min_ts=min_ts,
        max_ts=max_ts,
    )


class LogWriter:
    """Writes the changes of one span, or of several of a keyspace each. Not thread-safe.

    Rows are in memory until `flush`, or until there are `FlushOptions.size` bytes of them: then they are in a data file. They
    are part of the log once `flush` has returned. Each method may be repeated after it has raised `StorageUnreachable`.
    """

    def __init__(
        self,
        store: ObjectStore,
        description: LogDescription,
        span: KeyRange,
        options: FlushOptions = FlushOptions(),
        *,
        more: Sequence[KeyRange] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`span` and `more` (RPC keys) lie in the ranges of the log. With `more`, rows have RPC keys. Nothing is read or written before `start`."""
        self._store = store
        self._description = description
        self._spans = (span, *more)
        self._options = options
        self._clock = clock
        self._rate_limit = RateLimit(options.rate_limit)
        self._started = False
        self._flushed_at = clock()
        self._buffer: list[pa.RecordBatch] = []
        self._files: dict[KeyRange, list[FileEntry]] = {each: [] for each in self._spans}
        """Written since the last segments, by span."""
        self._inexact: list[InexactPeriod] = []
        """Rows since the last segment, and those in it that reach past it."""
        self._missed: list[MissedIngest] = []
        """Rows since the last segment."""
        self.buffered_bytes = 0
        self.flushed_ts = 0
        """The log has every change up to this."""
        self.rows = 0
        """Bytes and rows of the data files written by this process."""

    def start(self, ts: int) -> None:
        """Create the log, or resume it after `ts`, up to which it must have all changes.

        Raises `SyncStateMismatch` if the id belongs to a log of another cluster or range, `LogDamaged` if changes are
        missing, `CrypterMismatch`, `StorageError`.
        """
        if self._started:
            return
        wanted = structs.replace(self._description, start_ts=self._description.start_ts or ts)
        name = f"{wanted.log_id}/{DESCRIPTION}"
        try:
            found = self._read_or_create(wanted, name)
            self._check_same(found)
            self._check_reaches(ts, found.start_ts)
        except BackupDamaged as error:
            raise LogDamaged(f"the log at {self._store.location.redacted()}: {error.message}") from error
        self.flushed_ts = ts
        self._flushed_at = self._clock()
        self._started = True

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows of `tikv_br.formats.columns.SCHEMA` in any order. If it raises, the rows are not added."""
        if self.buffered_bytes >= self._options.size:
            self._write_file()
        if batch.num_rows:
            self._buffer.append(batch)
            self.buffered_bytes += batch.nbytes + BATCH_OVERHEAD

    def mark_inexact(self, period: InexactPeriod) -> None:
        """Record in the next segments, until one ends after the period, that versions may be missing."""
        self._inexact.append(period)

    def mark_missed(self, ingest: MissedIngest) -> None:
        """Record in the next segment that rows of an ingest are missing."""
        self._missed.append(ingest)

    @property
    def is_due(self) -> bool:
        since = self._clock() - self._flushed_at
        return since >= self._options.interval or self.buffered_bytes >= self._options.size

    def flush(self, ts: int) -> None:
        """Make all rows part of the log, which must be every change of the span up to `ts`."""
        if ts <= self.flushed_ts and not self._buffer and not any(self._files.values()):
            return
        self._write_file()
        ts = max(ts, self.flushed_ts)
        now = time.time_ns() // 1_000_000
        inexact = merge_periods(self._inexact)
        for span, files in self._files.items():
            segment = Segment(
                log_id=self._description.log_id,
                start=span.start,
                end=span.end,
                from_ts=self.flushed_ts,
                to_ts=ts,
                files=tuple(files),
                written_ms=now,
                token=secrets.token_hex(4),
                inexact=tuple(each for each in inexact if not intersection(each.span, span).is_empty),
                missed=tuple(each for each in self._missed if not intersection(each.span, span).is_empty),
            )
            write_record(self._store, segment.name, segment)
        self._files, self._missed = {each: [] for each in self._spans}, []
        self._inexact = [each for each in inexact if each.to_ts > ts]
        self.flushed_ts = ts
        self._flushed_at = self._clock()

    def _write_file(self) -> None:
        if not self._buffer:
            return
        rows = by_version(pa.concat_batches(self._buffer))
        for span, codec, part in self._divided(rows):
            file = write_rows(self._store, self._description.log_id, span, codec, part, self._rate_limit)
            self._files[span].append(file)
            self.rows += file.total_kvs
        self._buffer, self.buffered_bytes = [], 0

    def _divided(self, rows: pa.RecordBatch) -> Iterator[tuple[KeyRange, KeyCodec, pa.RecordBatch]]:
        """The rows of each span that has any, with user keys."""
        for span in self._spans:
            codec = codec_of(self._description.api_version, span)
            if len(self._spans) == 1:
                yield span, codec, rows
            elif (part := rows.filter(pc.starts_with(rows["key"], codec.prefix))).num_rows:
                yield span, codec, part.set_column(0, part.schema.field(0), columns.user_keys(part["key"], codec))

    def _read_or_create(self, wanted: LogDescription, name: str) -> LogDescription:
        self._store = with_key_of(self._store, name)  # a log that was begun with an older key keeps it
        with contextlib.suppress(StorageObjectMissing):
            return read_record(self._store, LogDescription, name)
        if not any(self._store.list(f"{wanted.log_id}/{SEGMENTS}")):
            with contextlib.suppress(StorageConflict):  # another process has just created it
                self._store.put_if_absent(name, seal(dump(wanted), self._store.location.crypter))
                return wanted
        try:
            return read_record(self._store, LogDescription, name)
        except StorageObjectMissing as error:
            raise LogDamaged(f"the log at {self._store.location.redacted()} has no {name}: {error.message}") from None

    def _check_same(self, found: LogDescription) -> None:
        """Compare what makes a log: its source, keys and encryption."""
        ours = self._description
        for what, one, other in [
            ("cluster", found.cluster_id, ours.cluster_id),
            ("keyspace", found.keyspace_id, ours.keyspace_id),
            ("keyspaces", found.keyspace_names, ours.keyspace_names),
            ("range", ", ".join(map(str, found.ranges)), ", ".join(map(str, ours.ranges))),
            ("encryption", found.encryption, ours.encryption),
        ]:
            if one != other:
                raise SyncStateMismatch(
                    f"the log {ours.log_id} at {self._store.location.redacted()} is of {what} {one}, not {other}",
                    hint="Pass the options of the earlier run, or another id.",
                )

    def _check_reaches(self, ts: int, start_ts: int) -> None:
        """Check that the log has the changes right before `ts`, so that the next segment leaves no gap."""
        if ts <= start_ts:
            return
        log_id = self._description.log_id
        reaching: list[Segment] = []
        for info in self._store.list(f"{log_id}/{SEGMENTS}"):
            if (name := SegmentName.parse(info.name)) and name.from_ts <= ts <= name.to_ts:
                with contextlib.suppress(StorageObjectMissing, BackupDamaged):  # another may have the same changes
                    reaching.append(read_record(self._store, Segment, info.name))
        covered = [segment.span for segment in reaching]
        if not (missing := [gap for span in self._spans for gap in gaps(span, covered)]):
            return
        if ts > self._truncated_ts():
            raise LogDamaged(
                f"cannot resume the log {log_id} at {self._store.location.redacted()} from {show_ts(ts)}: it has "
                f"no changes of {missing[0]} up to then, so there would be a gap",
                hint="Start another log with another id, and take a full backup.",
            )

    def _truncated_ts(self) -> int:
        try:
            return read_record(self._store, Truncation, f"{self._description.log_id}/{TRUNCATION}").restorable_from
        except StorageObjectMissing:
            return 0
