"""Retention: which backups to keep, and removing the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby

from tikv_br.backupset import layout, lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import (
    THREADS,
    Index,
    IndexEntry,
    ListedBackup,
    check_paths,
    entry_of_backup,
    is_drill_path,
    pin_name,
    removal_name,
)
from tikv_br.backupset.lease import PathLease
from tikv_br.cancellation import run_on_threads
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupSetError,
    LeaseHeld,
    LeaseLost,
    StorageObjectMissing,
    UsageError,
)
from tikv_br.records import dump, load
from tikv_br.storage.base import ObjectStore, exists

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
        for each in _newest_of_periods(dated, count, period):
            reasons[each.id].append(name)


def _newest_of_periods(
    newest_first: list[PruneCandidate], count: int, period: Callable[[datetime], tuple[int, ...]]
) -> list[PruneCandidate]:
    newest: dict[tuple[int, ...], PruneCandidate] = {}
    for each in newest_first:
        newest.setdefault(period(_EPOCH + timedelta(milliseconds=each.finished_ms)), each)
    return list(newest.values())[:count]


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


MANUAL_HINT = (
    "Nothing was removed. If the folder of that backup has no `backupmeta`, delete the rest of the folder, then this "
    "object."
)


@dataclass(frozen=True, slots=True)
class Removal:
    """A removal under way."""

    id: str
    path: str
    """Path below the index's root."""
    records: tuple[str, ...]
    """Names of the backup's records, without `backupmeta` and lock."""
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
        removal = _plan(store, entry)
        index.root.put(removal_name(entry.id), dump(removal))
        if exists(index.root, pin_name(entry.id)):
            index.root.delete(removal_name(entry.id))
            return False
        held.confirm()  # after losing the lock, the path may hold another run's new backup
        store.put(layout.LOCK, removal.lock_text)
        held.confirm()
        store.delete(layout.META)
        _remove_objects(store, removal, held)
    _remove_entry(index, removal)
    return True


def check_deletable(index: Index, listed: ListedBackup) -> None:
    """Raise `UsageError` if the backup is pinned, or if others in the index continue it."""
    entry = listed.entry
    if listed.pinned:
        raise UsageError(f"backup {entry.id} is pinned", hint=f"Run `tikv-br unpin {entry.id}` first.")
    every = index.read()
    parents = _parents(every)
    children = [each.entry for each in every if parents[each.entry.id] == entry.id]
    if children:
        names = ", ".join(f"{child.id} ({child.path})" for child in children)
        raise UsageError(
            f"backup {entry.id} is the base of incremental backups, which cannot be restored without it: {names}",
            hint="Delete these first.",
        )


def delete(index: Index, listed: ListedBackup) -> None:
    """Remove one backup, also one whose removal was interrupted. Raises as `check_deletable`, `remove` and `finish_removal`."""
    check_deletable(index, listed)
    entry = listed.entry
    unfinished = [removal for removal in interrupted_removals(index) if removal.id == entry.id]
    if not any(finish_removal(index, removal) for removal in unfinished) and not remove(index, entry):
        raise UsageError(f"backup {entry.id} was pinned in the meantime", hint=f"Run `tikv-br unpin {entry.id}` first.")
    index.refresh()


def interrupted_removals(index: Index) -> list[Removal]:
    """Removals that were interrupted, or are running. Raises `BackupDamaged` when a mark does not read."""
    found = []
    for entry_id in index.removal_ids():
        try:
            found.append(_read(index.root, entry_id))
        except StorageObjectMissing:
            continue
        except BackupDamaged as error:
            error.hint = MANUAL_HINT
            raise
    return found


def _read(root: ObjectStore, entry_id: str) -> Removal:
    name = removal_name(entry_id)
    removal = load(Removal, root.get(name), name)
    check_paths((removal.path, *removal.records, *removal.files), name)
    if removal.id != entry_id:
        raise BackupDamaged(f"{name} is damaged: it describes the removal of {removal.id}")
    return removal


def finish_removal(index: Index, removal: Removal) -> bool:
    """Resume an interrupted removal; False when there still, or again, is a backup, which is left alone.

    Raises `LeaseHeld` while another command works at its path.
    """
    store = index.store_of(removal.path)
    with lease.acquire(store, "prune") as held:
        if exists(store, layout.META):
            index.root.delete(removal_name(removal.id))
            return False
        held.confirm()
        _remove_objects(store, removal, held)
    _remove_entry(index, removal)
    return True


def _plan(store: ObjectStore, entry: IndexEntry) -> Removal:
    backup = BackupSet.open_any(store)
    if entry_of_backup(entry.path, backup, 0).id != entry.id:
        raise BackupNotFound(
            f"the backup at {store.location} is not the one in the index", hint="Run `tikv-br list --rebuild`."
        )
    names = [info.name for info in store.list(layout.FOLDER) if layout.is_part(info.name)]
    records = sorted(names, key=lambda name: (name != layout.MANIFEST, name))
    return Removal(entry.id, entry.path, tuple(records), tuple(file.name for file in backup.files))


