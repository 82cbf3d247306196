"""The steps that all operations have which make backups: among them the lock of the path, the search for a run to resume, and the commit.

If one fails, the earlier ones are undone.

The finished tasks of a failed backup are kept for the next run at the path, if it can resume them; otherwise everything is
removed, from the storage and from PD. A complete backup is never removed, even if a step after its commit fails.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from msgspec.structs import asdict

from tikv_br import __version__
from tikv_br.backupset import coverage, index, layout, lease, ledger, manifest
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.backup_writer import BackupWriter
from tikv_br.backupset.coverage import keyspaces_in
from tikv_br.backupset.files import verify_file_identity
from tikv_br.backupset.index import place_of
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry
from tikv_br.backupset.manifest import Description, PathState, RunRecord
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.cluster import safepoint
from tikv_br.cluster.safepoint import choose_backup_ts
from tikv_br.dataflow.plan import Interval, plan_by_regions
from tikv_br.dataflow.run import BackupContext
from tikv_br.dataflow.write import TaskResult
from tikv_br.errors import (
    BackupDamaged,
    BackupPathInUse,
    ClusterError,
    ClusterUnreachable,
    CrypterMismatch,
    ResumeRefused,
    RetryBudgetExhausted,
    SafePointError,
    StorageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, gaps
from tikv_br.progress_events import Notice
from tikv_br.report.facts import counted
from tikv_br.resume_options import chosen
from tikv_br.storage.base import exists
from tikv_br.storage.open import open_store
from tikv_br.tasks.executor import run_tasks
from tikv_br.tasks.task import TaskContext


def describe(context: BackupContext) -> Description:
    """Description of the backup that this run makes, as written to the manifest."""
    conversion, ranges, names = context.conversion, context.target_ranges, context.keyspace_names
    keyspaces = keyspaces_in(conversion.target, ranges)
    return Description(
        tool_version=__version__,
        engine=context.engine.name,
        engine_reason=context.engine.reason,
        file_format=context.options.file_kind.value,
        compression=context.options.compression.label,
        cluster_id=context.info.cluster_id,
        cluster_version=context.info.version,
        api_version=conversion.source,
        dst_api_version=conversion.target,
        source_ranges=context.source_ranges,
        ranges=ranges,
        keyspaces=keyspaces,
        keyspace_names=tuple(names.get(each, "") for each in keyspaces) if names else (),
        backup_ts=context.backup_ts,
        storage=context.options.storage.redacted(),
        encryption=context.options.storage.crypter.method,
        started_ms=context.started_ms,
        scanned_ts=context.scanned_ts,
        key_mode=context.options.key_mode,
        version_check_skipped=context.options.cluster.skip_version_check,
        **asdict(context.lineage),
    )


def describe_run(context: BackupContext) -> RunRecord:
    """The record by which another process can resume this run."""
    options = context.options
    losses = tuple(sorted(loss.value for loss in options.allow_loss))
    others = chosen(*context.all_options)
    return RunRecord(context.first_run, describe(context), options.assume_no_ttl, options.checksum, losses, others)


log = logging.getLogger(__name__)


def check_storage(context: BackupContext) -> None:
    """Raise `BackupPathInUse` if the path is in use."""
    location = context.options.storage
    # With one key only: files of a run that is resumed are encrypted with the same one.
    context.store = open_store(replace(location, crypter=location.crypter.alone))
    if not context.options.lock_wait:
        lease.check_free(context.store)
    context.path_state = manifest.path_state(context.store)
    _check_parents(context)


def _check_parents(context: BackupContext) -> None:
    """Raise `BackupPathInUse` if a folder above is a backup: its removal would remove this one, too."""
    place = place_of(context.store.location)
    while place is not None:
        with contextlib.suppress(StorageError):  # credentials may end at the path
            if exists(open_store(place.root), layout.META):
                raise BackupPathInUse(f"{context.store.location} is inside the backup at {place.root}")
        place = place_of(place.root)


def acquire_backup_lock(context: BackupContext) -> None:
    """Acquire the lock of the path; this also shows that the storage is writable."""
    options, store = context.options, context.store
    context.lease = lease.acquire(
        store,
        "backup",
        wait=options.lock_wait,
        on_wait=lambda holder: context.reporter(Notice(f"waiting for the lock of the path: {holder}")),
    )
    context.path_state = manifest.path_state(context.store)
    context.writer = BackupWriter(store)
    if context.path_state is PathState.REMAINS or (options.no_resume and context.path_state is not PathState.FREE):
        removed = context.writer.discard(context.lease.check)
        if context.path_state is PathState.REMAINS:
            found = counted(removed, "file")
            context.reporter(Notice(f"removed {found} that stores or tasks finished after their run had failed"))
        context.path_state = PathState.FREE
    if context.path_state is PathState.FREE:
        context.owns_work = True
        _put_lock(context)


def find_resumable_backup(context: BackupContext) -> None:
    """Resume an unfinished run at the path. Raises `ResumeRefused` if it had other options."""
    if context.path_state is PathState.FREE:
        return
    unfinished = _read_run(context)
    if unfinished is None and exists(context.store, layout.META):  # its run has just finished
        raise BackupPathInUse(f"{context.store.location} already holds a backup")
    if unfinished is None:
        _check_no_files(context)
        context.owns_work = True
        return
    if differences := manifest.differences(unfinished, describe_run(context)):
        if context.path_state is PathState.COMMITTED:
            raise BackupPathInUse(f"{context.store.location} already holds a backup")
        raise ResumeRefused(
            f"cannot resume the unfinished run at {context.store.location}: it was started with other options: {'; '.join(differences)}",
            hint="Pass the same options, or --no-resume to remove its files and start over.",
        )
    context.resumed_run = unfinished.run_id
    context.started_ms = unfinished.description.started_ms
    context.set_backup_ts(unfinished.description.backup_ts)
    if context.path_state is PathState.COMMITTED:
        context.manifest = BackupSet.open(context.store, key_mode=None).manifest
        context.reporter(Notice(f"run {unfinished.run_id} has completed the backup; only the clean-up is left"))
    else:
        _resume_work(context, unfinished)
    context.owns_work = True


def record_run(context: BackupContext) -> None:
    """Write the record of this run, by which another process can resume it."""
    if not context.has_earlier_work:
        context.confirm_locks()
        write_record(context.store, layout.RUN, describe_run(context))


def clean_up(context: BackupContext) -> None:
    """Release the lock and remove the run's record. Storage errors are only logged: the backup is complete."""
    if context.lease is not None:
        context.lease.try_release()
        context.lease = None
    try:
        context.store.delete(layout.RUN)  # last: as long as it exists, a killed run can be resumed
    except StorageError as error:
        log.warning("cannot remove all temporary files of the backup: %s", error.message)


