"""Chooses the segments that a compaction rewrites, as chunks of adjacent ones, and rewrites the files of a chunk."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from tikv_br.archive.log import LogArchive, read_log_rows
from tikv_br.archive.records import Segment
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.timestamps import show_ts
from tikv_br.errors import LogDamaged, StorageError, StorageObjectMissing, UsageError
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

TASK_BYTES = 256 << 20
"""Keys and values that a task sorts at once, and about the size of a new segment. A task needs about four times that in memory."""
ROW_GROUPS = 64
"""Approximate number of row groups of a file: a task that merges some of the keys reads little more than their rows."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Adjacent segments of one span that become one; the work of one task."""

    segments: tuple[Segment, ...]
    """Segments by `from_ts`, without a gap."""

    @property
    def span(self) -> KeyRange:
        return self.segments[0].span

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files of all segments, the oldest rows first."""
        found = {file.name: file for segment in self.segments for file in segment.files}
        return tuple(sorted(found.values(), key=lambda file: (file.min_ts, file.name)))

    def segment(self, files: tuple[FileEntry, ...]) -> Segment:
        """The segment that replaces these, with files that have all of their rows."""
        return Segment(
            log_id=self.segments[0].log_id,
            start=self.span.start,
            end=self.span.end,
            from_ts=min(each.from_ts for each in self.segments),
            to_ts=max(each.to_ts for each in self.segments),
            files=files,
            written_ms=time.time_ns() // 1_000_000,
            token=secrets.token_hex(4),
            inexact=tuple(dict.fromkeys(period for each in self.segments for period in each.inexact)),
            missed=tuple(dict.fromkeys(ingest for each in self.segments for ingest in each.missed)),
            replaces=tuple(each.name for each in self.segments),
        )

    def __str__(self) -> str:
        return f"{self.span} from {show_ts(self.segments[0].from_ts)}"


def plan_chunks(archive: LogArchive, until_ts: int = 0, task_bytes: int = TASK_BYTES) -> list[Chunk]:
    """Group the segments that are worth rewriting.

    Large ones that a compaction wrote are left alone: so each row is rewritten few times, and a truncation finds segments that end
    before its time. Raises `LogDamaged` for a log with gaps or damage, `UsageError` for a ts outside of the log.
    """
    log_id, place = archive.description.log_id, archive.store.location.redacted()
    if archive.damage:
        raise LogDamaged(f"the log {log_id} at {place} is damaged: {archive.damage[0].problem}")
    if found := archive.gaps():
        raise LogDamaged(f"the log {log_id} at {place} has no changes of {found[0]}")
    last = max((segment.to_ts for segment in archive.segments), default=archive.start_ts)
    if until_ts and not archive.start_ts <= until_ts <= last:
        raise UsageError(
            f"{show_ts(until_ts)} is outside the log {log_id}, which has changes from {show_ts(archive.start_ts)} to {show_ts(last)}",
            hint="Pass a time in the log, or leave out --until.",
        )
    spans: dict[KeyRange, list[Segment]] = {}
    for segment in archive.segments:
        if not until_ts or segment.to_ts <= until_ts:
            spans.setdefault(segment.span, []).append(segment)
    return [
        Chunk(tuple(group))
        for each in spans.values()
        for group in _groups(each, task_bytes)
        if _is_worth_rewriting(group)
    ]


def _groups(segments: Sequence[Segment], task_bytes: int) -> Iterator[list[Segment]]:
    """Runs without a gap of about `task_bytes`, from segments of one span by `from_ts`."""
    group: list[Segment] = []
    reached = filled = 0
    for segment in segments:
        size = sum(file.total_bytes for file in segment.files)
        is_done = bool(segment.replaces) and size >= task_bytes // 2
        if group and (is_done or segment.from_ts > reached or filled + size > task_bytes):
            yield group
            group, filled = [], 0
        if is_done:
            continue
        reached = max(reached, segment.to_ts) if group else segment.to_ts
        group.append(segment)
        filled += size
    if group:
        yield group


def _is_worth_rewriting(group: Sequence[Segment]) -> bool:
    """Return whether rewriting yields fewer objects, or partitions files that are not partitioned."""
    return len(group) > 1 or (not group[0].replaces and len(group[0].files) > 1)


@dataclass(frozen=True, slots=True)
class CompactionJob:
    """Parameters that all tasks of a run share. Picklable."""

    storage: StorageLocation
    log_id: str
    codec: KeyCodec
    rate_limit: RateLimit
    task_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class RewrittenChunk:
    """Result of a task."""

    index: int
    """Index of the chunk."""
    files: tuple[FileEntry, ...]


def rewrite_chunk(job: CompactionJob, chunk: Chunk, context: TaskContext) -> RewrittenChunk:
    """Rewrite the files of a chunk. Raises `LogDamaged` that names the file, `StorageError`."""
    store = open_store(job.storage)
    written: list[FileEntry] = []
    buffer: list[pa.RecordBatch] = []
    size = 0
    try:
        for file in chunk.files:
            for batch in _rows_of(store, file, job.codec):
                if buffer and size + batch.nbytes > job.task_bytes:
                    written += _write_sorted(job, store, chunk.span, buffer)
                    size = 0
                buffer.append(batch)
                size += batch.nbytes
                context.report(data_bytes=batch["key"].nbytes + batch["value"].nbytes, keys=batch.num_rows)
        written += _write_sorted(job, store, chunk.span, buffer)
    except BaseException:
        for file in written:
            try:
                store.delete(file.name)
            except StorageError as error:
                log.warning("cannot remove %s of a failed task: %s", file.name, error.message)
        raise
    return RewrittenChunk(context.index, tuple(written))


def _rows_of(store: ObjectStore, file: FileEntry, codec: KeyCodec) -> Iterator[pa.RecordBatch]:
    rows = 0
    try:
        for batch in read_log_rows(store, file, codec):
            rows += batch.num_rows
            yield batch
    except StorageObjectMissing as error:
        raise LogDamaged(error.message) from None
    if rows != file.total_kvs:
        raise LogDamaged(f"{file.name} has {rows:,} rows in its range of keys, not {file.total_kvs:,} as recorded")


def _write_sorted(
    job: CompactionJob, store: ObjectStore, span: KeyRange, buffer: list[pa.RecordBatch]
) -> Iterator[FileEntry]:
    """Write the rows of a buffer, which is emptied, as files that follow each other in key order."""
    import numpy as np
    import pyarrow as pa

    from tikv_br.archive.writer import write_rows
    from tikv_br.formats import columns
    from tikv_br.formats.order import by_version

    if not buffer:
        return
    rows = pa.concat_batches(buffer)
    buffer.clear()
    rows = by_version(rows)
    offsets = columns.view(rows["key"])[0] + columns.view(rows["value"])[0]
    size = int(offsets[-1] - offsets[0])
    count = max(round(size / job.file_bytes), 1)
    cuts = np.searchsorted(offsets - offsets[0], [size * part // count for part in range(1, count)])
    for first, end in pairwise(sorted({0, *map(int, cuts), rows.num_rows})):
        part = rows.slice(first, end - first)
        yield write_rows(store, job.log_id, span, job.codec, part, job.rate_limit, ROW_GROUPS)
