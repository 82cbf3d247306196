"""The path of a backup: taken for this run alone, gone on with where a run was broken off, given back at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tikv_br.backup.context import BackupContext
from tikv_br.backup.describe import run_record as this_run
from tikv_br.backupset import layout, lease, ledger, lock, run_record
from tikv_br.backupset.backup_set import BackupSet, BackupWriter
from tikv_br.backupset.identity import verify_file_identity
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.backupset.lock import PathState
from tikv_br.backupset.run_record import RunRecord
from tikv_br.errors import BackupDamaged, BackupPathInUse, CrypterMismatch, ResumeRefused, StorageError
from tikv_br.progress_events import Notice
from tikv_br.storage.base import exists
from tikv_br.storage.open import open_store

THREADS = 16
"""Small reads under way at once."""

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
        context.writer.discard(context.lease.check)
        context.path_state = PathState.FREE
    if context.path_state is PathState.FREE:
        context.owns_work = True
        _put_lock(context)


def find_earlier_work(context: BackupContext) -> None:
    """Go on from what an earlier run at the path has done, if it was to make the same backup. Raises `ResumeRefused`."""
    if context.path_state is PathState.FREE:
        return
    begun = _begun(context)
    if begun is None and exists(context.store, layout.META):  # its run has just tidied up
        raise BackupPathInUse(f"{context.store.location} holds a backup already")
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
    if not context.has_earlier_work:
        context.confirm_held()
        run_record.write(context.store, this_run(context))


def tidy_up(context: BackupContext) -> None:
    """Give the path back. The backup is complete: what cannot be removed is an untidiness, not a failure."""
    if context.lease is not None:
        context.lease.give_back()
        context.lease = None
    try:
        run_record.remove(context.store)  # last: while it is there, a run that is killed here is gone on with
    except StorageError as error:
        log.warning("some leftovers of the backup stay in the storage: %s", error.message)


def give_path_back(context: BackupContext) -> None:
    """Leave done work for the next run, or, where there is none or it is spoiled, remove all. A backup stays as it is."""
    if context.lease is None:
        return
    with context.lease:  # which is over also where the storage fails again
        if context.owns_work and not keeps_work(context) and context.still_holds():
            context.writer.discard(context.lease.check)


def keeps_work(context: BackupContext) -> bool:
    """Whether what this run has done can be gone on with by the next, now that it fails."""
    if context.kept is None:
        context.kept = context.owns_work and not context.spoiled and _may_be_done(context)
    return context.kept


def _may_be_done(context: BackupContext) -> bool:
    """Whether there is any work to keep. A storage that does not tell, perhaps why the run fails, is left as it is."""
    try:
        return exists(context.store, layout.META) or any(context.store.list(layout.LEDGER))
    except StorageError:
        return True


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


def _begun(context: BackupContext) -> RunRecord | None:
    """The run that was broken off. Raises `ResumeRefused` where its record is damaged."""
    try:
        return run_record.read(context.store)
    except BackupDamaged as error:
        place = context.store.location
        raise ResumeRefused(f"the unfinished run at {place} cannot be gone on with: {error.message}") from None


def _take_over(context: BackupContext, begun: RunRecord) -> None:
    """Take the sound part of the ledger for ours; what else there is goes."""
    store = context.store
    try:
        entries = [entry for entry in ledger.read_entries(store) if entry.run == begun.run_id]
    except (BackupDamaged, CrypterMismatch) as error:  # the key is right: it has read the record of the run
        raise ResumeRefused(f"the unfinished run at {store.location} cannot be gone on with: {error.message}") from None
    found = ledger.sound(entries, {info.name: info.size for info in store.list()})
    context.entries = _as_written(context, found)
    context.resumed = len(context.entries)
    context.reporter(Notice(f"going on with run {begun.run_id}: {context.resumed} intervals are done already"))
    if not context.options.dry_run:
        context.confirm_held()
        ledger.remove_entries(store, but=context.entries)
        context.writer.remove_files_but({file.name for entry in context.entries for file in entry.files})


def _as_written(context: BackupContext, entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """The entries whose files are still those that were written, by length, end and the storage's mark; others are done again."""

    def check(entry: LedgerEntry) -> str:
        try:
            for file in entry.files:
                verify_file_identity(context.store, file)
        except BackupDamaged as error:
            return error.message
        return ""

    with ThreadPoolExecutor(THREADS, thread_name_prefix="resume") as pool:
        problems = list(pool.map(check, entries))
    for problem in filter(None, problems):
        context.reporter(Notice(f"done again: {problem}"))
    return [entry for entry, problem in zip(entries, problems, strict=True) if not problem]
