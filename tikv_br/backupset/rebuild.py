"""Rebuilds an index from the backups that are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tikv_br import records
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import THREADS, Index, entry_name
from tikv_br.backupset.index_entry import IndexEntry, entry_of_backup
from tikv_br.cancellation import run_on_threads
from tikv_br.errors import BackupDamaged, BackupNotFound, BackupUnsupported, CrypterMismatch, StorageError
from tikv_br.storage.base import check_name


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
    found, problems = _examine(index)
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


def _examine(index: Index) -> tuple[dict[str, IndexEntry], list[Problem]]:
    """The entries of all backups below the root by id, and the places that cannot be entered."""
    ending = f"/{layout.META}"  # a `backupmeta` at the root itself belongs to the folder above
    metas = {info.name.removesuffix(ending): info for info in index.root.list() if info.name.endswith(ending)}

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
