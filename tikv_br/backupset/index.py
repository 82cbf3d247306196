"""The index of the backups in a folder: small objects in one folder, so that listing never walks the bucket.

One backup in the index: what is known of it, and its names in paths.

Rebuilds an index from the backups that are there.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from tikv_br import records
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import shown_keyspaces
from tikv_br.backupset.manifest import Manifest
from tikv_br.cancellation import run_on_threads
from tikv_br.cluster.timestamps import physical_ms, show_time, show_ts
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupSetError,
    BackupUnsupported,
    CrypterMismatch,
    StorageError,
    StorageObjectMissing,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.json_types import ApiLabel
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.records import Later
from tikv_br.storage.base import ObjectStore, check_name, exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from tikv_br.formats.keys.ranges import KeyRange


FOREIGN_ENGINE = "go"
"""Value of `IndexEntry.engine` for backups of the Go TiKV-BR."""
ID_SIZE = 16
_ID = re.compile(rf"[0-9a-f]{{{ID_SIZE}}}")


_DRILL_PATH = re.compile(r"(?:.*/)?drill-[0-9]{8}T[0-9]{6}-[0-9a-f]+")


class IndexEntry(Struct, frozen=True):
    """A complete backup. Times are milliseconds since the epoch, sizes bytes; 0 and ``""`` = not known (Go backups)."""

    id: str
    """16 hex digits, of the path and of the bytes of `backupmeta`: another backup at the same path has another id."""
    path: str
    """Path below the index's root."""
    engine: str
    """``scan``, ``store`` or `FOREIGN_ENGINE`."""
    file_format: str
    api_version: ApiLabel | None
    """API version of the source."""
    dst_api_version: ApiLabel
    """API version of the files."""
    cluster_id: int
    scope: str
    """A hash of cluster, version of the files and ranges: backups of one scope replace each other."""
    keyspaces: tuple[int, ...]
    backup_ts: int
    """Backup-ts; 0 = none."""
    parent: str
    """URL of the backup that this one continues, without credentials."""
    total_kvs: int
    total_bytes: int
    """Keys and values, before encoding and compression."""
    backup_size: int
    """Size of the files as stored, in bytes."""
    files: int
    started_ms: records.Milliseconds
    finished_ms: records.Milliseconds
    tool_version: str
    encryption: str
    """Value of `Crypter.method`."""
    key_mode: Later[KeyMode] = KeyMode.RAW
    keyspace_names: Later[tuple[str, ...]] = ()
    """As in `Description`."""

    @property
    def format_version(self) -> int:
        """As in `Manifest`: an older version leaves the entry out."""
        return 2 if self.key_mode is KeyMode.TXN else 1

    @property
    def shown_keyspaces(self) -> str:
        """The names of its keyspaces, or their ids."""
        return shown_keyspaces(self.keyspaces, self.keyspace_names)

    @property
    def is_foreign(self) -> bool:
        return self.engine == FOREIGN_ENGINE


def load(data: bytes, name: str) -> IndexEntry:
    """Read object ``name``. Raises `BackupDamaged`, or `BackupUnsupported` for a newer format."""
    return validated(records.load(IndexEntry, data, name), name)


def validated(entry: IndexEntry, name: str) -> IndexEntry:
    """The entry, if its id and path are valid: its path may be removed later. Raises `BackupDamaged`."""
    check_paths([entry.path], name)
    if not _ID.fullmatch(entry.id):
        raise BackupDamaged(f"{name} is damaged: {entry.id!r} is not a backup id")
    return entry


def check_paths(paths: Iterable[str], name: str) -> None:
    """Raise `BackupDamaged` if a path in object ``name`` is not below the root."""
    try:
        for path in paths:
            check_name(path)
    except StorageError as error:
        raise BackupDamaged(f"{name} is damaged: {error.message}") from None


def entry_of(path: str, made: Manifest) -> IndexEntry:
    """Return the entry of our backup at ``path``."""
    description, sums = made.description, made.statistics
    return IndexEntry(
        id=entry_id(path, made.backupmeta_sha256),
        path=check_name(path),
        engine=description.engine,
        file_format=description.file_format,
        api_version=description.api_version,
        dst_api_version=description.dst_api_version,
        cluster_id=description.cluster_id,
        scope=_scope(description.cluster_id, description.dst_api_version, description.ranges, description.key_mode),
        keyspaces=description.keyspaces,
        backup_ts=description.backup_ts,
        parent=description.parent,
        total_kvs=sums.total_kvs,
        total_bytes=sums.total_bytes,
        backup_size=sums.backup_size,
        files=len(made.files),
        started_ms=description.started_ms,
        finished_ms=sums.finished_ms,
        tool_version=description.tool_version,
        encryption=description.encryption,
        key_mode=description.key_mode,
        keyspace_names=description.keyspace_names,
    )