def _remove_objects(store: ObjectStore, removal: Removal, held: PathLease) -> None:
    """All that follows the deletion of `backupmeta`. Objects that are gone already do not matter."""
    if _owns_path(store, removal):

        def delete(name: str) -> None:
            held.check()
            store.delete(name)

        for name in removal.records:
            delete(name)
        run_on_threads(delete, removal.files, THREADS, "remove")
        held.confirm()
        store.sweep()  # partial files of a killed prune: while we hold the lock, nobody else writes here
        store.delete(layout.LOCK)


def _remove_entry(index: Index, removal: Removal) -> None:
    """Remove the empty directory, which any deletion below it does, and the index entry."""
    index.root.delete(f"{removal.path}/{layout.LOCK}.gone")
    index.remove_entry(removal.id)
    index.root.delete(removal_name(removal.id))


def _owns_path(store: ObjectStore, removal: Removal) -> bool:
    """Return whether no other run has used the path since: it would have replaced the lock, which is removed last."""
    try:
        return store.get(layout.LOCK) == removal.lock_text
    except StorageObjectMissing:
        return True


log = logging.getLogger(__name__)


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

    @property
    def interrupted(self) -> list[Removal]:
        """Those of `interrupted_removals` whose backup is not complete any more."""
        whole = {decision.listed.entry.id for decision in self.decisions}
        return [removal for removal in self.interrupted_removals if removal.id not in whole]

    @property
    def to_remove(self) -> list[IndexEntry]:
        """The oldest first, so that an interrupted prune has kept the newer ones."""
        return [decision.listed.entry for decision in reversed(self.decisions) if not decision.keep]


def plan(index: Index, policy: Policy, *, include_foreign: bool = False) -> PrunePlan:
    """Decide on every backup in the index; nothing is changed.

    Only backups whose `backupmeta` is there count: an entry without one must not push out a backup that exists. Those of
    other tools are kept, and count for nothing, unless ``include_foreign``.
    """
    removals = interrupted_removals(index)
    listed = index.read()
    there = run_on_threads(lambda each: index.is_backup(each.entry), listed, THREADS, "prune")
    present = [each for each, is_there in zip(listed, there, strict=True) if is_there]
    going = {removal.id for removal in removals}
    absent = [each.entry for each, is_there in zip(listed, there, strict=True) if not is_there]
    reasons = reasons_to_keep(_candidates(present, include_foreign=include_foreign), policy)
    return PrunePlan(
        decisions=tuple(RetentionDecision(each, reasons.get(each.entry.id, ("foreign",))) for each in present),
        interrupted_removals=tuple(removals),
        ghosts=tuple(entry for entry in absent if entry.id not in going),
    )


def execute(
    index: Index, wanted: PrunePlan, on_removed: Callable[[str, str], None] = lambda _id, _path: None
) -> list[tuple[IndexEntry, BackupSetError]]:
    """Carry out the plan; returns the backups that could not be removed, which stay complete.

    After an interruption, a `StorageError` or a `LeaseLost` the next prune finishes it. ``on_removed`` gets the id and path of each.
    """
    for removal in wanted.interrupted_removals:
        try:
            if finish_removal(index, removal):
                on_removed(removal.id, removal.path)
        except LeaseHeld as error:
            log.warning("cannot finish the removal of %s now, the next prune will: %s", removal.path, error.message)
    failed: list[tuple[IndexEntry, BackupSetError]] = []
    for entry in wanted.to_remove:
        try:
            if remove(index, entry):
                on_removed(entry.id, entry.path)
        except LeaseLost:
            raise
        except BackupSetError as error:
            failed.append((entry, error))
    index.refresh()
    return failed


def _candidates(present: Sequence[ListedBackup], *, include_foreign: bool) -> list[PruneCandidate]:
    parents = _parents(present)
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
    ]


def _parents(every: Iterable[ListedBackup]) -> dict[str, str]:
    """The id of the backup that each one continues, by id; ``""`` = none of them."""
    entries = [each.entry for each in every]
    ids = {entry.path: entry.id for entry in entries}
    return {entry.id: _parent_id(entry.parent.partition("?")[0].rstrip("/"), ids) for entry in entries}


def _parent_id(url: str, ids: Mapping[str, str]) -> str:
    """The id of the backup at a URL, ``""`` if it is not below the root.

    By the end of the URL, as the root may have been copied from elsewhere. If that fits two, one backup is kept in vain.
    """
    fitting = [path for path in ids if f"/{url}".endswith(f"/{path}")]
    return ids[max(fitting, key=len)] if fitting else ""