def release_backup_lock(context: BackupContext) -> None:
    """Release the lock after a failure. Unless the finished tasks can be resumed, remove all files first; never a complete backup."""
    if context.lease is None:
        return
    with context.lease:  # released even if the storage fails again
        if context.owns_work and not keeps_work(context) and context.lease.still_holds():
            context.writer.discard(context.lease.check)


def keeps_work(context: BackupContext) -> bool:
    """Return whether the next run can resume the finished work of this failed run."""
    if context.work_kept is None:
        context.work_kept = context.owns_work and not context.unresumable and _has_finished_work(context)
    return context.work_kept


def _has_finished_work(context: BackupContext) -> bool:
    """Return whether there are finished tasks or a backup; True if the storage does not answer: then nothing is removed."""
    try:
        return exists(context.store, layout.META) or any(context.store.list(layout.LEDGER))
    except StorageError:
        return True


def _put_lock(context: BackupContext) -> None:
    """Write the lock file. A retried write may find the file of its first try: under the lease it can only be this run's."""
    try:
        manifest.mark_path(context.store)
    except BackupPathInUse:
        if manifest.path_state(context.store) is not PathState.UNFINISHED:
            raise


def _check_no_files(context: BackupContext) -> None:
    """Raise `ResumeRefused` if there are files of a run without a record."""
    if any(layout.is_part(info.name) for info in context.store.list()):
        raise ResumeRefused(
            f"cannot resume the unfinished run at {context.store.location}: its record {layout.RUN} is missing"
        )