def entry_of_backup(path: str, backup: BackupSet, modified_ms: int) -> IndexEntry:
    """The entry of any backup. The Go tool records no time; ``modified_ms``, when `backupmeta` was written, stands for it."""
    if backup.manifest is not None:
        return entry_of(path, backup.manifest)
    sums, is_raw = backup.totals, backup.key_mode is KeyMode.RAW
    return IndexEntry(
        id=entry_id(path, hashlib.sha256(backup.store.get(layout.META)).digest()),
        path=check_name(path),
        engine=FOREIGN_ENGINE,
        file_format=backup.file_kind.value,
        api_version=None,
        dst_api_version=backup.api_version,
        cluster_id=backup.cluster_id,
        scope=_scope(backup.cluster_id, backup.api_version, backup.ranges if is_raw else (), backup.key_mode),
        keyspaces=(),
        backup_ts=backup.backup_ts,
        parent="",
        total_kvs=sums.total_kvs,
        total_bytes=sums.total_bytes,
        backup_size=sums.size,
        files=len(backup.files),
        started_ms=0,
        finished_ms=modified_ms,
        tool_version="",
        encryption=backup.encryption,
        key_mode=backup.key_mode,
    )


def is_drill_path(path: str) -> bool:
    """Return whether a drill has made the backup at a path."""
    return _DRILL_PATH.fullmatch(path) is not None


def is_of(entry: IndexEntry, backupmeta: bytes) -> bool:
    """Return whether an entry is about the backup with these bytes as `backupmeta`; needs no key."""
    return entry.id == entry_id(entry.path, hashlib.sha256(backupmeta).digest())


def entry_id(path: str, backupmeta_sha256: bytes) -> str:
    """The id of the backup at a path, by the hash of its `backupmeta`."""
    return hashlib.sha256(backupmeta_sha256 + path.encode()).hexdigest()[:ID_SIZE]


def _scope(cluster_id: int, api_version: ApiVersion, ranges: tuple[KeyRange, ...], mode: KeyMode) -> str:
    version = api_version.label if mode is KeyMode.RAW else f"{api_version.label} {mode.value}"
    text = f"{cluster_id} {version} " + " ".join(f"{part.start.hex()}-{part.end.hex()}" for part in ranges)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_SIZE]


