"""Removes the backups of an index that no retention rule keeps, or one that the user chose.

Removes one backup, in steps that a later run can finish.

The names that are deleted come from the `backupmeta` of that very backup, of which a copy stays until they are gone: by its hash
it belongs to the id in the index. What the mark of an interrupted removal says is only a description.

Retention rules: which backups to keep.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby
from pathlib import PurePosixPath

from msgspec.structs import replace

from tikv_br.backupset import layout, lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.backupmeta import decode
from tikv_br.backupset.files import FileEntry, FileKind
from tikv_br.backupset.index import (
    THREADS,
    Index,
    IndexEntry,
    ListedBackup,
    backups_below,
    check_paths,
    entry_id,
    entry_of_backup,
    is_drill_path,
    is_of,
    pin_name,
    removal_name,
)
from tikv_br.backupset.lease import PathLease
from tikv_br.cancellation import run_on_threads
from tikv_br.cluster.timestamps import show_time
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupSetError,
    CrypterMismatch,
    LeaseHeld,
    LeaseLost,
    StorageNotRegular,
    StorageObjectMissing,
    TikvBrError,
    UsageError,
)
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.records import dump, load
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.crypter import PLAIN, Crypter

log = logging.getLogger(__name__)

MANUAL_HINT = "If the folder of that backup has no `backupmeta`, delete the rest of the folder by hand; then run `tikv-br list --rebuild`."


@dataclass(frozen=True, slots=True)
class Removal:
    """A removal under way."""

    id: str
    path: str
    """Path below the index's root."""
    records: tuple[str, ...]
    """Names of the backup's records, without `backupmeta` and lock. Only older versions read this field and the next one."""
    files: tuple[str, ...]

    @property
    def lock_text(self) -> bytes:
        """Content of the backup's lock while the removal owns the path."""
        return f"DO NOT DELETE\nThe removal of backup {self.id} has begun here; `tikv-br prune` finishes it.\n".encode()


def remove(index: Index, entry: IndexEntry) -> bool:
    """Remove a backup; False when it was pinned at the last moment, and is still whole.

    Raises `BackupNotFound` when there is none at its path or another one, `BackupDamaged` or `BackupUnsupported` when its
    records do not list its files, `LeaseHeld` while another command works there; nothing is removed then. After a
    `StorageError`, or a `LeaseLost` to another command, call `finish_removal`.
    """
    store = index.store_of(entry.path)
    with lease.acquire(store, "prune") as held:
        _check_is_there(store, entry)
        meta = store.get(layout.META)
        files = _files_named_by(meta, index, entry.path, entry.id)
        removal = Removal(entry.id, entry.path, (*_records_of(store), layout.REMOVED), files)
        index.root.put(removal_name(entry.id), dump(removal))
        if exists(index.root, pin_name(entry.id)):
            index.root.delete(removal_name(entry.id))
            return False
        held.confirm()  # after losing the lock, the path may hold another run's new backup
        store.put(layout.REMOVED, meta)
        store.put(layout.LOCK, removal.lock_text)
        held.confirm()
        store.delete(layout.META)
        _remove_objects(store, files, held)
    _remove_entry(index, removal)
    return True


def interrupted_removals(index: Index) -> list[Removal]:
    """Marks of removals that were interrupted, or are running. Those that do not read are left out, with a warning."""
    found = []
    for marked in sorted(index.removal_ids()):
        try:
            found.append(_read(index.root, marked))
        except StorageObjectMissing:
            continue
        except BackupSetError as error:
            log.warning("ignored the mark of a removal: %s", error.message)
    return found


def _read(root: ObjectStore, marked: str) -> Removal:
    name = removal_name(marked)
    removal = load(Removal, root.get(name), name)
    check_paths((removal.path,), name)
    if removal.id != marked:
        raise BackupDamaged(f"{name} is damaged: it describes the removal of {removal.id}")
    return removal


