"""The objects by which the same command resumes an unfinished restore.

They are in ``tikv-br/restore/<id>/`` of the backup, or below ``--state``. The id is derived from the backup, the cluster and the
rewrite of keys. ``begun.json``, the checkpoint, is written before the first change. An entry for each part is written when all its
regions have the part. At the end the checkpoint is updated to list all parts, the entries are deleted, and the checkpoint is
deleted last. Entries without a checkpoint are ignored. ``import-mode-<cluster>/<id>.json`` exists while a restore needs import mode,
and a lease in ``lease-<id>/`` while the restore runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct, structs

from tikv_br.backupset import layout, lease
from tikv_br.backupset.lease import newest
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.errors import BackupDamaged, StorageObjectMissing, StorageUnreachable
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.records import Later, Milliseconds
from tikv_br.retry import STORAGE_UNREACHABLE, RetryPolicy
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store

THREADS = 16
LAST_DELETION = RetryPolicy(max_tries=6, error=None)
"""Retries of a restore's last deletion: at most 3 s of pauses, in addition to the storage's own patience."""
_CHECKPOINT = "begun.json"
_LEASE = "lease-"

log = logging.getLogger(__name__)


class RestoreCheckpoint(Struct, frozen=True):
    """The restore checkpoint, saved before the first change of the target."""

    cluster_id: int
    empty: tuple[KeyRange, ...]
    """RPC ranges of the target that held no key then; none with --allow-overwrite."""
    started_ms: Milliseconds
    """Milliseconds since the epoch."""
    restamp_ts: int = 0
    """The new timestamp of ingested rows; 0 = they keep their own."""
    restored: tuple[KeyRange, ...] = ()
    """Restored key ranges, RPC keys as in the backup's files; empty until the restore is complete."""
    record: str = ""
    """Id of the `RestoreRecord` that contains the checkpoint."""
    options: Later[tuple[str, ...] | None] = None
    """The options that a resumed restore must share, by `resume_options.chosen`; None = not recorded."""
    secret: Later[str] = ""
    """That of the restore's `tikv_br.cluster.marks.Mark` in the target, without which no restore is resumed; empty = it has none."""


class ImportModeRecord(Struct, frozen=True):
    """The temporary changes of a restore to a cluster, besides the stores' import mode."""

    schedulers: tuple[str, ...]
    """Paused schedulers of PD."""


class RestoreRecord(Struct, frozen=True):
    """The objects of one restore, identified by backup, cluster and rewrite. Picklable."""

    store: ObjectStore
    id: str

    @classmethod
    def of(
        cls, store: ObjectStore, cluster_id: int, backupmeta: bytes, rewrites: Iterable[tuple[bytes, bytes]]
    ) -> RestoreRecord:
        """The record of a restore of the backup with this `backupmeta` into this cluster; ``rewrites`` are old and new prefixes."""
        prefixes = [(old.hex(), new.hex()) for old, new in rewrites]
        identity = json.dumps([cluster_id, hashlib.sha256(backupmeta).hexdigest(), prefixes])
        return cls(store, hashlib.sha256(identity.encode()).hexdigest()[:16])

    def lease_store(self) -> ObjectStore:
        """The folder of the restore's lease."""
        return open_store(self.store.location.child(f"{layout.RESTORE}/{_LEASE}{self.id}"))

    def sweep_lease(self) -> None:
        """Remove the empty folder of a released lease. Raises `StorageError`."""
        self.store.delete(f"{layout.RESTORE}/{_LEASE}{self.id}/gone")  # deletions also remove empty parent folders

    def read_checkpoint(self) -> RestoreCheckpoint | None:
        """The checkpoint of the unfinished restore, or None. Raises `BackupDamaged`."""
        name = self._name(_CHECKPOINT)
        try:
            found = read_record(self.store, RestoreCheckpoint, name)
        except StorageObjectMissing:
            return None
        if found.record != self.id:
            raise BackupDamaged(f"{name} is damaged: it belongs to another restore")
        return found

    def create_checkpoint(self, checkpoint: RestoreCheckpoint) -> None:
        """Save the checkpoint of a new restore, after removing the objects of an older one. Raises `StorageError`."""
        _delete(self.store, [self._name(_CHECKPOINT)])
        _delete(self.store, self._names())
        self.update_checkpoint(checkpoint)

    def update_checkpoint(self, checkpoint: RestoreCheckpoint) -> None:
        """Update the checkpoint of a resumed restore. Raises `StorageError`."""
        write_record(self.store, self._name(_CHECKPOINT), structs.replace(checkpoint, record=self.id))

    def forget_parts(self, checkpoint: RestoreCheckpoint) -> None:
        """Record that nothing is restored, and no option chosen: the next run does all of it again. Raises `StorageError`."""
        self.update_checkpoint(structs.replace(checkpoint, restored=(), options=None))
        _delete(self.store, [name for name in self._names() if name != self._name(_CHECKPOINT)])

    def add(self, span: KeyRange) -> None:
        """Record that ``span`` is restored, RPC keys as in the backup's files."""
        write_record(self.store, self._part(span), span)

    def restored_ranges(self, checkpoint: RestoreCheckpoint) -> list[KeyRange]:
        """The restored key ranges, in any order. Raises `BackupDamaged` if an entry cannot be read."""
        names = [name for name in self._names() if name != self._name(_CHECKPOINT)]
        with ThreadPoolExecutor(THREADS, thread_name_prefix="record") as pool:
            return [*checkpoint.restored, *pool.map(self._read_part, names)]

    def complete(self, checkpoint: RestoreCheckpoint, spans: Iterable[KeyRange]) -> None:
        """Delete all objects of a complete restore of ``spans``. Raises `StorageError`.

        The last deletion is retried for longer: if it took effect and this command failed all the same, the next run would find a
        target with data and no checkpoint.
        """
        self.update_checkpoint(structs.replace(checkpoint, restored=tuple(spans)))
        _delete(self.store, [name for name in self._names() if name != self._name(_CHECKPOINT)])
        self.store.sweep(f"{layout.RESTORE}/{self.id}", deep=True)
        self._delete_checkpoint()  # last: everything else may fail before

    def _delete_checkpoint(self) -> None:
        name = self._name(_CHECKPOINT)
        LAST_DELETION.run("delete", lambda: self.store.delete(name), STORAGE_UNREACHABLE, StorageUnreachable)

    def add_import_mode(self, cluster_id: int, changes: ImportModeRecord) -> None:
        """Record the changes that are about to be made to a cluster. Raises `StorageError`."""
        write_record(self.store, f"{layout.import_mode_folder(cluster_id)}/{self.id}.json", changes)

    def remove_import_mode(self, cluster_id: int) -> None:
        """Remove the record of changes: they are undone, or another restore will undo them. Idempotent."""
        self.store.delete(f"{layout.import_mode_folder(cluster_id)}/{self.id}.json")

    @property
    def is_running(self) -> bool:
        """Return whether a restore may hold the lease; True if it cannot be read."""
        try:
            return not newest(self.lease_store()).is_free
        except BackupDamaged:
            return True

    def _names(self) -> list[str]:
        return [info.name for info in self.store.list(f"{layout.RESTORE}/{self.id}")]

    def _read_part(self, name: str) -> KeyRange:
        span = read_record(self.store, KeyRange, name)
        if name != self._part(span):
            raise BackupDamaged(f"{name} is damaged: it belongs to {span}")
        return span

    def _part(self, span: KeyRange) -> str:
        return self._name(f"{layout.interval_id(span)}.json")

    def _name(self, last: str) -> str:
        return f"{layout.RESTORE}/{self.id}/{last}"


