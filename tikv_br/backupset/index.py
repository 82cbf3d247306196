"""The index of the backups below one root: small objects in a folder of its own, so that no bucket is ever listed.

| object in ``tikv-br-index/`` | |
|---|---|
| ``entries/<id>.json`` | one a backup, written after its ``backupmeta``; these are the index |
| ``pins/<id>`` | its backup is never pruned |
| ``removals/<id>.json`` | its backup is being removed: see `tikv_br.backupset.removal` |
| ``snapshot.json`` | a copy of entries, to be read instead of each; nothing depends on it |

No writer ever changes what another wrote: whatever runs at the same time, no entry is lost, and no lock is needed. Entries
that a snapshot lacks are read one by one; what it has and the folder has not is gone. A backup is never made by its entry,
nor lost for want of one: `tikv_br.backupset.rebuild` makes the index anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.backupset import index_entry, layout, sealed_json
from tikv_br.backupset.index_entry import IndexEntry
from tikv_br.errors import BackupNotFound, BackupSetError, StorageError, StorageObjectMissing, UsageError
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from tikv_br.backupset.manifest import Manifest

FOLDER = "tikv-br-index"
ENTRIES = f"{FOLDER}/entries"
PINS = f"{FOLDER}/pins"
REMOVALS = f"{FOLDER}/removals"
SNAPSHOT = f"{FOLDER}/snapshot.json"
THREADS = 16
"""Small requests under way at once."""

ABANDONED_SECONDS = 3600.0
"""After which a small object that is still being written belongs to nobody."""

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a backup lies, seen from the index that lists it."""

    root: StorageLocation
    path: str


@dataclass(frozen=True, slots=True)
class Listed:
    """A backup in the index."""

    entry: IndexEntry
    pinned: bool = False
    removing: bool = False
    """Its removal has begun: it may be a backup no more."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    entries: tuple[IndexEntry, ...]


class _Names(NamedTuple):
    """What a listing of the folder shows, as ids."""

    entries: frozenset[str]
    pins: frozenset[str]
    removals: frozenset[str]
    has_snapshot: bool


class Index:
    """The index at a root. Every method may raise `StorageError`."""

    def __init__(self, root: ObjectStore) -> None:
        self.root = root

    def read(self) -> list[Listed]:
        """All backups, newest first: one listing of the index's folder and one object, if the snapshot is complete.

        An entry that does not read is left out, with a warning.
        """
        names = self._names()
        listed = [
            Listed(entry, entry.id in names.pins, entry.id in names.removals)
            for entry in _newest_of_each_path(self._entries(names))
        ]
        return sorted(listed, key=lambda each: (-each.entry.finished_ms, each.entry.path))

    def find(self, prefix: str) -> Listed:
        """The one backup whose id begins so. Raises `BackupNotFound`, or `UsageError` when there are several."""
        return choose(self.read(), prefix, self.root)

    def add(self, entry: IndexEntry) -> None:
        """Enter a complete backup. An entry of an earlier backup at its path goes."""
        self.root.put(entry_name(entry.id), index_entry.dump(entry))
        there = self._entries(self._names())
        for ghost in there:
            if ghost.path == entry.path and ghost.id != entry.id:
                self.forget(ghost.id)
        self.write_snapshot(other for other in there if other.path != entry.path or other.id == entry.id)

    def forget(self, entry_id: str) -> None:
        """Take an entry and its pin out; the backup itself is not touched. Idempotent."""
        self.root.delete(pin_name(entry_id))
        self.root.delete(entry_name(entry_id))

    def refresh(self) -> None:
        """Write the snapshot anew."""
        self.write_snapshot(self._entries(self._names()))

    def write_snapshot(self, entries: Iterable[IndexEntry]) -> None:
        """Write the copy that `read` starts from. What it lacks or has too much does no harm."""
        ordered = tuple(sorted(entries, key=lambda entry: entry.id))
        self.root.put(SNAPSHOT, sealed_json.dump(_Snapshot(ordered)))
        self.root.sweep(FOLDER, deep=True, older_than=ABANDONED_SECONDS)

    def pin(self, entry: IndexEntry) -> None:
        """Keep the backup from being pruned. Idempotent. Raises `BackupNotFound` when it is gone or just going."""
        self.root.put(pin_name(entry.id), b"")
        # A removal writes its mark and then looks for the pin: of the two, one at least sees the other.
        if exists(self.root, removal_name(entry.id)):
            self.root.delete(pin_name(entry.id))
            raise BackupNotFound(f"backup {entry.id} is being removed")
        if not self.is_backup(entry):
            self.root.delete(pin_name(entry.id))
            raise BackupNotFound(f"no finished backup at {self.store_of(entry.path).location}")

    def unpin(self, entry: IndexEntry) -> None:
        """Let the backup be pruned again. Idempotent."""
        self.root.delete(pin_name(entry.id))

    def store_of(self, path: str) -> ObjectStore:
        """The store at a backup's own path."""
        return open_store(self.root.location.child(path))

    def is_backup(self, entry: IndexEntry) -> bool:
        """Whether a finished backup lies where the entry says."""
        return exists(self.root, f"{entry.path}/{layout.META}")

    def ids(self) -> frozenset[str]:
        """The ids of all entries, none of them read."""
        return self._names().entries

    def removal_ids(self) -> list[str]:
        """The ids of backups whose removal has begun."""
        return sorted(self._names().removals)

    def _names(self) -> _Names:
        found: dict[str, set[str]] = {ENTRIES: set(), PINS: set(), REMOVALS: set(), FOLDER: set()}
        for info in self.root.list(FOLDER):
            folder, _slash, name = info.name.rpartition("/")
            if folder in found:
                found[folder].add(name.removesuffix(".json"))
        return _Names(
            entries=frozenset(found[ENTRIES]),
            pins=frozenset(found[PINS]),
            removals=frozenset(found[REMOVALS]),
            has_snapshot=PurePosixPath(SNAPSHOT).stem in found[FOLDER],
        )

    def _entries(self, names: _Names) -> list[IndexEntry]:
        """Every entry that is there: from the snapshot where it has it, else by itself."""
        copied = self._snapshot() if names.has_snapshot and names.entries else {}
        single = sorted(names.entries - copied.keys())
        with ThreadPoolExecutor(THREADS, thread_name_prefix="index") as pool:
            read = [entry for entry in pool.map(self.entry, single) if entry is not None]
        return [entry for entry in copied.values() if entry.id in names.entries] + read

    def _snapshot(self) -> dict[str, IndexEntry]:
        try:
            snapshot = sealed_json.load(_Snapshot, self.root.get(SNAPSHOT), SNAPSHOT)
            return {entry.id: index_entry.checked(entry, SNAPSHOT) for entry in snapshot.entries}
        except (BackupSetError, StorageObjectMissing) as error:
            log.warning("the index's entries are read one by one: %s", error.message)
            return {}

    def entry(self, entry_id: str) -> IndexEntry | None:
        """One entry read by itself; None when it is gone, or does not read, which is warned of."""
        name = entry_name(entry_id)
        try:
            entry = index_entry.load(self.root.get(name), name)
            index_entry.check_id(entry, entry_id, name)
        except StorageObjectMissing:
            return None
        except BackupSetError as error:
            log.warning("a backup may be missing from the list, until `tikv-br list --rebuild`: %s", error.message)
            return None
        return entry