def finish_removal(index: Index, removal: Removal) -> bool:
    """Resume an interrupted removal; False when there still, or again, is a backup, which is left alone.

    The index must have an entry of the removal's id and path. Raises `LeaseHeld` while another command works at its path, and
    `BackupDamaged` or `CrypterMismatch` if it cannot be established what belonged to the backup.
    """
    store = index.store_of(removal.path)
    with lease.acquire(store, "prune") as held:
        if exists(store, layout.META):
            store.delete(layout.REMOVED)
            index.root.delete(removal_name(removal.id))
            return False
        held.confirm()
        if _owns_path(store, removal):
            _remove_objects(store, _left_files(index, store, removal), held)
    _remove_entry(index, removal)
    return True


def _check_is_there(store: ObjectStore, entry: IndexEntry) -> None:
    try:
        is_there = entry_of_backup(entry.path, BackupSet.open_any(store, key_mode=None), 0).id == entry.id
    except CrypterMismatch:
        is_there = is_of(entry, store.get(layout.META))
    if not is_there:
        raise BackupNotFound(
            f"the backup at {store.location} is not the one in the index", hint="Run `tikv-br list --rebuild`."
        )


def _left_files(index: Index, store: ObjectStore, removal: Removal) -> tuple[str, ...]:
    """Names of the files of a backup whose `backupmeta` is gone, by its copy, which is removed after them."""
    try:
        meta = store.get(layout.REMOVED)
    except StorageObjectMissing:
        if any(layout.is_part(info.name) for info in store.list()):
            raise BackupDamaged(
                f"cannot finish the removal of {removal.path}: {layout.REMOVED} is missing, which names its files",
                hint=MANUAL_HINT,
            ) from None
        return ()
    return _files_named_by(meta, index, removal.path, removal.id)


def _files_named_by(meta: bytes, index: Index, path: str, backup_id: str) -> tuple[str, ...]:
    """Names of a backup's files, all of them below its path and in no other backup.

    Without the key of an encrypted one: of all data files there, as the path belongs to that backup.
    """
    if entry_id(path, hashlib.sha256(meta).digest()) != backup_id:
        raise BackupDamaged(
            f"cannot remove {path}: its {layout.META} belongs to another backup than {backup_id}", hint=MANUAL_HINT
        )
    try:
        names = tuple(file.name for file in _decode(meta, index.root.location.crypter))
    except CrypterMismatch:
        listed = (info.name for info in index.store_of(path).list())
        names = tuple(name for name in listed if layout.is_part(name) and not layout.is_record(name))
    check_paths(names, f"{path}/{layout.META}")
    if odd := next((name for name in names if layout.is_record(name) or FileKind.of(name) is None), None):
        raise BackupDamaged(f"cannot remove {path}: its {layout.META} lists {odd!r}, which is no data file")
    _check_alone(index.root, path, (*names, f"{layout.FOLDER}/x"))
    return names


def _decode(meta: bytes, crypter: Crypter) -> Iterable[FileEntry]:
    if crypter.encrypts:
        with contextlib.suppress(CrypterMismatch):  # a backup in clear needs no key
            return decode(meta, PLAIN).files
    return decode(meta, crypter).files


def _check_alone(root: ObjectStore, path: str, names: Iterable[str]) -> None:
    """Raise `BackupDamaged` if a folder above or below ``path``, on the way to one of the names, is a backup itself."""
    folders = {str(folder) for name in names for folder in PurePosixPath(path, name).parents} - {path, "."}
    found = run_on_threads(lambda folder: exists(root, f"{folder}/{layout.META}"), sorted(folders), THREADS, "remove")
    if others := [folder for folder, is_there in zip(sorted(folders), found, strict=True) if is_there]:
        raise BackupDamaged(f"cannot remove {path}: its files lie in {others[0]}, which is another backup")


def _records_of(store: ObjectStore) -> list[str]:
    names = [info.name for info in store.list(layout.FOLDER) if layout.is_part(info.name)]
    return sorted(names, key=lambda name: (name != layout.MANIFEST, name))


