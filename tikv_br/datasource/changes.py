"""The stream of the source ``tikv``: the changes in a log archive, between two offsets exactly the changes of these times.

An offset is a timestamp up to which the log has every change, so a micro-batch that Spark repeats has the same rows. Needs PySpark 4.2.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow

from tikv_br.archive.log import LogArchive, LogSource, read_log_rows
from tikv_br.archive.records import DEFAULT_ID
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.timestamps import show_ts
from tikv_br.dataflow.plan import plan_by_sizes
from tikv_br.dataflow.read import file_sizes
from tikv_br.datasource.options import CRYPTER_OPTIONS, KEY_OPTIONS, Options, with_hints
from tikv_br.datasource.rows import CHANGES, spark_batches
from tikv_br.errors import LogDamaged, OutsideRestoreWindow, UsageError
from tikv_br.formats import columns
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.order import by_version
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

OPTIONS = (
    *("log", "log_id", *KEY_OPTIONS, "starting_ts"),
    *("allow_inexact", "max_bytes_per_batch", "partition_bytes", *CRYPTER_OPTIONS),
)
PARTITION_BYTES = 64 << 20
"""Default size of a partition: keys and values in its files. A task sorts the rows of its partition in memory."""
REFRESH_SECONDS = 1.0
"""The records of a log are read at most this often, and take at most a tenth of the time. Spark asks 100 times per second."""
START_OVER = "Start over with a new checkpointLocation, and load the earlier state from a backup."

Offset = dict[str, Any]
"""``log``: which log it is; ``ts``: a timestamp."""


def change_reader(given: Mapping[str, str]) -> ChangeReader:
    """The stream of these options. Raises `UsageError`."""
    options = Options(given, OPTIONS)
    return ChangeReader(
        source=LogSource(options.storage("log"), options.text("log_id") or DEFAULT_ID),
        keyspace=options.text("keyspace"),
        ranges=options.keys() if any(map(options.text, ("start", "end", "prefix"))) else None,
        starting_ts=options.ts("starting_ts"),
        allow_inexact=options.flag("allow_inexact"),
        max_bytes=options.number("max_bytes_per_batch", 0) if options.text("max_bytes_per_batch") else 0,
        partition_bytes=options.number("partition_bytes", PARTITION_BYTES),
    )


@dataclass(frozen=True)
class ChangesPartition(InputPartition):
    """Changes of a range of RPC keys with from_ts < ts <= to_ts, and the files that have them."""

    codec: KeyCodec
    span: KeyRange
    from_ts: int
    to_ts: int
    storage: StorageLocation
    files: tuple[FileEntry, ...] = field(repr=False)


@dataclass
class ChangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets and partitions are for the driver, where one instance serves a query. Picklable until it has read the log."""

    source: LogSource
    keyspace: str
    ranges: tuple[KeyRange, ...] | None
    """User keys; None = the log's range."""
    starting_ts: int | None
    """The stream has the changes after this; 0 = all, None = those after the present end of the log."""
    allow_inexact: bool
    max_bytes: int
    """About how many bytes of keys and values a micro-batch may have; 0 = no limit."""
    partition_bytes: int
    _archive: LogArchive | None = None
    _refresh_at: float = 0.0
    _final_ts: int | None = None
    """End of a query with ``Trigger.AvailableNow``."""
    _exhausted: tuple[LogArchive, Offset] | None = None
    """A state of the log that has nothing after an offset, so that it is not examined 100 times per second."""

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the start of a new query. Raises `UsageError` for a time that the log does not have."""
        with with_hints():
            archive = self._open()
            end = self._last(archive)
            if self.starting_ts is None:
                return self._offset(
                    archive, max(archive.inexact_around(self._spans(archive), end)[0], archive.start_ts)
                )
            ts = self.starting_ts or archive.start_ts
            if not archive.start_ts <= ts <= end:
                raise UsageError(
                    f"option starting_ts is {show_ts(ts)}, but {self._place} has changes from {show_ts(archive.start_ts)} to {show_ts(end)}",
                    hint="Pass a time in between, or latest.",
                )
            return self._offset(archive, ts)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit of the option ``max_bytes_per_batch``."""
        return ReadMaxBytes(self.max_bytes) if self.max_bytes else ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """The end of the next micro-batch, at which the state of all keys is known; ``start`` if there is nothing to read yet.

        Raises `LogDamaged` where changes are missing, `OutsideRestoreWindow` where versions may be, unless they are allowed to.
        """
        with with_hints():
            archive = self._open()
            if self._exhausted is not None and self._exhausted[0] is archive and self._exhausted[1] == start:
                return start
            after_ts = self._ts(archive, start)
            end = self._end(archive, after_ts)
            if self._final_ts is not None:
                end = min(end, self._final_ts)
            found = after_ts
            if end > after_ts:
                wanted = end
                if isinstance(limit, ReadMaxBytes):
                    wanted = self._limited(archive, after_ts, end, limit.max_bytes)
                found = self._exact(archive, after_ts, wanted, end)
            if found > after_ts:
                return self._offset(archive, found)
            self._exhausted = archive, start
            return start

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802 - Spark's name
        """The end of the log as last read, for the progress of the query."""
        return self._offset(self._archive, self._last(self._archive)) if self._archive else None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """The query ends at the present end of the log."""
        with with_hints():
            self._final_ts = self._last(self._open())

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """A partition for about each `partition_bytes` of files, by keys. Raises `LogDamaged`, `UsageError` if the log is truncated."""
        with with_hints():
            archive = self._open()
            from_ts, to_ts = self._ts(archive, start), self._ts(archive, end)
            if from_ts >= to_ts:
                return []
            spans = self._spans(archive)
            chosen = [(span, tuple(archive.files_for(span, from_ts, to_ts))) for span in spans]
            if damage := archive.verify_files({file.name: file for _, files in chosen for file in files}.values()):
                raise LogDamaged(f"{self._place} is damaged: {damage[0].problem}")
            return [
                ChangesPartition(archive.codec(self.keyspace), part, from_ts, to_ts, self.source.storage, found)
                for span, files in chosen
                for part in self._cut(archive, span, files)
                if (found := tuple(file for file in files if not intersection(file.key_range, part).is_empty))
            ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The changes of a partition by key, newest first, each once. Reads all of them before the first is returned."""
        if not isinstance(partition, ChangesPartition):
            return
        found: list[pa.RecordBatch] = []
        with with_hints():
            store = open_store(partition.storage)
            for file in partition.files:
                span = intersection(file.key_range, partition.span)
                for rows in read_log_rows(store, file, partition.codec, span):
                    ts = columns.numbers(rows["ts"])
                    inside = (ts > np.uint64(partition.from_ts)) & (ts <= np.uint64(partition.to_ts))
                    found.append(rows if inside.all() else rows.filter(pa.array(inside)))
            if found:
                yield from spark_batches(by_version(pa.concat_batches(found)), CHANGES)

    @property
    def _place(self) -> str:
        return f"the log {self.source.id} at {self.source.storage.redacted()}"

    def _open(self) -> LogArchive:
        """The log, not older than `REFRESH_SECONDS` (or ten times as long as reading its records took)."""
        began = time.monotonic()
        if self._archive is None or began >= self._refresh_at:
            known = (*self._archive.segments, *self._archive.replaced) if self._archive else ()
            archive = LogArchive.open(open_store(self.source.storage), self.source.id, known)
            self._refresh_at = began + max(REFRESH_SECONDS, 10 * (time.monotonic() - began))
            archive.check(self._spans(archive), archive.start_ts, archive.start_ts)  # whether it has these keys
            self._archive = archive
        return self._archive

    def _spans(self, archive: LogArchive) -> list[KeyRange]:
        if self.ranges is None:
            whole = archive.codec(self.keyspace).rpc_range()
            return [each for each in archive.description.ranges if whole.contains(each)]
        return [archive.codec(self.keyspace).rpc_range(each) for each in self.ranges]

    def _offset(self, archive: LogArchive, ts: int) -> Offset:
        description, keyspace_id = archive.description, archive.codec(self.keyspace).keyspace_id
        return {"log": f"{description.cluster_id}/{keyspace_id}/{description.log_id}", "ts": ts}

    def _ts(self, archive: LogArchive, offset: Offset) -> int:
        """The timestamp of an offset. Raises `UsageError` for one of another log, or one that is no longer in it."""
        ts = int(offset["ts"])
        if offset["log"] != self._offset(archive, ts)["log"]:
            raise UsageError(
                f"the checkpoint of this query belongs to the log {offset['log']} (cluster/keyspace/id), not to {self._place}",
                hint="Pass that log, or another checkpointLocation.",
            )
        if ts < archive.start_ts:
            raise UsageError(
                f"{self._place} has no changes before {show_ts(archive.start_ts)}: it was truncated or restarted, and this query "
                f"needs those after {show_ts(ts)}",
                hint=START_OVER,
            )
        return ts

    def _last(self, archive: LogArchive) -> int:
        """The end of the log, even if earlier changes are missing."""
        spans = self._spans(archive)
        return archive.end_ts(max((gap.to_ts for gap in archive.lost(spans, 0)), default=0), spans)

    def _end(self, archive: LogArchive, after_ts: int) -> int:
        """Return the timestamp up to which no change after another one is missing.

        Raises `LogDamaged` if that is right at a gap.
        """
        spans = self._spans(archive)
        end = archive.end_ts(after_ts, spans)
        last = max((segment.to_ts for segment in archive.segments), default=archive.start_ts)
        if last < after_ts:
            raise LogDamaged(
                f"{self._place} ends at {show_ts(last)}, but had changes up to {show_ts(after_ts)}", hint=START_OVER
            )
        missing = max(archive.checkpoint_ts, *(gap.to_ts for gap in archive.lost(spans, after_ts)), end)
        if end <= after_ts < missing:
            archive.check(spans, after_ts, missing)
        return end

    def _limited(self, archive: LogArchive, after_ts: int, end: int, limit: int) -> int:
        """The last timestamp up to which there are no more than `limit` bytes, if each file has as much of each time."""
        spans = self._spans(archive)
        files = {file.name: file for span in spans for file in archive.files_for(span, after_ts, end)}.values()
        firsts = np.array([file.min_ts - 1 - after_ts for file in files], np.float64)
        lasts = np.array([file.max_ts - after_ts for file in files], np.float64)
        sizes = np.array([file.total_bytes for file in files], np.float64)

        def size_until(ts: int) -> int:
            inside = np.minimum(lasts, ts - after_ts) - np.maximum(firsts, 0)
            return int((sizes * np.clip(inside, 0, None) / (lasts - firsts)).sum())

        times = range(after_ts + 1, end + 1)
        return times[max(bisect_right(times, limit, key=size_until) - 1, 0)]

    def _exact(self, archive: LogArchive, after_ts: int, wanted: int, end: int) -> int:
        """A timestamp near `wanted`, up to `end`, at which the state of all keys is known; `after_ts` if there is none yet.

        Raises `OutsideRestoreWindow` where versions may be missing, unless they are allowed to.
        """
        windows = [
            each for each in archive.inexact_windows(self._spans(archive)) if each[0] < wanted and each[1] > after_ts
        ]
        if windows and not self.allow_inexact:
            before, after = windows[0]
            if before > after_ts:
                return before
            raise OutsideRestoreWindow(
                f"{self._place} may lack versions between {show_ts(before)} and {show_ts(after)}: the change feed was interrupted, and of "
                "keys written more than once in that time it may have delivered only the newest version",
                hint=f"Set allow_inexact to true to continue without them: the newest versions are all there. A new query can also start at {after}.",
            )
        for before, after in windows:
            if before < wanted < after:
                if before > after_ts:
                    return before
                return after if after <= end else after_ts
        return wanted

    def _cut(self, archive: LogArchive, span: KeyRange, files: Sequence[FileEntry]) -> list[KeyRange]:
        """A range in parts, of which each has about `partition_bytes` of the files."""
        if sum(file.total_bytes for file in files) <= self.partition_bytes:
            return [span]
        sizes = file_sizes(archive.store, archive.description.api_version, files)
        return [each.span for each in plan_by_sizes(span, sizes, self.partition_bytes)]