FOLDER = layout.INDEX
ENTRIES = f"{FOLDER}/entries"
PINS = f"{FOLDER}/pins"
REMOVALS = f"{FOLDER}/removals"
SNAPSHOT = f"{FOLDER}/snapshot.json"
NEWEST = "newest"
"""Name of the newest backup, in place of an id."""
THREADS = 16
"""Small requests under way at once."""
ABANDONED_SECONDS = 3600.0
"""Seconds after which a small object that is still being written counts as abandoned."""
log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Location of a backup, relative to the index that lists it."""

    root: StorageLocation
    path: str


class ListedBackup(Struct, frozen=True):
    """A backup in the index."""

    entry: IndexEntry
    pinned: bool = False
    removing: bool = False
    """True once its removal has started: it may be incomplete."""


class _Snapshot(Struct, frozen=True):
    entries: tuple[IndexEntry, ...]

    @property
    def format_version(self) -> int:
        """The version of the newest entry."""
        return max((entry.format_version for entry in self.entries), default=1)


class _Names(NamedTuple):
    """The ids in a listing of the folder."""

    entries: frozenset[str]
    pins: frozenset[str]
    removals: frozenset[str]
    has_snapshot: bool


class Index:
    """The index at a root. Every method may raise `StorageError`."""

    def __init__(self, root: ObjectStore) -> None:
        self.root = root

    def read(self) -> list[ListedBackup]:
        """All backups, newest first: one listing of the index's folder and one object, if the snapshot is complete.

        An entry that does not read is left out, with a warning. Raises `BackupNotFound` if there is nothing at the root, and
        `UsageError` if the root is a backup itself.
        """
        names = self._names()
        if not names.entries:
            self._check_root()
        listed = [
            ListedBackup(entry, entry.id in names.pins, entry.id in names.removals)
            for entry in _newest_per_path(self._entries(names))
        ]
        return sorted(listed, key=lambda each: (-each.entry.finished_ms, each.entry.path))

    def _check_root(self) -> None:
        if exists(self.root, layout.META):
            raise UsageError(
                f"{self.root.location} is a backup, not a folder of backups",
                hint="Pass the folder that contains it; `tikv-br list` and `tikv-br show` also take the backup's own URL.",
            )
        if next(iter(self.root.list()), None) is None:
            raise BackupNotFound(f"there is nothing at {self.root.location}", hint="Check the URL.")

    def own_backup(self) -> ListedBackup | None:
        """The backup at the root itself, which the index of the folder above lists."""
        place = place_of(self.root.location)
        if place is None or self.ids() or not exists(self.root, layout.META):
            return None
        backup = BackupSet.open_any(self.root, key_mode=None)
        entry = entry_of_backup(place.path, backup, self.root.stat(layout.META).modified_ms)
        return ListedBackup(entry, exists(open_store(place.root), pin_name(entry.id)))

    def find(self, prefix: str, until_ts: int = 0) -> ListedBackup:
        """The one backup whose id begins so, or the ``newest``, with ``until_ts`` that which was complete at this timestamp.

        Raises `BackupNotFound`, or `UsageError` when there are several.
        """
        if prefix == NEWEST:
            return self._newest(until_ts)
        found = [each for each in self.read() if prefix and each.entry.id.startswith(prefix.lower())]
        if not found:
            raise BackupNotFound(
                f"the index at {self.root.location} has no backup {prefix!r}",
                hint="Run `tikv-br list`, and pass the folder that contains the backups.",
            )
        if len(found) > 1:
            ids = ", ".join(each.entry.id for each in found[:4])
            raise UsageError(f"{prefix!r} matches {len(found)} backups: {ids}", hint="Pass more digits of the id.")
        return found[0]

    def find_path(self, path: str) -> ListedBackup:
        """The backup at a path below the root. Raises `BackupNotFound`."""
        for each in self.read():
            if each.entry.path == path:
                return each
        raise BackupNotFound(
            f"the index at {self.root.location} has no backup at {path}",
            hint="`tikv-br list --rebuild` adds a complete backup to the index; `tikv-br backup abort` removes an unfinished one.",
        )

    def _newest(self, until_ts: int) -> ListedBackup:
        """The newest backup. Raises `BackupNotFound`, and `UsageError` if there are backups of several clusters, kinds or ranges."""
        found = [each for each in self.read() if not each.removing]
        if not found:
            raise BackupNotFound(f"the index at {self.root.location} lists no backup", hint="Check the URL.")
        scopes = {each.entry.scope: each.entry for each in reversed(found)}
        if len(scopes) > 1:
            newest = ", ".join(f"{entry.id} ({entry.path}, {entry.key_mode})" for entry in scopes.values())
            raise UsageError(
                f"{self.root.location} has backups of several clusters, kinds or ranges; the newest of each are {newest}",
                hint="Pass the id of one instead of newest.",
            )
        until_ms = physical_ms(until_ts)
        chosen = next((each for each in found if not until_ts or 0 < each.entry.finished_ms <= until_ms), None)
        if chosen is None:
            oldest = found[-1].entry
            raise BackupNotFound(
                f"{self.root.location} has no backup from before {show_ts(until_ts)}: the oldest, {oldest.path}, was complete at "
                f"{show_time(oldest.finished_ms)}",
                hint="Pass a later time, or the URL of an older backup.",
            )
        return chosen

    def location_of(self, prefix: str, until_ts: int = 0) -> StorageLocation:
        """The place of the backup that `find` finds."""
        return self.store_of(self.find(prefix, until_ts).entry.path).location

    def add(self, entry: IndexEntry) -> None:
        """Add a complete backup, and remove the entry of an earlier one at its path."""
        self.root.put(entry_name(entry.id), records.dump(entry))
        there = self._entries(self._names())
        for ghost in there:
            if ghost.path == entry.path and ghost.id != entry.id:
                self.root.delete(entry_name(ghost.id))  # not its pin: the entry may lie about its path
        self.write_snapshot(other for other in there if other.path != entry.path or other.id == entry.id)

    def remove_entry(self, entry_id: str) -> None:
        """Remove an entry, its pin, and last the mark of its removal; the backup itself is not touched. Idempotent."""
        self.root.delete(pin_name(entry_id))
        self.root.delete(entry_name(entry_id))
        self.root.delete(removal_name(entry_id))

    def refresh(self) -> None:
        """Write the snapshot, and remove marks of removals without an entry, which nobody follows."""
        names = self._names()
        for stale in names.removals - names.entries:
            self.root.delete(removal_name(stale))
        self.write_snapshot(self._entries(names))

    def write_snapshot(self, entries: Iterable[IndexEntry]) -> None:
        """Write the copy that `read` starts from; missing or surplus entries do no harm."""
        ordered = tuple(sorted(entries, key=lambda entry: entry.id))
        self.root.put(SNAPSHOT, records.dump(_Snapshot(ordered)))
        self.root.sweep(FOLDER, deep=True, older_than=ABANDONED_SECONDS)

    def pin(self, entry: IndexEntry) -> None:
        """Protect the backup from `prune`. Idempotent. Raises `BackupNotFound` if it is removed or being removed."""
        self.root.put(pin_name(entry.id), b"")
        # A removal writes its mark and then looks for the pin: of the two, one at least sees the other.
        if exists(self.root, removal_name(entry.id)):
            self.root.delete(pin_name(entry.id))
            raise BackupNotFound(f"backup {entry.id} is being removed")
        if not self.is_backup(entry):
            self.root.delete(pin_name(entry.id))
            raise BackupNotFound(f"no complete backup at {self.store_of(entry.path).location}")

    def unpin(self, entry: IndexEntry) -> None:
        """Allow `prune` to remove the backup again. Idempotent."""
        self.root.delete(pin_name(entry.id))

    def store_of(self, path: str) -> ObjectStore:
        return open_store(self.root.location.child(path))

    def is_backup(self, entry: IndexEntry) -> bool:
        """Return whether a finished backup is at the entry's location."""
        return exists(self.root, f"{entry.path}/{layout.META}")

    def ids(self) -> frozenset[str]:
        """The ids of all entries, none of them read."""
        return self._names().entries

    def removal_ids(self) -> frozenset[str]:
        """The ids of the backups whose removal has begun."""
        return self._names().removals

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
        """All existing entries: from the snapshot, the others one by one."""
        copied = self._snapshot() if names.has_snapshot and names.entries else {}
        single = sorted(names.entries - copied.keys())
        read = [entry for entry in run_on_threads(self.entry, single, THREADS, "index") if entry is not None]
        return [entry for entry in copied.values() if entry.id in names.entries] + read

    def _snapshot(self) -> dict[str, IndexEntry]:
        try:
            snapshot = records.load(_Snapshot, self.root.get(SNAPSHOT), SNAPSHOT)
            return {entry.id: validated(entry, SNAPSHOT) for entry in snapshot.entries}
        except (BackupSetError, StorageObjectMissing) as error:
            log.warning("cannot use the index snapshot, reading the entries one by one: %s", error.message)
            return {}

    def entry(self, entry_id: str) -> IndexEntry | None:
        """One entry; None if it is gone or, with a warning, cannot be read."""
        name = entry_name(entry_id)
        try:
            entry = load(self.root.get(name), name)
            if entry.id != entry_id:
                raise BackupDamaged(f"{name} is damaged: it holds the entry of {entry.id}")
        except StorageObjectMissing:
            return None
        except BackupSetError as error:
            log.warning(
                "cannot read an index entry, so the list may lack a backup; run `tikv-br list --rebuild`: %s",
                error.message,
            )
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


