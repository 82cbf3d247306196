"""What an unfinished restore has done, as objects, so that the same command goes on where it ended.

They lie in ``tikv-br/restore/<id>/`` of the backup, or below ``--state``; the id is that of one backup going into one
cluster by one rewrite. ``begun.json`` is written before the first change; an entry for each part is written when all regions
have the part. At the end ``begun.json`` is told that all of it is in, the entries are deleted, and it is deleted last. Entries
without ``begun.json`` mean nothing. ``import-mode-<cluster>/<id>.json`` is there while a restore wants import mode, and a
lease in ``lease-<id>/`` while it is at work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tikv_br.backupset import layout, lease
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.encrypted import read_record, write_record
from tikv_br.errors import BackupDamaged, StorageObjectMissing, StorageUnreachable
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store

THREADS = 16
LAST_PAUSES = (0.1, 0.5, 1.0, 2.0)
"""Seconds between tries of a restore's last deletion."""
_BEGUN = "begun.json"
_LEASE = "lease-"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """What a restore found and decided before its first change."""

    cluster_id: int
    empty: tuple[KeyRange, ...]
    """RPC ranges of the target that held no key then; none where it was allowed to overwrite."""
    started_ms: int
    """Milliseconds since the epoch."""
    restamp_ts: int = 0
    """The timestamp that all rows get; 0 = they keep their own."""
    restored: tuple[KeyRange, ...] = ()
    """Spans that are in, RPC keys as in the backup's files; none until the restore is complete."""
    record: str = ""
    """Id of the record that it is written in."""


@dataclass(frozen=True, slots=True)
class Paused:
    """What a restore has changed in a cluster for its own time, besides the stores' import mode."""

    schedulers: tuple[str, ...]
    """Of PD, paused."""


@dataclass(frozen=True, slots=True)
class RestoreRecord:
    """The objects of one backup going into one cluster. Pickles with its store."""

    store: ObjectStore
    id: str

    @classmethod
    def of(
        cls, store: ObjectStore, cluster_id: int, backupmeta: bytes, rewrites: Iterable[tuple[bytes, bytes]]
    ) -> RestoreRecord:
        """The record of the backup with that `backupmeta` going into that cluster, by those prefixes, old and new."""
        prefixes = [(old.hex(), new.hex()) for old, new in rewrites]
        said = json.dumps([cluster_id, hashlib.sha256(backupmeta).hexdigest(), prefixes])
        return cls(store, hashlib.sha256(said.encode()).hexdigest()[:16])

    def lease_store(self) -> ObjectStore:
        """A place of its own for the lease of whoever restores."""
        return open_store(self.store.location.child(f"{layout.RESTORE}/{_LEASE}{self.id}"))

    def sweep_lease(self) -> None:
        """Remove the empty folder of a lease that is over. Raises `StorageError`."""
        self.store.delete(f"{layout.RESTORE}/{_LEASE}{self.id}/gone")  # a deletion takes empty directories along

    def begun(self) -> Begun | None:
        """What the unfinished restore wrote down; None when there is none. Raises `BackupDamaged`."""
        name = self._name(_BEGUN)
        try:
            found = read_record(self.store, Begun, name)
        except StorageObjectMissing:
            return None
        if found.record != self.id:
            raise BackupDamaged(f"{name} is damaged: it is of another restore")
        return found

    def begin(self, begun: Begun) -> None:
        """Write down that a restore begins anew: what another has left is removed. Raises `StorageError`."""
        _delete(self.store, [self._name(_BEGUN)])
        _delete(self.store, self._names())
        self.extend(begun)

    def extend(self, begun: Begun) -> None:
        """Write down more of an unfinished restore that goes on. Raises `StorageError`."""
        write_record(self.store, self._name(_BEGUN), replace(begun, record=self.id))

    def add(self, span: KeyRange) -> None:
        """Write down that the cluster has all rows of ``span``, RPC keys as in the backup's files."""
        write_record(self.store, self._part(span), span)

    def restored(self, begun: Begun) -> list[KeyRange]:
        """The spans that are in, in no order. Raises `BackupDamaged` when an entry does not read."""
        names = [name for name in self._names() if name != self._name(_BEGUN)]
        with ThreadPoolExecutor(THREADS, thread_name_prefix="record") as pool:
            return [*begun.restored, *pool.map(self._read_part, names)]

    def complete(self, begun: Begun, spans: Iterable[KeyRange]) -> None:
        """All of ``spans`` is in, and proven where that was asked for: delete everything. Raises `StorageError`.

        The last deletion is tried for longer: where it took effect and its answer got lost, nothing would tell the same command
        why the target is not empty.
        """
        self.extend(replace(begun, restored=tuple(spans)))
        _delete(self.store, [name for name in self._names() if name != self._name(_BEGUN)])
        self.store.sweep(f"{layout.RESTORE}/{self.id}", deep=True)
        self._delete_beginning()  # after anything else that may fail

    def _delete_beginning(self) -> None:
        for pause in LAST_PAUSES:
            try:
                return self.store.delete(self._name(_BEGUN))
            except StorageUnreachable:
                time.sleep(pause)
        return self.store.delete(self._name(_BEGUN))

    def pause(self, cluster_id: int, paused: Paused) -> None:
        """Write down what is about to be changed in a cluster. Raises `StorageError`."""
        write_record(self.store, f"{layout.import_mode_folder(cluster_id)}/{self.id}.json", paused)

    def resume(self, cluster_id: int) -> None:
        """It is put back, or others do that. Idempotent."""
        self.store.delete(f"{layout.import_mode_folder(cluster_id)}/{self.id}.json")

    @property
    def is_at_work(self) -> bool:
        """Whether a restore holds the lease; where a lease does not read, one may."""
        try:
            return not lease.newest(self.lease_store()).is_free
        except BackupDamaged:
            return True

    def _names(self) -> list[str]:
        return [info.name for info in self.store.list(f"{layout.RESTORE}/{self.id}")]

    def _read_part(self, name: str) -> KeyRange:
        span = read_record(self.store, KeyRange, name)
        if name != self._part(span):
            raise BackupDamaged(f"{name} is damaged: it is of {span}")
        return span

    def _part(self, span: KeyRange) -> str:
        return self._name(f"{layout.interval_id(span)}.json")

    def _name(self, last: str) -> str:
        return f"{layout.RESTORE}/{self.id}/{last}"


