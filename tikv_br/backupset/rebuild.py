"""Making the index anew from the backups themselves: the one operation that lists all that lies below the root."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tikv_br.backupset import index_entry, layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import THREADS, Index, entry_name
from tikv_br.backupset.index_entry import IndexEntry
from tikv_br.errors import BackupDamaged, BackupNotFound, BackupUnsupported, CrypterMismatch, StorageError
from tikv_br.storage.base import ObjectInfo, check_name


class Problem(NamedTuple):
    """A place with a `backupmeta` that could not be entered."""

    path: str
    error: BackupDamaged | BackupUnsupported | CrypterMismatch | StorageError


class Rebuilt(NamedTuple):
    """What a rebuild came to."""

    found: int
    """Backups in the index now."""
    added: int
    dropped: int
    """Entries without a backup."""
    problems: tuple[Problem, ...]


def rebuild(index: Index) -> Rebuilt:
    """List the root once, enter every complete backup, drop entries that have none.

    Backups that finish meanwhile keep the entries that they write themselves; a damaged backup keeps the one it has.
    """
    known = {
        entry_id: index.entry(entry_id) for entry_id in index.ids()
    }  # before the listing: later ones are not touched
    metas = _metas(index)
    found, problems = _examine(index, metas)
    for entry in found.values():
        if known.get(entry.id) != entry:
            index.root.put(entry_name(entry.id), index_entry.dump(entry))
    stale = [entry_id for entry_id, entry in known.items() if _is_stale(index, entry_id, entry, found, problems)]
    for entry_id in stale:
        index.forget(entry_id)
    index.write_snapshot(found.values())
    return Rebuilt(len(found), len(found.keys() - known.keys()), len(stale), tuple(problems))


def _metas(index: Index) -> dict[str, ObjectInfo]:
    """Every `backupmeta` below the root, by the path of its backup. One at the root itself belongs to the folder above."""
    ending = f"/{layout.META}"
    return {info.name.removesuffix(ending): info for info in index.root.list() if info.name.endswith(ending)}


def _examine(index: Index, metas: Mapping[str, ObjectInfo]) -> tuple[dict[str, IndexEntry], list[Problem]]:
    """The entries by id, and what cannot be one."""

    def examine(path: str) -> IndexEntry | Problem | None:
        try:
            return _entry(index, check_name(path), metas[path].modified_ms)
        except BackupNotFound:  # removed meanwhile
            return None
        except (BackupDamaged, BackupUnsupported, CrypterMismatch, StorageError) as error:
            return Problem(path, error)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="rebuild") as pool:
        results = list(pool.map(examine, sorted(metas)))
    entries = {result.id: result for result in results if isinstance(result, IndexEntry)}
    return entries, [result for result in results if isinstance(result, Problem)]


def _entry(index: Index, path: str, modified_ms: int) -> IndexEntry:
    store = index.store_of(path)
    backup = BackupSet.open_any(store)
    if backup.manifest is not None:
        return index_entry.entry_of(path, backup.manifest)
    return index_entry.entry_of_foreign(path, backup, store.get(layout.META), modified_ms)


def _is_stale(
    index: Index,
    entry_id: str,
    entry: IndexEntry | None,
    found: Mapping[str, IndexEntry],
    problems: list[Problem],
) -> bool:
    """Whether an entry has no backup. One that does not read is worth nothing: what it told of has been found, or not."""
    if entry_id in found:
        return False
    if entry is None:
        return True
    if any(problem.path == entry.path for problem in problems):
        return False
    return entry.path in {other.path for other in found.values()} or not index.is_backup(entry)
