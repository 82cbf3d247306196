"""Makes a full backup from storage alone: a base, incremental backups on it and a log, as of one timestamp.

Each task merges one interval: the base and the increments are read in key order, and the log's rows of the interval are
first reduced to the newest of each key. The result is a backup as any other, with the timestamps of its rows.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from tikv_br.archive.log import LogArchive, LogSource, read_log_rows
from tikv_br.backup import path
from tikv_br.backup.context import BackupContext, Engine, Lineage
from tikv_br.backup.convert import Conversion
from tikv_br.backup.data_files import DataFiles
from tikv_br.backup.options import BackupOptions
from tikv_br.backup.plan import Interval, task_bytes
from tikv_br.backup.run import BackupReport, run_backup
from tikv_br.backup.run_tasks import run_backup_tasks
from tikv_br.backup.steps import commit, verify_coverage
from tikv_br.backup.task import PhaseSeconds, Task, TaskResult, try_task
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry, write_entry
from tikv_br.backupset.rows import file_errors, open_file, read_rows
from tikv_br.cluster.timestamps import compose, physical_ms, show_ts
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.errors import BackupUnsupported, LogDamaged, OutsideRestoreWindow, ResumeRefused, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, gaps, intersection
from tikv_br.progress_events import Reporter, silent
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

CLOCK_MARGIN_MS = 60_000
"""How far the clock of the machine that made a backup may be ahead of PD's: for backups without `scanned_ts`."""
CHECK_THREADS = 16
SAMPLED_LOG_FILES = 32
"""Log files whose row groups are looked at to divide the keys into intervals of equal size."""