def _remove_objects(store: ObjectStore, files: Sequence[str], held: PathLease) -> None:
    """All that follows the deletion of `backupmeta`. Objects that are gone already do not matter."""

    def delete(name: str) -> None:
        held.check()
        store.delete(name)

    for name in _records_of(store):
        if name != layout.REMOVED:
            delete(name)
    run_on_threads(delete, files, THREADS, "remove")
    delete(layout.REMOVED)
    held.confirm()
    store.sweep()  # partial files of a killed prune: while we hold the lock, nobody else writes here
    store.delete(layout.LOCK)


def _remove_entry(index: Index, removal: Removal) -> None:
    """Remove the empty directory, which any deletion below it does, and the index entry."""
    index.root.delete(f"{removal.path}/{layout.LOCK}.gone")
    index.remove_entry(removal.id)


def _owns_path(store: ObjectStore, removal: Removal) -> bool:
    """Return whether no other run has used the path since: it would have replaced the lock, which is removed last."""
    try:
        return store.get(layout.LOCK) == removal.lock_text
    except StorageObjectMissing:
        return True


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Policy:
    """Number of backups to keep by each rule; 0 = unused. Raises `UsageError` if no rule would keep any."""

    last: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0

    def __post_init__(self) -> None:
        counts = (self.last, self.daily, self.weekly, self.monthly)
        if min(counts) < 0 or not any(counts):
            raise UsageError(
                "no retention rule was passed",
                hint="Pass at least one of --keep-last, --keep-daily, --keep-weekly and --keep-monthly.",
            )


@dataclass(frozen=True, slots=True)
class PruneCandidate:
    """Properties of a backup that decide whether it is kept."""

    id: str
    group: str
    """Backups of one group replace each other."""
    finished_ms: int
    """Milliseconds since the epoch; 0 = not known, and then it is kept."""
    pinned: bool = False
    parent: str = ""
    """Id of the backup that this one continues; ``""`` = none."""


def reasons_to_keep(candidates: Iterable[PruneCandidate], policy: Policy) -> dict[str, tuple[str, ...]]:
    """Return the reasons to keep each backup, by id; without any it is removed.

    A kept backup's parents are kept with it: it cannot be restored without them.
    """
    every = sorted(candidates, key=lambda each: (each.group, -each.finished_ms, each.id))
    reasons: dict[str, list[str]] = {each.id: ["pinned"] if each.pinned else [] for each in every}
    for _group, members in groupby(every, key=lambda each: each.group):
        _apply(list(members), policy, reasons)
    _keep_parents({each.id: each.parent for each in every}, reasons)
    return {name: tuple(why) for name, why in reasons.items()}


def _apply(newest_first: list[PruneCandidate], policy: Policy, reasons: dict[str, list[str]]) -> None:
    for each in newest_first:
        if not each.finished_ms:
            reasons[each.id].append("age unknown")
    dated = [each for each in newest_first if each.finished_ms]
    for each in dated[: policy.last]:
        reasons[each.id].append("last")
    for name, count, period in (
        ("daily", policy.daily, lambda moment: (moment.year, moment.month, moment.day)),
        ("weekly", policy.weekly, lambda moment: moment.isocalendar()[:2]),
        ("monthly", policy.monthly, lambda moment: (moment.year, moment.month)),
    ):
        newest: dict[tuple[int, ...], PruneCandidate] = {}
        for each in dated:
            newest.setdefault(period(_EPOCH + timedelta(milliseconds=each.finished_ms)), each)
        for each in list(newest.values())[:count]:
            reasons[each.id].append(name)


def _keep_parents(parents: Mapping[str, str], reasons: dict[str, list[str]]) -> None:
    to_follow = [name for name, why in reasons.items() if why]
    while to_follow:
        child = to_follow.pop()
        parent = parents[child]
        if parent not in reasons:
            continue
        if not reasons[parent]:
            to_follow.append(parent)
        reasons[parent].append(f"parent of {child}")


