"""Compacts a log archive: rewrites many small segments as few large ones, whose files are partitioned by key.

Each task rewrites adjacent segments of one span: it reads their files once, sorts the rows and writes files that follow each other in
key order. A new segment lists them, and names the segments that it replaces. All versions, tombstones and inexact periods are kept. A new
segment is valid by itself, so an interrupted compaction keeps what it has finished.

Chooses the segments that a compaction rewrites, as chunks of adjacent ones, and rewrites the files of a chunk.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from tikv_br.archive.log import LogArchive, read_log_rows
from tikv_br.archive.maintenance import GRACE_SECONDS, RemovalPlan, acquire_lock, plan_clean_up, remove
from tikv_br.archive.records import DESCRIPTION, Segment
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.lease import PathLease
from tikv_br.backupset.sealed import with_key_of, write_record
from tikv_br.cancellation import clean_up
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.timestamps import show_ts
from tikv_br.errors import LogDamaged, StorageError, StorageObjectMissing, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Event, Reporter, silent
from tikv_br.steps import FunctionStep, Step, run_steps
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorKind, ExecutorOptions, choose_executor, run_tasks
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
            for batch in _rows_of(store, file):
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


def _rows_of(store: ObjectStore, file: FileEntry) -> Iterator[pa.RecordBatch]:
    rows = 0
    try:
        for batch in read_log_rows(store, file, codec_of(ApiVersion.V2, file.key_range)):
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
        yield write_rows(store, job.log_id, span, codec_of(ApiVersion.V2, span), part, job.rate_limit, ROW_GROUPS)


FILE_BYTES = 96 << 20
"""Keys and values of a file, about."""


class CompactionOptions(ExecutorOptions, frozen=True):
    """Options of a compaction."""

    storage: StorageLocation
    log_id: str
    until_ts: int = 0
    """End of the last segment to replace; 0 = all."""
    grace: float = GRACE_SECONDS
    """Seconds for which replaced segments are kept."""
    rate_limit: int = 0
    """Maximum upload rate in bytes per second; 0 = unlimited."""
    lock_wait: float = 0.0
    """Seconds to wait for the lock of the log."""
    dry_run: bool = False
    task_bytes: int = TASK_BYTES
    file_bytes: int = FILE_BYTES


@dataclass(frozen=True, slots=True)
class CompactionSummary:
    """Result of a compaction."""

    log_id: str
    segments: int
    """Segments that were replaced, or would be."""
    files: int
    """Number of their files."""
    size: int
    """Bytes of their files as stored."""
    rows: int
    """Rows of their files."""
    new_segments: int
    new_files: int
    new_size: int
    """Bytes of the new files as stored."""
    duplicate_rows: int
    """Rows (key and ts) that were in several of the files and are in one now."""
    removed_segments: int
    """Objects that were removed, replaced by this or an earlier compaction."""
    removed_files: int
    removed_bytes: int
    executor: str
    dry_run: bool
    seconds: float
    session_seconds: float
    """Start-up time of Spark; 0 on the driver."""
    step_seconds: dict[str, float]


@dataclass
class CompactionContext:
    """State that the steps share. The comment behind a field names the step that sets it."""

    options: CompactionOptions
    reporter: Reporter = silent
    lease: PathLease | None = None  # acquire the log's lock
    archive: LogArchive = field(init=False)  # read the log
    chunks: list[Chunk] = field(default_factory=list)  # read the log
    executor: ExecutorKind = "driver"  # read the log
    new: list[Segment] = field(default_factory=list)  # rewrite the segments
    session_seconds: float = 0.0  # rewrite the segments
    removal: RemovalPlan | None = None  # remove replaced segments

    @property
    def store(self) -> ObjectStore:
        return with_key_of(open_store(self.options.storage), f"{self.options.log_id}/{DESCRIPTION}")

    def confirm_lock(self) -> None:
        """Raise `LeaseLost` unless this run holds the lock, by reading it."""
        if self.lease is not None:
            self.lease.confirm()

    def report(self, event: Event) -> None:
        """Forward an event to the reporter. Raises `LeaseLost` if the lock is known to be lost."""
        if self.lease is not None:
            self.lease.check()
        self.reporter(event)


def compact(options: CompactionOptions, reporter: Reporter = silent) -> CompactionSummary:
    """Compact a log; returns when it is done or, in a dry run, planned. Raises `TikvBrError`."""
    began = time.monotonic()
    context = CompactionContext(options, reporter)
    timings = run_steps(compaction_steps(options), context, reporter, clean_up)
    segments = [segment for chunk in context.chunks for segment in chunk.segments]
    files = [file for chunk in context.chunks for file in chunk.files]
    new_files = [file for segment in context.new for file in segment.files]
    rows, removal = sum(file.total_kvs for file in files), context.removal
    return CompactionSummary(
        log_id=options.log_id,
        segments=len(segments),
        files=len(files),
        size=sum(file.size for file in files),
        rows=rows,
        new_segments=len(context.new),
        new_files=len(new_files),
        new_size=sum(file.size for file in new_files),
        duplicate_rows=0 if options.dry_run else rows - sum(file.total_kvs for file in new_files),
        removed_segments=len(removal.segments) if removal else 0,
        removed_files=len(removal.files) if removal else 0,
        removed_bytes=removal.size if removal else 0,
        executor=context.executor,
        dry_run=options.dry_run,
        seconds=round(time.monotonic() - began, 3),
        session_seconds=round(context.session_seconds, 3),
        step_seconds={name: round(seconds, 3) for name, seconds in timings.items()},
    )


def compaction_steps(options: CompactionOptions) -> list[Step[CompactionContext]]:
    """The steps, in order. A dry run leaves out every step that writes."""
    check: Step[CompactionContext] = FunctionStep(
        "check the input", lambda context: context.options.check_executor(context.options.rate_limit)
    )
    read = FunctionStep("read the log", read_log)
    if options.dry_run:
        return [check, read]
    return [
        check,
        FunctionStep("acquire the log's lock", acquire_log_lock, release_log_lock),
        read,
        FunctionStep("check the log's files", check_files),
        FunctionStep("rewrite the segments", rewrite),
        FunctionStep("check the new segments", check_new_segments),
        FunctionStep("remove replaced segments", remove_replaced),
        FunctionStep("release the log's lock", release_log_lock),
    ]


def acquire_log_lock(context: CompactionContext) -> None:
    """Exclude other compactions and truncations. The log is opened first, so that no lock is written without a log."""
    options = context.options
    LogArchive.describe(context.store, options.log_id)
    context.lease = acquire_lock(context.store, options.log_id, "log compact", options.lock_wait)


def release_log_lock(context: CompactionContext) -> None:
    """Release the lock; if that fails, it expires."""
    if context.lease is not None:
        context.lease.try_release()
        context.lease = None


def read_log(context: CompactionContext) -> None:
    """Plan the work, and choose the executor."""
    options = context.options
    context.archive = LogArchive.open(context.store, options.log_id)
    context.chunks = plan_chunks(context.archive, options.until_ts, options.task_bytes)
    size = sum(file.total_bytes for chunk in context.chunks for file in chunk.files)
    context.executor = choose_executor(len(context.chunks), size) if options.executor == "auto" else options.executor


def check_files(context: CompactionContext) -> None:
    """Check length and end of every file to be read, before the first is written. Raises `LogDamaged`."""
    damage = context.archive.verify_files(file for chunk in context.chunks for file in chunk.files)
    if damage:
        raise LogDamaged(f"the log at {context.store.location.redacted()} is damaged: {damage[0].problem}")


def rewrite(context: CompactionContext) -> None:
    """Run a task per chunk, and write the segment of each that has ended. Raises the first error of a task."""
    options, chunks = context.options, context.chunks
    slots = options.concurrency or os.cpu_count() or 1
    rate_limit = RateLimit(options.rate_limit).share(context.executor, slots, len(chunks))
    job = CompactionJob(
        context.store.location,
        options.log_id,
        rate_limit,
        options.task_bytes,
        options.file_bytes,
    )

    def add(result: RewrittenChunk) -> None:
        context.confirm_lock()
        segment = chunks[result.index].segment(result.files)
        write_record(context.store, segment.name, segment)
        context.new.append(segment)

    context.confirm_lock()
    context.session_seconds = run_tasks(
        chunks,
        partial(rewrite_chunk, job),
        options=options.choose(context.executor, slots),
        on_result=add,
        reporter=context.report,
        planned_bytes=[sum(file.total_bytes for file in chunk.files) for chunk in chunks],
    )


def check_new_segments(context: CompactionContext) -> None:
    """Read the log again: it must have the new segments, and all that it had. Raises `LogDamaged`."""
    before, log_id = context.archive, context.options.log_id
    context.archive = now = LogArchive.open(context.store, log_id)
    names = {segment.name for segment in now.segments}
    lost = [segment.name for segment in context.new if segment.name not in names]
    damage = [each.problem for each in now.damage] + [f"{name} cannot be read" for name in lost]
    damage += [f"no changes of {gap}" for gap in now.gaps()]
    damage += [each.problem for each in now.verify_files(file for each in context.new for file in each.files)]
    if damage or now.end_ts() < before.end_ts():
        raise LogDamaged(
            f"the log {log_id} could not be verified after its compaction, which kept the old segments: {(damage or ['its end is missing'])[0]}"
        )


def remove_replaced(context: CompactionContext) -> None:
    """Remove what this or an earlier compaction has replaced, after the grace period."""
    context.confirm_lock()
    plan = plan_clean_up(context.archive, context.options.grace)
    remove(context.archive, plan)
    context.removal = plan
