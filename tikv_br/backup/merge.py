"""`backup merge`: a full backup made from storage alone, of a base, incremental backups on it and a log, as of one timestamp.

Each task merges one interval: the base and the increments are read in key order, and the log's rows of the interval are
first reduced to the newest of each key. The result is a backup as any other, with the timestamps of its rows.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tikv_br.archive.log import LogSource, read_log_rows
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry, write_entry
from tikv_br.backupset.rows import read_rows
from tikv_br.cluster.timestamps import physical_ms, show_ts
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.dataflow import path
from tikv_br.dataflow.context import BackupContext, Lineage
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.engine import Engine
from tikv_br.dataflow.merge import MergeSources, sizes_by_key
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import plan_by_sizes, task_bytes
from tikv_br.dataflow.run import BackupReport, run_backup
from tikv_br.dataflow.steps import commit, run_backup_tasks, verify_coverage
from tikv_br.dataflow.task import PhaseSeconds, Task, TaskResult, try_task
from tikv_br.dataflow.write import DataFiles
from tikv_br.errors import LogDamaged, ResumeRefused, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, gaps, intersection
from tikv_br.progress_events import Reporter, silent
from tikv_br.resume_options import MAY_CHANGE, compared_as
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

CHECK_THREADS = 16
"""Files checked in parallel."""


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Options of one merge."""

    output: BackupOptions = field(metadata=compared_as("its fields"))
    """Where and in what form the result is written, and who does the work; the rest is not used."""
    newest: StorageLocation = field(metadata=compared_as("merged_from"))
    """A full backup, or an incremental one whose parents are merged too."""
    log: LogSource | None = field(default=None, metadata=compared_as("merged_from"))
    ts: int = field(default=0, metadata=compared_as("backup_ts"))
    """The rows of this timestamp are written; 0 = the last one possible."""
    allow_inexact: bool = field(default=False, metadata=compared_as("backup_ts"))
    """Whether keys may have an older value where the log lacks versions."""
    listed: bool = field(default=True, metadata=MAY_CHANGE)
    """Whether `tikv-br list` shows the result."""


@dataclass
class MergeContext(BackupContext):
    """State of a merge."""

    merge: MergeOptions = field(kw_only=True)
    sources: MergeSources = field(init=False)  # read the sources
    ts: int = 0  # look for a resumable backup: the rows of this time are written
    log_files: tuple[FileEntry, ...] = ()  # look for a resumable backup

    @property
    def all_options(self) -> tuple[object, ...]:
        """The options of the output and of the merge."""
        return (*super().all_options, self.merge)


def merge_backup(options: MergeOptions, reporter: Reporter = silent) -> BackupReport:
    """Make a full backup out of others; returns when it is complete or, in a dry run, planned. Raises `TikvBrError`."""
    return run_backup(
        MergeContext(options.output, reporter, listed=options.listed, merge=options), merge_steps(options)
    )


def merge_steps(options: MergeOptions) -> list[Step[MergeContext]]:
    """The steps, in order. A dry run leaves out every step that writes."""
    checks: list[Step[MergeContext]] = [
        FunctionStep("check the input", lambda context: context.options.check()),
        FunctionStep("read the sources", read_sources),
        FunctionStep("check the storage", path.check_storage),
    ]
    find = FunctionStep("look for a resumable backup", find_resumable_merge)
    plan = FunctionStep("plan", make_plan)
    if options.output.dry_run:
        return [*checks, find, plan]
    return [
        *checks,
        FunctionStep("acquire the backup lock", path.acquire_backup_lock, path.release_backup_lock),
        find,
        FunctionStep("record the run", path.record_run),
        FunctionStep("check the files", check_files),
        plan,
        FunctionStep("merge", merge),
        FunctionStep("verify coverage", lambda context: None if context.manifest else verify_coverage(context)),
        FunctionStep("commit", commit),
        FunctionStep("clean up", path.clean_up),
    ]


def read_sources(context: MergeContext) -> None:
    """Open what is merged, and check that it covers the timestamp."""
    options = context.merge
    sources = context.sources = MergeSources.open(options.newest, options.log)
    if not sources.increments and sources.log is None:
        raise UsageError(
            "there is nothing to merge: the backup is a full one", hint="Pass --log, or an incremental backup."
        )
    ts = options.ts or sources.last_ts(allow_inexact=options.allow_inexact)
    sources.check(ts, allow_inexact=options.allow_inexact)
    base = sources.base
    context.info = ClusterInfo(base.cluster_id, base.cluster_version, ApiVersion.V2, ())
    context.engine = Engine.of_tasks("merge", "made from storage alone", options.output)
    context.conversion = Conversion(ApiVersion.V2, ApiVersion.V2)
    context.source_ranges = base.ranges
    context.lineage = Lineage(merged_from=sources.urls)
    context.set_backup_ts(ts if sources.log is not None else sources.newest.backup_ts)
    context.scanned_ts = ts