def import_mode_records(store: ObjectStore, cluster_id: int) -> dict[str, ImportModeRecord]:
    """The changes of a backup's restores to a cluster that are not undone, by restore id. Raises `StorageError`.

    A record that cannot be read counts as one without schedulers: PD resumes paused schedulers after a while.
    """
    found: dict[str, ImportModeRecord] = {}
    for info in store.list(layout.import_mode_folder(cluster_id)):
        restore_id = info.name.rpartition("/")[2].removesuffix(".json")
        try:
            found[restore_id] = read_record(store, ImportModeRecord, info.name)
        except StorageObjectMissing:  # undone since
            continue
        except BackupDamaged as error:
            log.warning("cannot find out which schedulers a restore has paused: %s", error.message)
            found[restore_id] = ImportModeRecord(())
    return found


def schedulers_of(left: Mapping[str, ImportModeRecord]) -> set[str]:
    """All schedulers that these restores have paused."""
    return {name for paused in left.values() for name in paused.schedulers}


def check_none_running(store: ObjectStore) -> None:
    """Raise `LeaseHeld` while any restore of a backup is running."""
    names = [info.name.removeprefix(f"{layout.RESTORE}/") for info in store.list(layout.RESTORE)]
    for folder in {name.partition("/")[0] for name in names if name.startswith(_LEASE)}:
        lease.check_free(open_store(store.location.child(f"{layout.RESTORE}/{folder}")))


def restore_ids(store: ObjectStore) -> set[str]:
    """The ids of all unfinished restores of a backup. Raises `StorageError`."""
    names = (info.name.removeprefix(f"{layout.RESTORE}/") for info in store.list(layout.RESTORE))
    return {name.partition("/")[0].removeprefix(_LEASE) for name in names}


def remove_all(store: ObjectStore) -> int:
    """Delete the records of all unfinished restores of a backup; returns their number.

    Restored rows stay in their clusters. Idempotent. Raises `LeaseHeld` while one of the restores is running.
    """
    check_none_running(store)
    names = [info.name for info in store.list(layout.RESTORE)]
    checkpoints = [name for name in names if name.endswith(f"/{_CHECKPOINT}")]
    _delete(store, checkpoints)
    _delete(store, names)
    return len(checkpoints)


def _delete(store: ObjectStore, names: list[str]) -> None:
    with ThreadPoolExecutor(THREADS, thread_name_prefix="record") as pool:
        list(pool.map(store.delete, names))
