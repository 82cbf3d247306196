"""`backup merge`: a full backup made from storage alone, of a base, incremental backups on it and a log, as of one timestamp.

Each task merges one interval: the base and the increments are read in key order, and the log's rows of the interval are
first reduced to the newest of each key. The result is a backup as any other, with the timestamps of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from msgspec import Struct

from tikv_br.archive.log import LogSource
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.cluster import refuse_beyond
from tikv_br.cluster.timestamps import physical_ms, show_ts
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.dataflow import steps
from tikv_br.dataflow.convert import Conversion, ConvertedRows
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import Engine
from tikv_br.dataflow.read import MergeSources, StoredRows
from tikv_br.dataflow.run import BackupContext, BackupReport, Lineage, run_backup
from tikv_br.dataflow.steps import check_input, commit, run_backup_tasks, verify_coverage
from tikv_br.dataflow.write import TaskResult, try_task, write_interval
from tikv_br.errors import LogDamaged, ResumeRefused, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange, gaps, intersection
from tikv_br.formats.limits import RowLimits
from tikv_br.progress_events import Reporter, silent
from tikv_br.resume_options import MayChange, compared_as
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import TaskContext


class MergeOptions(Struct, frozen=True):
    """Options of one merge."""

    output: Annotated[BackupOptions, compared_as("its fields")]
    """Location and format of the result, and the executor; the rest is not used."""
    newest: Annotated[StorageLocation, compared_as("merged_from")]
    """A full backup, or an incremental one whose parents are merged too."""
    log: Annotated[LogSource | None, compared_as("merged_from")] = None
    ts: Annotated[int, compared_as("backup_ts")] = 0
    """The rows of this timestamp are written; 0 = the last one possible."""
    allow_inexact: Annotated[bool, compared_as("backup_ts")] = False
    """Accept an older value of keys of which the log lacks versions."""
    limits: MayChange[tuple[tuple[KeyRange, RowLimits], ...]] = ()
    """Ranges of RPC keys that will be restored, and the largest rows that clients of the target could replace."""
    listed: MayChange[bool] = True
    """Show the result in `tikv-br list`."""


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
    """Merge backups into a full one; returns when it is complete or, in a dry run, planned. Raises `TikvBrError`."""
    return run_backup(
        MergeContext(options.output, reporter, listed=options.listed, merge=options), merge_steps(options)
    )


def merge_steps(options: MergeOptions) -> list[Step[MergeContext]]:
    """The steps, in order. A dry run leaves out every step that writes."""
    checks: list[Step[MergeContext]] = [
        FunctionStep("check the input", check_input),
        FunctionStep("read the sources", read_sources),
        FunctionStep("check the storage", steps.check_storage),
    ]
    find = FunctionStep("look for a resumable backup", find_resumable_merge)
    plan = FunctionStep("plan", make_plan)
    if options.output.dry_run:
        return [*checks, find, plan]
    return [
        *checks,
        FunctionStep("acquire the backup lock", steps.acquire_backup_lock, steps.release_backup_lock),
        find,
        FunctionStep("record the run", steps.record_run),
        FunctionStep("check the files", check_files),
        plan,
        FunctionStep("merge", merge),
        FunctionStep("verify coverage", verify_coverage),
        FunctionStep("commit", commit),
        FunctionStep("clean up", steps.clean_up),
    ]


def read_sources(context: MergeContext) -> None:
    """Open what is merged, and check that it covers the timestamp."""
    options = context.merge
    sources = context.sources = MergeSources.open(options.newest, options.log)
    if not sources.increments and sources.log is None:
        raise UsageError(
            "there is nothing to merge: the backup is a full one", hint="Pass --log, or an incremental backup."
        )
    ts = options.ts or sources.window(allow_inexact=options.allow_inexact)[1]
    sources.check(ts, allow_inexact=options.allow_inexact)
    base = sources.base
    context.info = ClusterInfo(base.cluster_id, base.cluster_version, ApiVersion.V2, ())
    context.engine = Engine.of_tasks("merge", "made from storage alone", options.output)
    context.conversion = Conversion(ApiVersion.V2, ApiVersion.V2)
    context.source_ranges = base.ranges
    context.keyspace_names = {} if base.manifest is None else base.manifest.description.names
    context.lineage = Lineage(merged_from=sources.urls)
    context.set_backup_ts(ts if sources.log is not None else sources.newest.backup_ts)
    context.scanned_ts = ts


def find_resumable_merge(context: MergeContext) -> None:
    """Resume an unfinished merge of the same sources, at the time that it has chosen."""
    wanted = context.backup_ts
    steps.find_resumable_backup(context)
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
    sources.verify_identity(context.source_ranges)
    if sources.log is not None and (damage := sources.log.verify_files(context.log_files)):
        raise LogDamaged(f"the log at {sources.log.store.location.redacted()} is damaged: {damage[0].problem}")


def make_plan(context: MergeContext) -> None:
    """Divide what is not done yet into intervals of about equal size."""
    done = [each.interval for each in context.finished]
    parts = [part for whole in context.source_ranges for part in gaps(whole, done)]
    context.plan = context.sources.plan(context.log_files, parts, context.engine.slots)
    context.engine = context.engine.settle_executor(context.options, context.plan)


def merge(context: MergeContext) -> None:
    """Merge all intervals of the plan. Raises the first error of a task."""
    sources = context.sources
    rows = StoredRows(
        backups=tuple((each.store.location, each.files) for each in sources.backups),
        ts=context.ts,
        now=physical_ms(context.ts) // 1000,
        log=None if sources.log is None else sources.log.store.location,
        log_files=context.log_files,
        after_ts=sources.newest.backup_ts,
    )
    job = MergeJob(context.first_run, context.options, rows, context.merge.limits)
    run_backup_tasks(context, context.plan, partial(run_merge_task, job))


@dataclass(frozen=True, slots=True)
class MergeJob:
    """Parameters that all tasks of a run share. Picklable."""

    run: str
    options: BackupOptions
    rows: StoredRows
    limits: tuple[tuple[KeyRange, RowLimits], ...] = ()
    """Value of `MergeOptions.limits`."""


def run_merge_task(job: MergeJob, interval: KeyRange, context: TaskContext) -> TaskResult:
    """Merge one interval, with retries. Raises the `TikvBrError` of the last attempt."""
    converter = Conversion(ApiVersion.V2, ApiVersion.V2).of(interval)
    limits_here = [each for each in job.limits if not intersection(each[0], interval).is_empty]

    def rows() -> Iterator[ConvertedRows]:
        for batch in job.rows.batches(interval, converter.source):
            for span, limits in limits_here:
                refuse_beyond(limits, batch, converter.source, span)
            converted = converter.convert(batch)
            yield converted
            context.report(data_bytes=converted.source.total_bytes, keys=converted.source.total_kvs)

    return try_task(context, lambda: write_interval(job.options, job.run, interval, converter, rows()))