def add_to_index(location: StorageLocation, made: Manifest) -> int:
    """Add a backup that was just committed. Errors are only logged: the backup is complete without an entry.

    Returns the rows of the full backup before it, if it has less than half of them (`shrunk`); else 0.
    """
    place = place_of(location)
    if place is None:
        log.warning("the backup is at the root of its storage, where no index can list it")
        return 0
    try:
        index, entry = Index(open_store(place.root)), entry_of(place.path, made)
        index.add(entry)
        return shrunk(each.entry for each in index.read()).get(entry.id, 0)
    except (StorageError, BackupSetError) as error:
        log.warning(
            "the backup is complete, but cannot be added to the index at %s; run `tikv-br list --rebuild`: %s",
            place.root,
            error.message,
        )
        return 0


def shrunk(listed: Iterable[IndexEntry]) -> dict[str, int]:
    """Full backups with less than half of the rows of the one before them, of the same cluster and ranges: that one's rows by their ids."""
    found: dict[str, int] = {}
    last: dict[str, int] = {}
    for each in sorted(listed, key=lambda each: each.finished_ms):
        if each.parent or is_drill_path(each.path):
            continue
        if 2 * each.total_kvs < last.get(each.scope, 0):
            found[each.id] = last[each.scope]
        last[each.scope] = each.total_kvs
    return found


