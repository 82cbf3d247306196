"""Removing what a retention policy does not keep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tikv_br.backupset.index import THREADS, Index, Listed
from tikv_br.backupset.index_entry import IndexEntry
from tikv_br.backupset.removal import Removal, begun, finish_begun, remove
from tikv_br.backupset.retention import Candidate, Policy, reasons_to_keep
from tikv_br.errors import BackupSetError, LeaseHeld, LeaseLost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to become of a backup."""

    listed: Listed
    reasons: tuple[str, ...]
    """Why it is kept; none = it is removed."""

    @property
    def keep(self) -> bool:
        """Whether it stays."""
        return bool(self.reasons)


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What a prune will do."""

    verdicts: tuple[Verdict, ...]
    """Newest first."""
    begun: tuple[Removal, ...]
    """Removals that were broken off: they are finished first, or forgotten where the backup is still whole."""
    ghosts: tuple[IndexEntry, ...]
    """Entries at whose path no backup lies: they count for nothing and are left to `tikv-br list --rebuild`."""

    @property
    def interrupted(self) -> list[Removal]:
        """Those of `begun` whose backup is one no more."""
        whole = {verdict.listed.entry.id for verdict in self.verdicts}
        return [removal for removal in self.begun if removal.id not in whole]

    @property
    def to_remove(self) -> list[IndexEntry]:
        """The oldest first, so that a prune broken off has kept the newer ones."""
        return [verdict.listed.entry for verdict in reversed(self.verdicts) if not verdict.keep]


def plan(index: Index, policy: Policy, *, include_foreign: bool = False) -> PrunePlan:
    """Decide on every backup in the index; nothing is changed.

    Only backups whose `backupmeta` is there count: an entry without one must not push out a backup that exists. Those of
    other tools are kept, and count for nothing, unless ``include_foreign``.
    """
    removals = begun(index)
    listed = index.read()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="prune") as pool:
        there = list(pool.map(lambda each: index.is_backup(each.entry), listed))
    present = [each for each, is_there in zip(listed, there, strict=True) if is_there]
    going = {removal.id for removal in removals}
    absent = [each.entry for each, is_there in zip(listed, there, strict=True) if not is_there]
    reasons = reasons_to_keep(_candidates(index, present, include_foreign=include_foreign), policy)
    return PrunePlan(
        verdicts=tuple(Verdict(each, reasons.get(each.entry.id, ("foreign",))) for each in present),
        begun=tuple(removals),
        ghosts=tuple(entry for entry in absent if entry.id not in going),
    )


def carry_out(
    index: Index, wanted: PrunePlan, on_removed: Callable[[str, str], None] = lambda _id, _path: None
) -> list[tuple[IndexEntry, BackupSetError]]:
    """Do what the plan says, and return what could not be removed; that is left whole, and the others are removed.

    Broken off, also by a `StorageError` or a `LeaseLost`, it is finished by another prune. ``on_removed`` is told id and path of each.
    """
    for removal in wanted.begun:
        try:
            if finish_begun(index, removal):
                on_removed(removal.id, removal.path)
        except LeaseHeld as error:
            log.warning("the removal of %s is left to another prune: %s", removal.path, error.message)
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


def _candidates(index: Index, present: Sequence[Listed], *, include_foreign: bool) -> list[Candidate]:
    by_url = {_url(index, each.entry): each.entry.id for each in present}
    return [
        Candidate(
            id=each.entry.id,
            group=each.entry.scope,
            finished_ms=each.entry.finished_ms,
            pinned=each.pinned,
            parent=by_url.get(each.entry.parent.partition("?")[0].rstrip("/"), ""),
        )
        for each in present
        if include_foreign or not each.entry.is_foreign
    ]


def _url(index: Index, entry: IndexEntry) -> str:
    return index.root.location.child(entry.path).redacted().partition("?")[0]