CLOCK_ERROR_MS = 3_600_000
"""Difference of clocks up to which a backup's own time is believed."""
_REBUILD = "Run `tikv-br list --rebuild`."


def check_deletable(index: Index, listed: ListedBackup) -> None:
    """Raise `UsageError` if the backup is pinned, or if others continue it by the index or by themselves; as `_unlisted`, too."""
    entry = listed.entry
    if listed.pinned:
        raise UsageError(f"backup {entry.id} is pinned", hint=f"Run `tikv-br backup unpin {entry.id}` first.")
    every = [each.entry for each in index.read()]
    if _may_be_continued(index, entry):
        every += _unlisted(index, every)
    paths = {each.path for each in every}
    children = {each.path: each for each in every if each.path != entry.path == _parent_path(each, paths)}
    if children:
        names = ", ".join(f"{child.id} ({child.path})" for child in children.values())
        raise UsageError(
            f"backup {entry.id} is the base of incremental backups, which cannot be restored without it: {names}",
            hint="Delete these first.",
        )


def _may_be_continued(index: Index, entry: IndexEntry) -> bool:
    """Return whether incremental backups can continue a backup: as far as it can be read, only if it has a backup-ts."""
    try:
        made = BackupSet.open_any(index.store_of(entry.path), key_mode=None)
    except (BackupSetError, StorageNotRegular):
        return True
    return made.key_mode is KeyMode.RAW and bool(made.backup_ts)


def _unlisted(index: Index, known: Iterable[IndexEntry], opened: AbstractSet[str] = frozenset()) -> list[IndexEntry]:
    """Every backup below the root, but those ``opened`` before, by a listing of all objects: an entry may be lost or forged.

    A backup that cannot be read counts by its entry, which is ``known``. Without an entry it may continue any backup: raises
    `BackupUnsupported` and `CrypterMismatch`. A damaged backup without an entry cannot be restored, and is ignored.
    """
    found, problems = backups_below(index, opened)
    paths = {entry.path for entry in known}
    for path, error in problems:
        if path in paths or isinstance(error, StorageNotRegular):
            continue
        if isinstance(error, BackupDamaged):
            log.warning("ignored %s, which is not in the index: %s", path, error.message)
            continue
        raise type(error)(
            f"nothing is removed, because it is not known what {path} continues: it is not in the index and cannot be read: {error.message}",
            hint="Run `tikv-br list --rebuild` with the key or the version of that backup.",
        )
    return list(found.values())