def entry_name(entry_id: str) -> str:
    return f"{ENTRIES}/{entry_id}.json"


def pin_name(entry_id: str) -> str:
    """Name of the object that pins a backup."""
    return f"{PINS}/{entry_id}"


def removal_name(entry_id: str) -> str:
    """Name of the object that marks a removal in progress."""
    return f"{REMOVALS}/{entry_id}.json"


def _newest_per_path(entries: Iterable[IndexEntry]) -> list[IndexEntry]:
    """Return the newest entry of each path: entries of earlier backups, removed by hand, have no backup."""
    newest: dict[str, IndexEntry] = {}
    for entry in sorted(entries, key=lambda entry: (entry.finished_ms, entry.id)):
        newest[entry.path] = entry
    return list(newest.values())


class Problem(NamedTuple):
    """A path with a `backupmeta` that could not be added."""

    path: str
    error: BackupDamaged | BackupUnsupported | CrypterMismatch | StorageError


class RebuildSummary(NamedTuple):
    """Result of a rebuild."""

    found: int
    """Backups in the index now."""
    added: int
    dropped: int
    """Entries without a backup."""
    problems: tuple[Problem, ...]


def rebuild(index: Index) -> RebuildSummary:
    """List the root once, add every complete backup, and remove entries without one.

    Backups that finish at the same time keep the entries that they write; a damaged backup keeps the one it has.
    """
    known = {
        entry_id: index.entry(entry_id) for entry_id in index.ids()
    }  # before the listing: later ones are not touched
    removals = index.removal_ids()
    found, problems = backups_below(index)
    for entry in found.values():
        if known.get(entry.id) != entry:
            index.root.put(entry_name(entry.id), records.dump(entry))
    # An entry whose removal was interrupted stays: without it, no prune would finish the removal.
    stale = [
        entry_id
        for entry_id, entry in known.items()
        if _is_stale(index, entry_id, entry, found, problems) and (entry is None or entry_id not in removals)
    ]
    for entry_id in {*stale, *(removals - known.keys() - found.keys())}:
        index.remove_entry(entry_id)
    index.write_snapshot(found.values())
    return RebuildSummary(len(found), len(found.keys() - known.keys()), len(stale), tuple(problems))


def backups_below(index: Index, but: AbstractSet[str] = frozenset()) -> tuple[dict[str, IndexEntry], list[Problem]]:
    """The entries of all backups below the root by id, but those at some paths, and the places that cannot be entered.

    Lists every object there, and opens the backups: the index is not believed.
    """
    ending = f"/{layout.META}"  # a `backupmeta` at the root itself belongs to the folder above
    listed = ((info.name.removesuffix(ending), info) for info in index.root.list() if info.name.endswith(ending))
    metas = {path: info for path, info in listed if path not in but}

    def examine(path: str) -> IndexEntry | Problem | None:
        try:
            backup = BackupSet.open_any(index.store_of(check_name(path)), key_mode=None)
            return entry_of_backup(path, backup, metas[path].modified_ms)
        except BackupNotFound:  # just removed
            return None
        except (BackupDamaged, BackupUnsupported, CrypterMismatch, StorageError) as error:
            return Problem(path, error)

    results = run_on_threads(examine, sorted(metas), THREADS, "rebuild")
    entries = {result.id: result for result in results if isinstance(result, IndexEntry)}
    return entries, [result for result in results if isinstance(result, Problem)]


def _is_stale(
    index: Index, entry_id: str, entry: IndexEntry | None, found: Mapping[str, IndexEntry], problems: list[Problem]
) -> bool:
    """Return whether an entry has no backup. An unreadable entry is stale: if its backup exists, it has been found."""
    if entry_id in found:
        return False
    if entry is None:
        return True
    if any(problem.path == entry.path for problem in problems):
        return False
    return entry.path in {other.path for other in found.values()} or not index.is_backup(entry)
