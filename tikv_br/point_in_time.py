"""Restores a cluster to a point in time: merges backups and a log into a temporary full backup, and restores that.

Both parts resume: killed at any moment, the same command continues. The temporary backup is removed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Struct, structs

from tikv_br.archive.log import LogSource
from tikv_br.backup.merge import MergeOptions, merge_backup
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cancellation import clean_up
from tikv_br.cluster import timestamps
from tikv_br.cluster.topology import DEFAULT_TIMESTAMP_AGE
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.read import MergeSources
from tikv_br.dataflow.run import KEPT, BackupReport, abort_backup, open_temporary, remove_temporary
from tikv_br.errors import BackupSetError, Failure, LeaseLost, ResumeRefused, StorageError
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.limits import RowLimits
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.restore.options import RestoreOptions, Via
from tikv_br.restore.plan import RestorePlan
from tikv_br.restore.run import RestoreSummary, check_target_alone, restore
from tikv_br.resume_options import MayChange, chosen, compared_as
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


class PointOptions(Struct, frozen=True):
    """Options of a restore to a point in time."""

    restore: Annotated[RestoreOptions, compared_as("its fields")]
    """`storage` is the newest backup to use: a full one, or an increment."""
    log: Annotated[LogSource | None, compared_as("sources")]
    ts: Annotated[int, compared_as("ts")]
    """0 = the last one possible."""
    before_ts: Annotated[int, compared_as("ts")] = 0
    """Exclusive upper limit of the rows' times: `ts` is earlier by the age of stores' timestamps; 0 = no such limit."""
    allow_inexact: Annotated[bool, compared_as("allow_inexact")] = False
    """Value of `MergeOptions.allow_inexact`."""
    work: MayChange[StorageLocation | None] = None
    """Folder for the temporary backup; None = beside the log or, without one, beside the backup."""


@dataclass(frozen=True, slots=True)
class PointSummary:
    """Result of a restore to a point in time."""

    ts: int
    """The restored rows are as of this timestamp."""
    uncertainty: str
    """Sentence about the writes near that time that the rows have or lack; empty for the last time possible."""
    window: tuple[int, int]
    """First and last timestamp that could be restored."""
    sources: tuple[str, ...]
    """URLs of the backups and the log that were read, without credentials."""
    merged: BackupReport | None
    """None if an earlier run had merged everything."""
    restored: RestoreSummary | None
    """None for a dry run."""


def just_before(ts: int) -> int:
    """The newest timestamp that no write of `ts` or later has, with the stores' default settings."""
    return max(timestamps.minus_seconds(ts, DEFAULT_TIMESTAMP_AGE) - 1, 1)


def _uncertainty(options: PointOptions) -> str:
    age = f"{DEFAULT_TIMESTAMP_AGE:g} s"
    if options.before_ts:
        shown = timestamps.show_time(timestamps.physical_ms(options.before_ts), age=False)
        return f"no write of {shown} or later is included; writes of the {age} before may be missing"
    if not options.ts:
        return ""
    return (
        f"writes made up to {age} later may be included, because stores give out timestamps up to {age} old; "
        "--before TIME leaves them out"
    )