def find_resumable_merge(context: MergeContext) -> None:
    """Resume an unfinished merge of the same sources, at the time that it has chosen."""
    wanted = context.backup_ts
    path.find_resumable_backup(context)
    if context.merge.ts and context.backup_ts != wanted:
        raise ResumeRefused(
            f"the unfinished merge at {context.options.storage.redacted()} is of {show_ts(context.backup_ts)}, "
            f"not of {show_ts(wanted)}",
            hint="Pass that time, or --no-resume to remove its files and start over.",
        )
    if context.sources.log is not None:
        context.scanned_ts = context.backup_ts
        context.sources.check(context.scanned_ts, allow_inexact=context.merge.allow_inexact)
    context.ts = context.scanned_ts
    context.log_files = context.sources.log_files(context.ts)


def check_files(context: MergeContext) -> None:
    """Check length and end of every file to be read, before the first is written. Raises `BackupDamaged`, `LogDamaged`."""
    sources = context.sources
    with ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="check") as pool:
        checks = [pool.submit(each.verify_identity, file) for each in sources.backups for file in each.files]
        for check in checks:
            check.result()
    if sources.log is not None and (damage := sources.log.verify_files(context.log_files)):
        raise LogDamaged(f"the log at {sources.log.store.location.redacted()} is damaged: {damage[0].problem}")


def make_plan(context: MergeContext) -> None:
    """Divide what is not done yet into intervals of about equal size."""
    sizes = sizes_by_key(context.sources, context.log_files)
    wanted = task_bytes(sum(size for _, size in sizes), context.engine.slots)
    done = [each.interval for each in context.finished]
    context.plan = [
        interval
        for whole in context.source_ranges
        for part in gaps(whole, done)
        for interval in plan_by_sizes(part, sizes, wanted)
    ]
    context.engine = context.engine.settle_executor(context.options, context.plan)


def merge(context: MergeContext) -> None:
    """Merge all intervals of the plan. Raises the first error of a task."""
    if context.manifest is not None or not context.plan:
        return
    sources = context.sources
    job = MergeJob(
        run=context.first_run,
        options=context.options,
        backups=tuple((each.store.location, each.files) for each in sources.backups),
        log=None if sources.log is None else sources.log.store.location,
        log_files=context.log_files,
        after_ts=sources.newest.backup_ts,
        ts=context.ts,
    )
    run_backup_tasks(context, context.plan, partial(run_merge_task, job))


@dataclass(frozen=True, slots=True)
class MergeJob:
    """What all tasks of a run share. Picklable."""

    run: str
    options: BackupOptions
    backups: tuple[tuple[StorageLocation, tuple[FileEntry, ...]], ...]
    log: StorageLocation | None
    log_files: tuple[FileEntry, ...]
    after_ts: int
    """Up to this ts the backups contain the log's changes, or newer versions of the same keys."""
    ts: int


def run_merge_task(job: MergeJob, task: Task, context: TaskContext) -> TaskResult:
    """Merge one interval, with retries. Raises the `TikvBrError` of the last attempt."""
    return try_task(lambda: _merge_interval(job, task, context))


def _merge_interval(job: MergeJob, task: Task, context: TaskContext) -> TaskResult:
    from tikv_br.formats.merge import rows_at

    attempt, began = secrets.token_hex(8), time.perf_counter()
    converter = Conversion(ApiVersion.V2, ApiVersion.V2).of(task.interval)
    store = open_store(job.options.storage)
    files = DataFiles(store, task.interval, attempt, converter, job.options)
    source = Checksum()
    try:
        for batch in rows_at(_runs(job, task.interval), job.ts, physical_ms(job.ts) // 1000):
            converted = converter.convert(batch)
            files.add(converted)
            source += converted.source
            context.report(data_bytes=converted.source.total_bytes, keys=converted.source.total_kvs)
        entry = LedgerEntry(task.start, task.end, attempt, files.finish(), source=source, run=job.run)
        write_entry(store, entry)
    except BaseException:
        files.abandon()
        context.retract(data_bytes=source.total_bytes, keys=source.total_kvs)
        raise
    uploading = files.seconds_uploading
    return TaskResult(
        FinishedTask.of(entry), PhaseSeconds(encode=time.perf_counter() - began - uploading, upload=uploading)
    )


def _runs(job: MergeJob, span: KeyRange) -> list[Iterator[pa.RecordBatch]]:
    """The rows of an interval as sorted runs: one per backup, and one for the log."""
    import pyarrow.compute as pc

    from tikv_br.formats.merge import newest_versions

    runs = [_rows_of(read_rows, location, files, span) for location, files in job.backups]
    if job.log is not None:
        rows = _rows_of(read_log_rows, job.log, job.log_files, span)
        # The tombstone that hides an older row, which arrived late, may be in an earlier segment that is not read.
        later = (batch.filter(pc.greater(batch["ts"], job.after_ts)) for batch in rows)
        runs.append(iter([newest_versions(later, job.ts)]))
    return runs


def _rows_of(
    read: Callable[[ObjectStore, FileEntry, KeyCodec, KeyRange], Iterator[pa.RecordBatch]],
    location: StorageLocation,
    files: Sequence[FileEntry],
    span: KeyRange,
) -> Iterator[pa.RecordBatch]:
    store, codec = open_store(location), codec_of(ApiVersion.V2, span)
    for file in files:
        part = intersection(file.key_range, span)
        if not part.is_empty:
            yield from read(store, file, codec, part)
