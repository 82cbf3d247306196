"""Removes what old drills have left on purpose: their reports, and the backups that they made."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tikv_br.backupset.index import Index
from tikv_br.backupset.removal import remove
from tikv_br.drill.history import REPORTS, Past
from tikv_br.errors import BackupSetError
from tikv_br.storage.base import ObjectStore

log = logging.getLogger(__name__)


def remove_old(home: ObjectStore, backups: ObjectStore, drills: Sequence[Past], keep_last: int) -> list[str]:
    """Keep the newest drills, of ``drills`` with the oldest first, and return what could not be removed.

    A backup goes only if a drill says that it made it, and nobody has pinned it; its drill's report goes after it. The
    newest drill that has passed stays in any case.
    """
    if not keep_last:
        return []
    passed = [each.id for each in drills if each.verdict == "passed"][-1:]
    problems = []
    for old in drills[:-keep_last]:
        if old.id in passed:
            continue
        try:
            _remove_backup(Index(backups), old.made_backup)
        except BackupSetError as error:
            problems.append(f"the backup of drill {old.id} stays: {error.message}")
            log.warning(problems[-1])
            continue
        home.delete(f"{REPORTS}/{old.id}.html")
        home.delete(f"{REPORTS}/{old.id}.json")
    return problems


def _remove_backup(index: Index, backup_id: str) -> None:
    """Remove a backup, unless it is pinned, or no more in the index."""
    found = next((each for each in index.read() if each.entry.id == backup_id), None)
    if found is not None and not found.pinned:
        remove(index, found.entry)
        index.refresh()
