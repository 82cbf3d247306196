"""The path of a backup: acquires its lock, resumes an unfinished run, and releases the lock at the end."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import asdict, replace

from tikv_br import __version__
from tikv_br.backupset import layout, lease, ledger, run_record
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.backup_writer import BackupWriter
from tikv_br.backupset.coverage import keyspaces_in
from tikv_br.backupset.identity import verify_file_identity
from tikv_br.backupset.index import place_of
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry
from tikv_br.backupset.manifest import Description
from tikv_br.backupset.run_record import PathState, RunRecord
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.dataflow.context import BackupContext
from tikv_br.errors import BackupDamaged, BackupPathInUse, CrypterMismatch, ResumeRefused, StorageError
from tikv_br.progress_events import Notice
from tikv_br.report.facts import counted
from tikv_br.resume_options import chosen
from tikv_br.storage.base import exists
from tikv_br.storage.open import open_store


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
    context.path_state = run_record.path_state(context.store)
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
    context.path_state = run_record.path_state(context.store)
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
    if differences := run_record.differences(unfinished, describe_run(context)):
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
        run_record.mark_path(context.store)
    except BackupPathInUse:
        if run_record.path_state(context.store) is not PathState.UNFINISHED:
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
        return run_record.read_run(context.store)
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