def restore_to_point(
    options: PointOptions,
    reporter: Reporter = silent,
    on_plan: Callable[[RestorePlan], None] = lambda _plan: None,
) -> PointSummary:
    """Restore the rows of a timestamp. Raises `TikvBrError`.

    `OutsideRestoreWindow`, `LogDamaged`, and errors of a target that does not fit are raised before anything is written. A dry run
    reads the records of backups and log, and plans the merge. Until the target changes, every error but an outage removes what is merged.
    """
    wanted, began = options.restore, time.monotonic()
    sources = MergeSources.open(wanted.storage, options.log)
    window = sources.window(allow_inexact=options.allow_inexact)
    ts = options.ts or window[1]
    sources.check(ts, allow_inexact=options.allow_inexact)
    uncertainty = _uncertainty(options)
    if uncertainty:
        reporter(Notice(f"the rows of {timestamps.show_ts(ts, age=False)}: {uncertainty}"))
    elif not options.ts and (lost := sources.lost()):
        reporter(
            Notice(
                f"the rows of {timestamps.show_ts(ts, age=False)}: that is the last time before the log lacks changes, "
                f"{lost[0]}; later changes are not restored"
            )
        )
    work = temporary_location(options, sources)
    store = open_store(work)
    report: BackupReport | None = None
    limits: list[tuple[KeyRange, RowLimits]] = []
    merged = exists(store, layout.META) and not exists(store, layout.RUN)
    if merged and not options.ts and not wanted.dry_run and not _has_begun(wanted, store):
        remove_temporary(store)  # of a run that ended before it changed the target; the log may have grown since
        merged = False
    if merged:
        ts = open_temporary(store).backup_ts
        reporter(Notice(f"resuming: {work} already has the merged rows of {timestamps.show_ts(ts)}"))
    else:  # the target is checked before a merge that may take hours
        # Files without the record of a run: `remove_temporary` was interrupted, which comes after a restore. So the target may have their rows.
        removing = not exists(store, layout.RUN) and any(store.list())
        base = structs.replace(wanted, storage=sources.base.store.location, via=Via.AUTO)
        limits = check_target_alone(structs.replace(base, allow_overwrite=wanted.allow_overwrite or removing))
        if removing and not wanted.dry_run:
            abort_backup(work, None, wanted.lock_wait)
    if wanted.dry_run:
        report = None if merged else merge_backup(_merge_options(options, work), reporter)
        return PointSummary(ts, uncertainty, window, sources.urls, report, None)
    with _removed_if_refused(wanted, store):
        if not merged:
            report = merge_backup(structs.replace(_merge_options(options, work), limits=tuple(limits)), reporter)
        backup = BackupSet.open(store)
        restored = restore(structs.replace(wanted, storage=work), reporter, on_plan)
    remove_temporary(store)
    restored = structs.replace(restored, seconds=round(time.monotonic() - began, 3))  # with the merge
    return PointSummary(backup.backup_ts, uncertainty, window, sources.urls, report, restored)


def _has_begun(wanted: RestoreOptions, store: ObjectStore) -> bool:
    """Whether a restore of the temporary backup may have changed the target: it has a record, beside the backup or at ``--state``."""
    return any(
        any(each.list(layout.RESTORE))
        for each in (store, *([] if wanted.state is None else [open_store(wanted.state)]))
    )


@contextlib.contextmanager
def _removed_if_refused(wanted: RestoreOptions, store: ObjectStore) -> Iterator[None]:
    """Remove the temporary backup if the block fails before the target has changed, unless the same command can resume after an outage."""
    try:
        yield
    except Failure as error:
        if isinstance(error, LeaseLost | ResumeRefused) or error.retryable:
            raise
        with clean_up():
            try:
                if _has_begun(wanted, store):
                    raise
                if exists(store, layout.META):
                    remove_temporary(store)
                else:
                    abort_backup(store.location, None)
            except (BackupSetError, StorageError) as failure:
                error.hint += f" The merged rows stay at {store.location.redacted()}: {failure.message}"
            else:
                error.hint = error.hint.removesuffix(KEPT).rstrip() or error.default_hint
        raise


def temporary_location(options: PointOptions, sources: MergeSources) -> StorageLocation:
    """Return the location of the merged rows until they are restored: it depends on target, sources and options."""
    wanted = options.restore
    exactness = ["inexact"] if options.allow_inexact else []
    identity = "\n".join([*sources.urls, str(options.ts), ",".join(wanted.cluster.pd), *exactness, *chosen(options)])
    name = f"restore-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if options.work is not None:
        return options.work.child(name)
    if options.log is not None:
        return options.log.storage.child(name)
    parent, _, _ = wanted.storage.path.rpartition("/")
    return replace(wanted.storage, path=parent or wanted.storage.path).child(name)


def _merge_options(options: PointOptions, work: StorageLocation) -> MergeOptions:
    output = merge_output(options, work)
    return MergeOptions(output, options.restore.storage, options.log, options.ts, options.allow_inexact, listed=False)


def merge_output(options: PointOptions, work: StorageLocation) -> BackupOptions:
    """Options of the temporary backup. A merge computes: it has as many tasks at once as fit, not as a restore has files."""
    wanted = options.restore
    return BackupOptions(
        cluster=wanted.cluster,
        storage=work,
        executor=wanted.executor.executor,
        spark_master=wanted.executor.spark_master,
        spark_settings=wanted.executor.spark_settings,
        lock_wait=wanted.lock_wait,
        no_resume=not wanted.resume,
        dry_run=wanted.dry_run,
    )
