"""Removes the backups of an index that no retention rule keeps, or one that the user chose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tikv_br.backupset.index import THREADS, Index, ListedBackup
from tikv_br.backupset.index_entry import IndexEntry, is_drill_path
from tikv_br.backupset.removal import Removal, finish_removal, interrupted_removals, remove
from tikv_br.backupset.retention import Policy, PruneCandidate, reasons_to_keep
from tikv_br.cancellation import run_on_threads
from tikv_br.errors import BackupSetError, LeaseHeld, LeaseLost, UsageError


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