@dataclass(frozen=True, slots=True)
class MergeSources:
    """What is merged: a full backup, incremental backups in the order of their time, and a log."""

    base: BackupSet
    increments: tuple[BackupSet, ...] = ()
    log: LogArchive | None = None

    @classmethod
    def open(cls, newest: StorageLocation, log: LogSource | None) -> MergeSources:
        """Open a backup, the backups that it continues, and a log of the same cluster.

        Raises as `BackupSet.open`, `BackupSet.chain` and `LogArchive.open`; `BackupUnsupported`, `UsageError`.
        """
        base, *increments = BackupSet.open(open_store(newest)).chain()
        if base.api_version is not ApiVersion.V2 or not base.backup_ts:
            raise BackupUnsupported(
                f"{base.store.location} has no backup-ts: its rows have no time",
                hint="Point-in-time recovery needs a backup of an API V2 cluster that tikv-br made.",
            )
        found = cls(base, tuple(increments))
        return found if log is None else found.with_log(LogArchive.open(open_store(log.storage), log.id))

    def with_log(self, log: LogArchive) -> MergeSources:
        """These backups and a log. Raises `UsageError` for the log of another cluster or range, or that starts after the backups."""
        if log.description.cluster_id != self.base.cluster_id:
            raise UsageError(
                f"the log is of cluster {log.description.cluster_id}, the backup of cluster {self.base.cluster_id}",
                hint="Pass a backup and a log of the same cluster.",
            )
        log.check(self.base.ranges, self.newest.backup_ts, self.newest.backup_ts)
        return replace(self, log=log)

    @property
    def newest(self) -> BackupSet:
        """The last increment, or the base."""
        return self.increments[-1] if self.increments else self.base

    @property
    def urls(self) -> tuple[str, ...]:
        """Their places, without credentials."""
        urls = [each.store.location.redacted() for each in self.backups]
        if self.log is not None:
            urls.append(f"{self.log.store.location.redacted()} (log {self.log.description.log_id})")
        return tuple(urls)

    @property
    def backups(self) -> tuple[BackupSet, ...]:
        """The base and the increments."""
        return (self.base, *self.increments)

    def log_files(self, ts: int) -> tuple[FileEntry, ...]:
        """The files of the log with changes after the newest backup, up to a timestamp. Raises as `LogArchive.check`."""
        if self.log is None:
            return ()
        found = {
            file.name: file for span in self.base.ranges for file in self.log.files_for(span, self.newest.backup_ts, ts)
        }
        return tuple(found.values())

    @property
    def window(self) -> tuple[int, int]:
        """The first and the last timestamp to which rows can be restored.

        A backup is no snapshot: until the end of its scan it may lack rows that were deleted or expired meanwhile, and have
        newer ones. So the window starts at the end of the scan of the newest backup. Raises `LogDamaged` for a log with gaps.
        """
        return scanned_ts(self.newest), self.last_ts(allow_inexact=False)

    def last_ts(self, *, allow_inexact: bool) -> int:
        """The last timestamp to which rows can be restored; with `allow_inexact` also one in a scan window at the log's end."""
        if self.log is None:
            return scanned_ts(self.newest)
        end = self.log.end_ts(self.newest.backup_ts, self.base.ranges)
        return end if allow_inexact else self.log.inexact_around(self.base.ranges, end)[0]

    def check(self, ts: int, *, allow_inexact: bool = False) -> None:
        """Check that a timestamp is in the window and, without `allow_inexact`, in no scan window of the log.

        Raises `OutsideRestoreWindow`, `LogDamaged` if they were in a part of the log that is lost.
        """
        first, last = self.window
        end = self.last_ts(allow_inexact=True)
        if self.log is not None and ts > end:
            with contextlib.suppress(UsageError):  # the log is whole, but ends before
                self.log.check(self.base.ranges, self.newest.backup_ts, ts)
        upper = end if allow_inexact else last
        if first > upper:
            raise OutsideRestoreWindow(
                f"the log has all rows only up to {show_ts(upper)}, before the backup's scan had ended ({show_ts(first)})",
                hint="Wait until the log has reached that time, or use an older backup.",
            )
        if not first <= ts <= end:
            raise OutsideRestoreWindow(
                f"{show_ts(ts)} is outside the restorable window, {show_ts(first)} to {show_ts(upper)}",
                hint="Pass a time in the window, an older backup for earlier times, or a log for later ones.",
            )
        if self.log is None or allow_inexact:
            return
        before, after = self.log.inexact_around(self.base.ranges, ts)
        if before < after:
            exact = " or ".join(str(each) for each in (before, after) if first <= each <= end)
            inexact = "--allow-inexact: such keys then get an older value, or none."
            raise OutsideRestoreWindow(
                f"at {show_ts(ts)} not all rows are known: the change feed was interrupted, and of keys written more than once "
                f"between {show_ts(before)} and {show_ts(after)} it may have delivered only the newest version",
                hint=f"Pass {exact}, the nearest times at which all rows are known. Or pass {inexact}"
                if exact
                else f"Pass {inexact}",
            )


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Options of one merge."""

    output: BackupOptions
    """Where and in what form the result is written, and who does the work; the rest is not used."""
    newest: StorageLocation
    """A full backup, or an incremental one whose parents are merged too."""
    log: LogSource | None = None
    ts: int = 0
    """The rows of this timestamp are written; 0 = the last one possible."""
    allow_inexact: bool = False
    """Whether keys may have an older value where the log lacks versions."""
    listed: bool = True
    """Whether `tikv-br list` shows the result."""


@dataclass
class MergeContext(BackupContext):
    """State of a merge."""

    merge: MergeOptions = field(kw_only=True)
    sources: MergeSources = field(init=False)  # read the sources
    ts: int = 0  # look for a resumable backup: the rows of this time are written
    log_files: tuple[FileEntry, ...] = ()  # look for a resumable backup


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


def plan_by_sizes(part: KeyRange, sizes: Sequence[tuple[bytes, int]], wanted: int) -> list[Interval]:
    """Cut a range into intervals of about `wanted` bytes; `sizes`: ascending keys, and the bytes from each to the next."""
    intervals: list[Interval] = []
    start, filled, count = part.start, 0, 0
    for key, size in sizes:
        if part.end and key >= part.end:
            break
        if key > start and count and filled + size // 2 > wanted:
            intervals.append(Interval(start, key, filled, count))
            start, filled, count = key, 0, 0
        if key >= part.start:
            filled += size
            count += 1
    return [*intervals, Interval(start, part.end, filled, count)]


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


def sizes_by_key(sources: MergeSources, files: Sequence[FileEntry]) -> list[tuple[bytes, int]]:
    """Ascending RPC keys, and about how many bytes are to be read from each to the next; ``files`` are those of the log."""
    parts = [(file.start_key, file.end_key, file.total_bytes) for each in sources.backups for file in each.files]
    cuts = {start for start, _, _ in parts}
    if sources.log is not None:
        more_parts, more_cuts = file_parts(sources.log.store, sources.log.codec, files)
        parts += more_parts
        cuts |= more_cuts
    return spread_sizes(parts, cuts)


def file_parts(
    store: ObjectStore, codec: KeyCodec, files: Sequence[FileEntry]
) -> tuple[list[tuple[bytes, bytes, int]], set[bytes]]:
    """Parts and cuts of Parquet files for `spread_sizes`, from the row groups of some of them."""
    from tikv_br.formats.parquet import ParquetReader

    parts: list[tuple[bytes, bytes, int]] = []
    cuts: set[bytes] = set()
    sampled = files[:: max(1, len(files) // SAMPLED_LOG_FILES)]
    for file in sampled:
        with file_errors(file):
            groups = ParquetReader(open_file(store, file)).groups()
        keys = [codec.rpc_key(each.first_key) for each in groups]
        cuts.update(keys[1:])  # the first says nothing about how keys are distributed
        parts += [
            (start, codec.rpc_key(group.last_key) if group.last_key else b"", group.size * len(files) // len(sampled))
            for start, group in zip(keys, groups, strict=True)
        ]
    return parts, cuts


def file_sizes(store: ObjectStore, codec: KeyCodec, files: Sequence[FileEntry]) -> list[tuple[bytes, int]]:
    """Ascending RPC keys, and about how many bytes Parquet files have from each to the next."""
    _, cuts = file_parts(store, codec, files)
    parts = [(file.start_key, file.end_key, file.total_bytes) for file in files]
    return spread_sizes(parts, cuts | {start for start, _, _ in parts})


def spread_sizes(parts: Sequence[tuple[bytes, bytes, int]], cuts: Iterable[bytes]) -> list[tuple[bytes, int]]:
    """The cuts, and the bytes from each to the next. The size of a part (first key, last key, bytes) is spread evenly over its cuts."""
    keys = sorted({b"", *cuts})
    sizes = [0] * len(keys)
    for start, last, size in parts:
        first = bisect_right(keys, start) - 1
        end = max(bisect_left(keys, last), first + 1) if last else len(keys)
        for at in range(first, end):
            sizes[at] += size // (end - first)
    return list(zip(keys, sizes, strict=True))


def scanned_ts(base: BackupSet) -> int:
    """A timestamp after all rows of a backup were read."""
    manifest = base.manifest
    if manifest is None:
        raise BackupUnsupported(f"{base.store.location} was not made by tikv-br: the end of its scan is unknown")
    return manifest.description.scanned_ts or compose(manifest.statistics.finished_ms + CLOCK_MARGIN_MS)