def paused_by(store: ObjectStore, cluster_id: int) -> dict[str, Paused]:
    """What restores of a backup have changed in a cluster and not put back, by their ids. Raises `StorageError`.

    Of a record that does not read it counts that there is one: paused schedulers go on by themselves.
    """
    found: dict[str, Paused] = {}
    for info in store.list(layout.import_mode_folder(cluster_id)):
        restore_id = info.name.rpartition("/")[2].removesuffix(".json")
        try:
            found[restore_id] = read_record(store, Paused, info.name)
        except StorageObjectMissing:  # put back since
            continue
        except BackupDamaged as error:
            log.warning("which schedulers of PD a restore has paused is not known: %s", error.message)
            found[restore_id] = Paused(())
    return found


def schedulers_of(left: Mapping[str, Paused]) -> set[str]:
    """All schedulers that any of them has paused."""
    return {name for paused in left.values() for name in paused.schedulers}


def check_none_at_work(store: ObjectStore) -> None:
    """Raise `LeaseHeld` while any restore of a backup is at work."""
    names = [info.name.removeprefix(f"{layout.RESTORE}/") for info in store.list(layout.RESTORE)]
    for folder in {name.partition("/")[0] for name in names if name.startswith(_LEASE)}:
        lease.check_free(open_store(store.location.child(f"{layout.RESTORE}/{folder}")))


def remove_all(store: ObjectStore) -> int:
    """Delete the records of every unfinished restore of a backup; returns how many restores that were.

    What they have restored stays in their clusters. Idempotent. Raises `LeaseHeld` while one of them is alive.
    """
    check_none_at_work(store)
    names = [info.name for info in store.list(layout.RESTORE)]
    begun = [name for name in names if name.endswith(f"/{_BEGUN}")]
    _delete(store, begun)
    _delete(store, names)
    return len(begun)


def _delete(store: ObjectStore, names: list[str]) -> None:
    with ThreadPoolExecutor(THREADS, thread_name_prefix="record") as pool:
        list(pool.map(store.delete, names))