def _read_run(context: BackupContext) -> RunRecord | None:
    """The record of the unfinished run, if there is one. Raises `ResumeRefused` if it is damaged."""
    try:
        return manifest.read_run(context.store)
    except BackupDamaged as error:
        place = context.store.location
        raise ResumeRefused(f"cannot resume the unfinished run at {place}: {error.message}") from None


def _resume_work(context: BackupContext, unfinished: RunRecord) -> None:
    """Take over the valid entries of the ledger and remove all other files."""
    store = context.store
    try:
        found = _usable_entries(context, unfinished)
    except (BackupDamaged, CrypterMismatch) as error:  # not a wrong key: the run's record was decrypted with it
        raise ResumeRefused(f"cannot resume the unfinished run at {store.location}: {error.message}") from None
    context.finished = list(found)
    context.resumed = len(context.finished)
    context.reporter(Notice(f"resuming run {unfinished.run_id}: {counted(context.resumed, 'range')} finished earlier"))
    if not context.options.dry_run:
        context.confirm_locks()
        ledger.remove_entries(store, but=context.finished)
        context.writer.remove_files_except({name for names in found.values() for name in names})


def _usable_entries(context: BackupContext, unfinished: RunRecord) -> dict[FinishedTask, tuple[str, ...]]:
    """The entries of the run to resume from, and the names of their files; the other intervals are copied again.

    Their files are unchanged, by size, hash of the tail and ETag. Raises `BackupDamaged` or `CrypterMismatch` if an entry cannot be read.
    """
    store = context.store
    sizes = {info.name: info.size for info in store.list() if layout.is_data(info.name)}

    def read(name: str) -> tuple[FinishedTask, tuple[str, ...]] | None:
        entry = read_record(store, LedgerEntry, name)
        is_usable = entry.run == unfinished.run_id and ledger.has_its_files(entry, sizes)
        return (FinishedTask.of(entry), tuple(file.name for file in entry.files)) if is_usable else None

    def check(finished: FinishedTask) -> str:
        try:
            for file in ledger.read_entry(store, finished).files:
                verify_file_identity(store, file)
        except BackupDamaged as error:
            return error.message
        return ""

    names = dict(filter(None, ledger.map_ahead(read, [info.name for info in store.list(layout.LEDGER)])))
    entries = ledger.without_overlaps(names)
    usable = {}
    for finished, problem in zip(entries, ledger.map_ahead(check, entries), strict=True):
        if problem:
            context.reporter(Notice(f"an interval is copied again: {problem}"))
        else:
            usable[finished] = names[finished]
    return usable


def verify_coverage(context: BackupContext) -> None:
    """Check the ledger in the storage against the range. Raises `CoverageError` for a gap, an overlap or a lost entry."""
    if context.manifest is not None:  # an earlier run has committed
        return
    recorded = {info.name for info in context.store.list(layout.LEDGER)}
    for finished in context.finished:
        if finished.name not in recorded:
            raise ledger.missing_entry(finished)
    coverage.require_coverage(context.source_ranges, (each.interval for each in context.finished))


def commit(context: BackupContext, entries: Iterable[LedgerEntry] | None = None) -> None:
    """Write the manifest, then `backupmeta`, and add the backup to the index of its parent folder.

    ``entries``: the entries of a backup without a ledger, one for each interval, in the order of keys.
    """
    context.check_locks()
    if context.manifest is None:
        if context.backup_ts and not context.scanned_ts:
            context.scanned_ts = _last_timestamp(context)
        done = ledger.read_ordered(context.store, context.finished) if entries is None else entries
        context.manifest = context.writer.commit(describe(context), done, context.confirm_locks)
    else:
        context.confirm_locks()
        context.writer.clean_up(context.manifest)
    if context.listed and (before := index.add_to_index(context.options.storage, context.manifest)):
        rows = context.manifest.statistics.total_kvs
        context.reporter(
            Notice(
                f"this backup has {rows:,} rows, less than half of the {before:,} of the backup of the same cluster and ranges before "
                "it: check that nothing is missing",
                warning=True,
            )
        )