def place_of(location: StorageLocation) -> Place | None:
    """Root and path of the backup at ``location``: the folder it lies in, and its name there. None for a top itself."""
    folder, _slash, name = location.path.rpartition("/")
    if not name:
        return None
    if location.scheme == "local":
        folder = folder or "/"
    return Place(replace(location, path=folder), name)


def enter(location: StorageLocation, made: Manifest) -> None:
    """Enter a backup that was just committed. It is complete without: what goes wrong is a warning, not a failure."""
    place = place_of(location)
    if place is None:
        log.warning("the backup lies at the top of its storage, where no index can list it")
        return
    try:
        Index(open_store(place.root)).add(index_entry.entry_of(place.path, made))
    except StorageError as error:
        log.warning(
            "the backup is complete, but the index at %s does not list it until `tikv-br list --rebuild`: %s",
            place.root,
            error.message,
        )


def choose(listed: Sequence[Listed], prefix: str, root: ObjectStore) -> Listed:
    """See `Index.find`."""
    found = [each for each in listed if prefix and each.entry.id.startswith(prefix.lower())]
    if not found:
        raise BackupNotFound(
            f"the index at {root.location} has no backup {prefix!r}",
            hint="See `tikv-br list`; --storage names the folder that the backups lie in.",
        )
    if len(found) > 1:
        ids = ", ".join(each.entry.id for each in found[:4])
        raise UsageError(f"{prefix!r} begins the ids of {len(found)} backups: {ids}", hint="Write more of the id.")
    return found[0]


def entry_name(entry_id: str) -> str:
    """Name of an entry's object."""
    return f"{ENTRIES}/{entry_id}.json"


def pin_name(entry_id: str) -> str:
    """Name of the object that pins a backup."""
    return f"{PINS}/{entry_id}"


def removal_name(entry_id: str) -> str:
    """Name of the object that tells of a removal under way."""
    return f"{REMOVALS}/{entry_id}.json"


def _newest_of_each_path(entries: Iterable[IndexEntry]) -> list[IndexEntry]:
    """At a path there is one backup: the entry of an earlier one, removed by hand, is a ghost."""
    newest: dict[str, IndexEntry] = {}
    for entry in sorted(entries, key=lambda entry: (entry.finished_ms, entry.id)):
        newest[entry.path] = entry
    return list(newest.values())
