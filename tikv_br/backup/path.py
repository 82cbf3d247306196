"""The path of a backup: taken for this run alone, gone on with where a run was broken off, given back at the end."""

from __future__ import annotations

import logging

from tikv_br.backup.context import BackupContext
from tikv_br.backup.describe import run_record as this_run
from tikv_br.backupset import layout, lease, ledger, lock, run_record
from tikv_br.backupset.backup_set import BackupSet, BackupWriter
from tikv_br.backupset.lock import PathState
from tikv_br.backupset.run_record import RunRecord
from tikv_br.errors import BackupDamaged, BackupPathInUse, ResumeRefused, StorageError
from tikv_br.progress_events import Notice
from tikv_br.storage.base import exists
from tikv_br.storage.open import open_store

log = logging.getLogger(__name__)


def check_storage(context: BackupContext) -> None:
    """Refuse a path that is in use."""
    context.store = open_store(context.options.storage)
    if not context.options.lock_wait:
        lease.check_free(context.store)
    _survey(context)


def take_path(context: BackupContext) -> None:
    """Make the path this run's own; also proves that it can be written."""
    options, store = context.options, context.store
    context.lease = lease.acquire(
        store,
        "backup",
        wait=options.lock_wait,
        on_wait=lambda holder: context.reporter(Notice(f"waiting for the path: {holder}")),
    )
    _survey(context)
    context.writer = BackupWriter(store)
    if options.no_resume and context.path_state is not PathState.FREE:
        context.writer.discard()
        context.path_state = PathState.FREE
    if context.path_state is PathState.FREE:
        context.owns_work = True
        _put_lock(context)


def find_earlier_work(context: BackupContext) -> None:
    """Go on from what an earlier run at the path has done, if it was to make the same backup. Raises `ResumeRefused`."""
    if context.path_state is PathState.FREE:
        return
    begun = run_record.read(context.store)
    if begun is None:
        _check_nothing_done(context)
        context.owns_work = True
        return
    if odd := run_record.differences(begun, this_run(context)):
        if context.path_state is PathState.COMMITTED:
            raise BackupPathInUse(f"{context.store.location} holds a backup already")
        raise ResumeRefused(
            f"the unfinished run at {context.store.location} was begun otherwise: {'; '.join(odd)}",
            hint="Say what it was begun with to go on, or --no-resume to remove what it left and start anew.",
        )
    context.begun_by = begun.run_id
    context.started_ms = begun.description.started_ms
    context.set_backup_ts(begun.description.backup_ts)
    if context.path_state is PathState.COMMITTED:
        context.manifest = BackupSet.open(context.store).manifest
        context.reporter(Notice(f"run {begun.run_id} has made the backup; it is only tidied up"))
    else:
        _take_over(context, begun)
    context.owns_work = True


def record_run(context: BackupContext) -> None:
    """Leave word of what this run is to make."""
    if not context.begun_by:
        run_record.write(context.store, this_run(context))


def tidy_up(context: BackupContext) -> None:
    """Give the path back. The backup is complete: what cannot be removed is an untidiness, not a failure."""
    try:
        run_record.remove(context.store)
        if context.lease is not None:
            context.lease.release()
        context.store.sweep(layout.LEASE, deep=True)
    except StorageError as error:
        log.warning("some leftovers of the backup stay in the storage: %s", error.message)


def give_path_back(context: BackupContext) -> None:
    """Leave done work for the next run, or, where there is none or it is spoiled, remove all. A backup stays as it is."""
    if context.lease is None or context.lease.lost is not None:
        return  # the path was never ours, or is ours no more
    keep = keeps_work(context)
    if context.owns_work and not keep:
        context.writer.discard()
    context.lease.release()
    if context.owns_work and not keep:
        context.store.sweep(layout.LEASE, deep=True)


def keeps_work(context: BackupContext) -> bool:
    """Whether what this run has done can be gone on with by the next, now that it fails."""
    if context.kept is None:
        done = exists(context.store, layout.META) or any(context.store.list(layout.LEDGER))
        context.kept = context.owns_work and not context.spoiled and done
    return context.kept


def _survey(context: BackupContext) -> None:
    context.path_state = lock.survey(context.store)
    if context.path_state is PathState.REMAINS and not context.options.no_resume:
        raise BackupPathInUse(
            f"{context.store.location} holds what stores or tasks finished after a run had ended",
            hint="`tikv-br abort` removes them, and so does --no-resume.",
        )


def _put_lock(context: BackupContext) -> None:
    """A storage that was asked twice may say that the lock is there: under the lease it can only be ours."""
    try:
        lock.put(context.store)
    except BackupPathInUse:
        if lock.survey(context.store) is not PathState.UNFINISHED:
            raise


def _check_nothing_done(context: BackupContext) -> None:
    """A run that was broken off before it left word has not written anything else."""
    if any(layout.is_part(info.name) for info in context.store.list()):
        raise ResumeRefused(
            f"the unfinished run at {context.store.location} has left no {layout.RUN} that tells what it is"
        )


def _take_over(context: BackupContext, begun: RunRecord) -> None:
    """Take the sound part of the ledger for ours; what else there is goes."""
    store = context.store
    try:
        entries = ledger.read_entries(store)
    except BackupDamaged as error:
        raise ResumeRefused(f"the unfinished run at {store.location} cannot be gone on with: {error.message}") from None
    context.entries = ledger.sound(entries, {info.name: info.size for info in store.list()})
    context.resumed = len(context.entries)
    context.reporter(Notice(f"going on with run {begun.run_id}: {context.resumed} intervals are done already"))
    if not context.options.dry_run:
        ledger.remove_entries(store, but=context.entries)
        context.writer.remove_files_but({file.name for entry in context.entries for file in entry.files})