def _last_timestamp(context: BackupContext) -> int:
    """Return a timestamp above all rows read. If PD does not answer, the error states that only this is missing."""
    try:
        return context.cluster.pd.tso()
    except (ClusterUnreachable, RetryBudgetExhausted) as error:
        compared = " and compared" if context.options.checksum else ""
        error.hint = (
            f"All rows are copied{compared}; only the backup's description is missing, which needs a timestamp of PD."
        )
        raise


def hand_over_safe_point(context: BackupContext) -> None:
    """Keep the service safe point for ``gc_ttl`` seconds, for a sync that follows. The backup is complete even if this fails."""
    if context.keeper is None:
        return
    try:
        context.keeper.stop_with_ttl(context.options.gc_ttl)
    except ClusterError as error:
        raise SafePointError(
            f"the backup is complete, but its service safe point could not be renewed: {error.message}",
            hint="The backup can be restored. A sync can follow it only if GC has not passed its backup-ts by then.",
        ) from None


def check_input(context: BackupContext) -> None:
    """Check the options before any request."""
    context.options.check()


def connect(context: BackupContext) -> None:
    """Connect to PD and read the cluster's id, version and API version."""
    context.cluster = context.clusters.get(context.options.cluster)
    context.info = context.cluster.info(context.reporter)


def set_backup_ts(context: BackupContext) -> None:
    """Choose backup-ts if the cluster has timestamps; also for a resumed run that has finished no interval."""
    if context.info.api_version is ApiVersion.V2 and not context.has_earlier_work:
        context.set_backup_ts(choose_backup_ts(context.cluster, context.options.safe_interval))


def release_safe_point(context: BackupContext) -> bool:
    """Remove the service safe point, or keep it for ``gc_ttl`` seconds if the next run can resume the work. Returns False if there is none."""
    keeper = context.keeper
    if keeper is None:
        return False
    keeper.stop()
    if context.lease is not None and not context.lease.still_holds():
        return False  # the new holder of the lock resumes the work, with the same safe point
    try:
        if keeps_work(context) and keeper.lost is None:
            keeper.stop_with_ttl(context.options.gc_ttl)
        else:
            safepoint.release(context.cluster.pd, keeper.service_id)
    except (ClusterUnreachable, RetryBudgetExhausted) as error:
        left = f"the safe point {keeper.service_id} stays in PD for up to {keeper.seconds_left:.0f} s"
        raise type(error)(f"{left}: {error.message}", hint=error.hint) from None
    return True


def make_plan(context: BackupContext) -> None:
    """Divide the remaining ranges into tasks of about equal size, by PD's estimates; none if an earlier run has committed."""
    if context.manifest is not None:
        return
    codec = KeyCodec(context.conversion.source, mode=context.conversion.mode)
    done = [each.interval for each in context.finished]
    remaining = [(whole, gaps(whole, done)) for whole in context.source_ranges]
    context.plan = plan_by_regions(context.cluster, codec, remaining, context.engine.slots)
    if context.plan:
        context.engine = context.engine.settle_executor(context.options, context.plan)


def run_backup_tasks(
    context: BackupContext, plan: Sequence[Interval], function: Callable[[KeyRange, TaskContext], TaskResult]
) -> None:
    """Run a task for each interval, and add the results to the context. Raises the first error of a task."""
    if not plan:
        return
    context.confirm_locks()
    context.session_seconds += run_tasks(
        [interval.span for interval in plan],
        function,
        options=context.options.choose(context.engine.executor, context.engine.slots),
        on_result=context.add_result,
        name_of=str,
        reporter=context.report,
        shared=[context.clusters],
        planned_bytes=[interval.size for interval in plan],
    )
