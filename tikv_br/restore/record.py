"""What an unfinished restore has done, as objects, so that the same command goes on where it ended.

They lie in ``tikv-br/restore/<id>/`` of the backup, or below ``--state``; the id is that of one backup going into one
cluster. ``begun.json`` is written before the first change; an entry for each part is written when all regions have the
part. At the end ``begun.json`` is told that all of it is in, the entries are deleted, and it is deleted last. Entries
without ``begun.json`` mean nothing. ``import-mode-<cluster>.json`` is there while stores are in import mode.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tikv_br.backupset import layout
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.encrypted import read_record, write_record
from tikv_br.errors import StorageObjectMissing
from tikv_br.storage.base import ObjectStore

THREADS = 16
_BEGUN = "begun.json"


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

    def begun(self) -> Begun | None:
        """What the unfinished restore wrote down; None when there is none. Raises `BackupDamaged`."""
        name = self._name(_BEGUN)
        try:
            return read_record(self.store, Begun, name)
        except StorageObjectMissing:
            return None

    def begin(self, begun: Begun) -> None:
        """Write down that a restore begins anew: what another has left is removed. Raises `StorageError`."""
        _delete(self.store, [self._name(_BEGUN)])
        _delete(self.store, self._names())
        self.extend(begun)

    def extend(self, begun: Begun) -> None:
        """Write down more of an unfinished restore that goes on. Raises `StorageError`."""
        write_record(self.store, self._name(_BEGUN), begun)

    def add(self, span: KeyRange) -> None:
        """Write down that the cluster has all rows of ``span``, RPC keys as in the backup's files."""
        write_record(self.store, self._name(f"{layout.interval_id(span)}.json"), span)

    def restored(self, begun: Begun) -> list[KeyRange]:
        """The spans that are in, in no order. Raises `BackupDamaged` when an entry does not read."""
        names = [name for name in self._names() if name != self._name(_BEGUN)]
        with ThreadPoolExecutor(THREADS, thread_name_prefix="record") as pool:
            added = pool.map(lambda name: read_record(self.store, KeyRange, name), names)
            return [*begun.restored, *added]

    def complete(self, begun: Begun, spans: Iterable[KeyRange]) -> None:
        """All of ``spans`` is in, and proven where that was asked for: delete everything. Raises `StorageError`."""
        self.extend(replace(begun, restored=tuple(spans)))
        _delete(self.store, [name for name in self._names() if name != self._name(_BEGUN)])
        _delete(self.store, [self._name(_BEGUN)])

    def pause(self, cluster_id: int, paused: Paused) -> None:
        """Write down what is about to be changed in a cluster. Raises `StorageError`."""
        write_record(self.store, layout.import_mode_name(cluster_id), paused)

    def paused(self, cluster_id: int) -> Paused | None:
        """What any restore of this backup has changed in a cluster and not put back. Raises `BackupDamaged`."""
        try:
            return read_record(self.store, Paused, layout.import_mode_name(cluster_id))
        except StorageObjectMissing:
            return None

    def resume(self, cluster_id: int) -> None:
        """It is put back. Idempotent."""
        self.store.delete(layout.import_mode_name(cluster_id))

    def _names(self) -> list[str]:
        return [info.name for info in self.store.list(f"{layout.RESTORE}/{self.id}")]

    def _name(self, last: str) -> str:
        return f"{layout.RESTORE}/{self.id}/{last}"


def remove_all(store: ObjectStore) -> int:
    """Delete the records of every unfinished restore of a backup; returns how many restores that were.

    What they have restored stays in their clusters. Idempotent.
    """
    names = [info.name for info in store.list(layout.RESTORE)]
    begun = [name for name in names if name.endswith(f"/{_BEGUN}")]
    _delete(store, begun)
    _delete(store, names)
    return len(begun)


def _delete(store: ObjectStore, names: list[str]) -> None:
    with ThreadPoolExecutor(THREADS, thread_name_prefix="record") as pool:
        list(pool.map(store.delete, names))
