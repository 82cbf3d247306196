"""Compacts a log archive: rewrites many small segments as few large ones, whose files are partitioned by key.

Each task rewrites adjacent segments of one span: it reads their files once, sorts the rows and writes files that follow each other in
key order. A new segment lists them, and names the segments that it replaces. All versions, tombstones and inexact periods are kept. A new
segment is valid by itself, so an interrupted compaction keeps what it has finished.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import partial

from tikv_br.archive.chunks import TASK_BYTES, Chunk, CompactionJob, RewrittenChunk, plan_chunks, rewrite_chunk
from tikv_br.archive.log import LogArchive
from tikv_br.archive.maintenance import GRACE_SECONDS, RemovalPlan, acquire_lock, plan_clean_up, remove
from tikv_br.archive.records import DESCRIPTION, Segment
from tikv_br.backupset.lease import PathLease
from tikv_br.backupset.sealed import with_key_of, write_record
from tikv_br.cancellation import clean_up
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.errors import LogDamaged
from tikv_br.progress_events import Event, Reporter, silent
from tikv_br.steps import FunctionStep, Step, run_steps
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorKind, ExecutorOptions, choose_executor, run_tasks

FILE_BYTES = 96 << 20
"""Keys and values of a file, about."""


@dataclass(frozen=True, slots=True)
class CompactionOptions(ExecutorOptions):
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
        context.archive.codec,
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
