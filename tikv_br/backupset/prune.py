"""Removes the backups of an index that no retention rule keeps, or one that the user chose."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial

from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import THREADS, Index, ListedBackup
from tikv_br.backupset.index_entry import IndexEntry, entry_of_backup, is_drill_path, is_of
from tikv_br.backupset.removal import Removal, finish_removal, interrupted_removals, remove
from tikv_br.backupset.retention import Policy, PruneCandidate, reasons_to_keep
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
from tikv_br.storage.base import exists

CLOCK_ERROR_MS = 3_600_000
"""Difference of clocks up to which a backup's own time is believed."""
_REBUILD = "Run `tikv-br list --rebuild`."


def check_deletable(index: Index, listed: ListedBackup) -> None:
    """Raise `UsageError` if the backup is pinned, or if others in the index continue it."""
    entry = listed.entry
    if listed.pinned:
        raise UsageError(f"backup {entry.id} is pinned", hint=f"Run `tikv-br backup unpin {entry.id}` first.")
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
    unfinished = _trusted(index.read(), interrupted_removals(index), frozenset())
    unfinished = [removal for removal in unfinished if removal.id == entry.id]
    if not any(finish_removal(index, removal) for removal in unfinished) and not remove(index, entry):
        raise UsageError(
            f"backup {entry.id} was pinned in the meantime", hint=f"Run `tikv-br backup unpin {entry.id}` first."
        )
    index.refresh()


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
    refused: tuple[tuple[IndexEntry, BackupSetError | StorageNotRegular], ...] = ()
    """Entries that do not say what their backup says, or whose backup cannot be read: they are kept, and count as none."""

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

    Entries only say where to look: each backup is opened, and what it says itself counts. Those that are not there, or are not
    what the entry says, must not push out others. Those of other tools are kept, and count for nothing, unless ``include_foreign``.
    """
    removals = interrupted_removals(index)
    listed = index.read()
    examine = partial(_examine, index, include_foreign=include_foreign)
    found = list(zip(listed, run_on_threads(examine, listed, THREADS, "prune"), strict=True))
    present = [what for _each, what in found if isinstance(what, ListedBackup)]
    reasons = reasons_to_keep(_candidates(present, include_foreign=include_foreign), policy)
    decisions = tuple(RetentionDecision(each, reasons.get(each.entry.id, ("foreign",))) for each in present)
    removed = {each.listed.entry.id for each in decisions if not each.keep}
    parents = _parents(what if isinstance(what, ListedBackup) else each for each, what in found)
    trusted = _trusted(listed, removals, {parent for child, parent in parents.items() if child not in removed})
    going = {removal.id for removal in trusted}
    return PrunePlan(
        decisions=decisions,
        interrupted_removals=tuple(trusted),
        ghosts=tuple(each.entry for each, what in found if what is None and each.entry.id not in going),
        refused=tuple((each.entry, what) for each, what in found if isinstance(what, TikvBrError)),
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
    """The removals to finish: those of a backup in the index that is not pinned and, by id, not ``needed`` by others."""
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
