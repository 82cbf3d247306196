"""Whatever is removed at the path of a backup, files of others that lie there stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from tests.unit.backupset.samples import describe, do_task
from tikv_br.backupset import layout, ledger, manifest
from tikv_br.backupset.backup_writer import BackupWriter
from tikv_br.dataflow.run import remove_temporary
from tikv_br.errors import BackupPathInUse
from tikv_br.storage.base import ObjectStore

OTHERS = (
    "sst/monday/backupmeta",
    "sst/monday/1/4_2_default.sst",
    "sst/running/backup.lock",
    "sst/running/sst/x_default.sst",
)
"""A complete backup and one that is being made, below a folder that a backup here has, too."""


def names(store: ObjectStore) -> set[str]:
    """Names of all objects."""
    return {info.name for info in store.list()}


@pytest.mark.parametrize(
    "remove",
    [
        lambda store: BackupWriter(store).discard(),
        lambda store: BackupWriter(store).remove_files_except(()),
        lambda store: BackupWriter(store).commit(describe(store), [do_task(store, each) for each in range(3)]),
        remove_temporary,
    ],
    ids=["discard", "resume", "commit", "temporary"],
)
def test_backups_in_a_folder_below(store: ObjectStore, remove: Callable[[ObjectStore], object]) -> None:
    """A lock that somebody wrote at the folder of all backups does not make these the work of an unfinished one."""
    manifest.mark_path(store)
    for name in (*OTHERS, f"sst/{'0a' * 8}_{'1b' * 8}_00000_default.sst"):
        store.put(name, b"x")
    remove(store)
    assert names(store) >= set(OTHERS)
    assert f"sst/{'0a' * 8}_{'1b' * 8}_00000_default.sst" not in names(store)


def test_backups_below_the_ledger(store: ObjectStore) -> None:
    """Entries are removed, and no backup that lies among them."""
    other = {f"{layout.LEDGER}/monday/{name}" for name in ("backupmeta", "sst/1_default.sst")}
    for name in (*other, f"{layout.LEDGER}/{'0a' * 8}-1.json"):
        store.put(name, b"x")
    ledger.remove_entries(store)
    assert names(store) == other


def test_other_files_at_the_path_of_a_temporary_backup(store: ObjectStore) -> None:
    """What no run makes stays."""
    manifest.mark_path(store)
    other = {"notes.txt", "photos/2026.jpg", "tikv-br-index/1.json"}
    for name in (*other, "tikv-br/run.json", "tikv-br/restore/1.json", "sst/x_default.sst"):
        store.put(name, b"x")
    remove_temporary(store)
    assert names(store) == other


@pytest.mark.parametrize(("engine", "removed"), [("scan", False), ("store", False), ("load", True), ("merge", True)])
def test_backup_in_place_of_a_temporary_one(store: ObjectStore, engine: str, removed: bool) -> None:
    """Only what its own manifest calls temporary is removed."""
    made = [do_task(store, each) for each in range(3)]
    BackupWriter(store).commit(structs.replace(describe(store), engine=engine), made)
    before = names(store)
    if removed:
        remove_temporary(store)
        assert names(store) == set()
        return
    with pytest.raises(BackupPathInUse, match="no temporary one"):
        remove_temporary(store)
    assert names(store) == before