def delete(index: Index, listed: ListedBackup) -> None:
    """Remove one backup, also one whose removal was interrupted. Raises as `check_deletable`, `remove` and `finish_removal`."""
    check_deletable(index, listed)
    entry = listed.entry
    unfinished = _trusted(index.read(), interrupted_removals(index), frozenset())
    unfinished = [removal for removal in unfinished if removal.id == entry.id]
    if not any(finish_removal(index, removal) for removal in unfinished) and not remove(index, entry):
        raise UsageError(
            f"backup {entry.id} was pinned in the meantime", hint=f"Run `tikv-br backup unpin {entry.id}` first."
        )
    index.refresh()


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Decision about one backup."""

    listed: ListedBackup
    reasons: tuple[str, ...]
    """Reasons to keep it; none = it is removed."""

    @property
    def keep(self) -> bool:
        return bool(self.reasons)


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """Backups to keep and to remove."""

    decisions: tuple[RetentionDecision, ...]
    """Newest first."""
    interrupted_removals: tuple[Removal, ...]
    """Removals to finish first, or to cancel if the backup is still complete."""
    ghosts: tuple[IndexEntry, ...]
    """Entries without a backup at their path; ignored here, removed by `tikv-br list --rebuild`."""
    refused: tuple[tuple[IndexEntry, BackupSetError | StorageNotRegular], ...] = ()
    """Entries that do not say what their backup says, or whose backup cannot be read: they are kept, and count as none."""

    @property
    def interrupted(self) -> list[Removal]:
        """Removals in `interrupted_removals` whose backup is not complete any more."""
        whole = {decision.listed.entry.id for decision in self.decisions}
        return [removal for removal in self.interrupted_removals if removal.id not in whole]

    @property
    def to_remove(self) -> list[IndexEntry]:
        """The oldest first, so that an interrupted prune has kept the newer ones."""
        return [decision.listed.entry for decision in reversed(self.decisions) if not decision.keep]


def plan(index: Index, policy: Policy, *, include_foreign: bool = False) -> PrunePlan:
    """Decide on every backup in the index; nothing is changed.

    Entries only say where to look: each backup is opened, and what it says itself counts. Those that are not there, or are not
    what the entry says, must not push out others. Those of other tools are kept, and count for nothing, unless ``include_foreign``.
    """
    removals = interrupted_removals(index)
    listed = index.read()
    examine = partial(_examine, index, include_foreign=include_foreign)
    found = list(zip(listed, run_on_threads(examine, listed, THREADS, "prune"), strict=True))
    present = [what for _each, what in found if isinstance(what, ListedBackup)]
    refused = [(each.entry, what) for each, what in found if isinstance(what, TikvBrError)]
    # Backups whose own records were read: not backups of other tools, nor encrypted ones whose key is not here.
    read = {what.entry.path for each, what in found if isinstance(what, ListedBackup) and what.entry is not each.entry}

    def decide(others: Iterable[IndexEntry]) -> tuple[RetentionDecision, ...]:
        reasons = reasons_to_keep(_candidates(present, others, include_foreign=include_foreign), policy)
        return tuple(RetentionDecision(each, reasons.get(each.entry.id, ("foreign",))) for each in present)

    others = {entry.id: entry for entry, _error in refused}
    decisions = decide(others.values())
    going = [each.listed.entry for each in decisions if not each.keep]
    if removals or any(
        entry.path not in read or (entry.backup_ts and entry.key_mode is KeyMode.RAW) for entry in going
    ):
        others |= {each.id: each for each in _unlisted(index, (each.entry for each in listed), read)}
        decisions = decide(others.values())
    removed = {each.listed.entry.id for each in decisions if not each.keep}
    parents = _parents(
        [*(what.entry if isinstance(what, ListedBackup) else each.entry for each, what in found), *others.values()]
    )
    trusted = _trusted(listed, removals, {parent for child, parent in parents.items() if child not in removed})
    unfinished = {removal.id for removal in trusted}
    return PrunePlan(
        decisions=decisions,
        interrupted_removals=tuple(trusted),
        ghosts=tuple(each.entry for each, what in found if what is None and each.entry.id not in unfinished),
        refused=tuple(refused),
    )


def _examine(
    index: Index, listed: ListedBackup, *, include_foreign: bool
) -> ListedBackup | BackupSetError | StorageNotRegular | None:
    """The backup of an entry, as its own records describe it; None if there is none, the error if it is another or cannot be read."""
    entry, store = listed.entry, index.store_of(listed.entry.path)
    try:
        if entry.is_foreign and not include_foreign:
            return listed if exists(store, layout.META) else None
        written_ms = store.stat(layout.META).modified_ms
        try:
            found = entry_of_backup(entry.path, BackupSet.open_any(store, key_mode=None), written_ms)
        except CrypterMismatch:  # its key is lost or not here: the entry counts if it is of this very `backupmeta`
            if not is_of(entry, store.get(layout.META)):
                raise
            found = entry
    except (StorageObjectMissing, BackupNotFound):
        return None
    except (BackupSetError, StorageNotRegular) as error:
        return error
    if found.id != entry.id:
        return BackupNotFound(f"the backup at {store.location} is not the one in the index", hint=_REBUILD)
    # By two clocks: of the storage, which wrote it later than it was finished, and of this machine.
    latest_ms = min(written_ms, time.time() * 1000) + CLOCK_ERROR_MS
    if found.finished_ms > latest_ms:
        return BackupDamaged(
            f"the backup at {store.location} was finished in the future, at {show_time(found.finished_ms)}",
            hint="Compare the clocks of this machine, of the storage and of the machine that made it.",
        )
    return replace(listed, entry=found)


def _trusted(listed: Iterable[ListedBackup], marked: Iterable[Removal], needed: AbstractSet[str]) -> list[Removal]:
    """The removals to finish: their backups are in the index, not pinned and, by id, not ``needed`` by others."""
    known = {each.entry.id: each for each in listed}
    trusted = []
    for removal in marked:
        there = known.get(removal.id)
        if there is None or there.entry.path != removal.path:
            why = "the index has no such backup"
        elif there.pinned:
            why = "the backup is pinned"
        elif removal.id in needed:
            why = "others continue the backup"
        else:
            trusted.append(removal)
            continue
        log.warning("ignored the mark that %s (%s) is being removed: %s", removal.path, removal.id, why)
    return trusted


def execute(
    index: Index, wanted: PrunePlan, on_removed: Callable[[str, str], None] = lambda _id, _path: None
) -> list[tuple[IndexEntry, BackupSetError | StorageNotRegular]]:
    """Carry out the plan; returns the backups that could not be read or removed, which stay as they are.

    After an interruption, a `StorageError` or a `LeaseLost` the next prune finishes it. ``on_removed`` gets the id and path of each.
    """
    for removal in wanted.interrupted_removals:
        try:
            if finish_removal(index, removal):
                on_removed(removal.id, removal.path)
        except LeaseHeld as error:
            log.warning("cannot finish the removal of %s now, the next prune will: %s", removal.path, error.message)
        except LeaseLost:
            raise
        except (BackupSetError, StorageNotRegular) as error:
            log.warning("%s. %s", error.message, error.hint)
    failed = [(entry, error) for entry, error in wanted.refused if not isinstance(error, BackupNotFound)]
    for entry in wanted.to_remove:
        try:
            if remove(index, entry):
                on_removed(entry.id, entry.path)
        except LeaseLost:
            raise
        except (BackupSetError, StorageNotRegular) as error:
            failed.append((entry, error))
    index.refresh()
    return failed


def _candidates(
    present: Sequence[ListedBackup], others: Iterable[IndexEntry], *, include_foreign: bool
) -> list[PruneCandidate]:
    """The backups of the index, which retention decides on, and increments among ``others``, which are always kept: only for their parents."""
    increments = [entry for entry in others if entry.parent]
    parents = _parents([*(each.entry for each in present), *increments])
    return [
        PruneCandidate(
            id=each.entry.id,
            group=f"drills of {each.entry.scope}" if is_drill_path(each.entry.path) else each.entry.scope,
            finished_ms=each.entry.finished_ms,
            pinned=each.pinned,
            parent=parents[each.entry.id],
        )
        for each in present
        if include_foreign or not each.entry.is_foreign
    ] + [PruneCandidate(each.id, each.scope, finished_ms=0, parent=parents[each.id]) for each in increments]


def _parents(entries: Sequence[IndexEntry]) -> dict[str, str]:
    """The id of the backup that each one continues, by id; ``""`` = none of them."""
    ids = {entry.path: entry.id for entry in entries}
    return {entry.id: ids.get(_parent_path(entry, ids), "") for entry in entries}


def _parent_path(entry: IndexEntry, paths: Iterable[str]) -> str:
    """The path, among these, of the backup that an entry's backup continues; ``""`` if it is not below the root.

    By the end of the URL, as the root may have been copied from elsewhere. If that fits two, one backup is kept in vain.
    """
    url = entry.parent.partition("?")[0].rstrip("/")
    return max((path for path in paths if f"/{url}".endswith(f"/{path}")), key=len, default="")
