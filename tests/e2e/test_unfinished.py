"""``tikv-br abort`` and ``tikv-br unlock`` as a user runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.command import succeed, tikv_br
from tests.support.ledgers import begin_backup
from tests.unit.backupset.shelves import index_at, make_backup, names, shelve
from tikv_br.backupset import lease
from tikv_br.errors import BackupPathInUse, LeaseHeld, LeaseLost
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

JSON = ("--output", "json")


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A directory."""
    return open_store(parse(str(tmp_path / "backup")))


def test_unlock_says_whose_the_lease_was(store: ObjectStore) -> None:
    """A living one is refused and named, and ended by force, which its holder notices; then there is none."""
    place = ("-s", store.location.path)
    with lease.acquire(store, "backup") as held:
        refused = tikv_br("backup", "unlock", *place, *JSON)
        assert (refused.code, refused.last["name"]) == (LeaseHeld.exit_code, "LeaseHeld")
        assert f"backup by process {os.getpid()} on " in refused.last["message"]
        ended = succeed("backup", "unlock", *place, "--force", *JSON).last
        assert (ended["held"], ended["work"], ended["owner_pid"]) == (True, "backup", os.getpid())
        with pytest.raises(LeaseLost):
            held.confirm()
    assert "Removed the lock" in succeed("backup", "unlock", *place).out
    with lease.acquire(store, "backup"):
        pass
    assert not succeed("backup", "unlock", *place, *JSON).last["held"]
    assert not succeed("backup", "unlock", store.location.path, *JSON).last["held"]


@pytest.mark.core("resume")
def test_abort_removes_what_is_unfinished(store: ObjectStore) -> None:
    """A live run, a finished backup and foreign files stay as they are."""
    place = ("-s", store.location.path)
    store.put("README.txt", b"mine")
    begin_backup(store)
    store.put("sst/x_default.sst", b"x")
    with lease.acquire(store, "backup"):
        assert tikv_br("backup", "abort", *place).code == LeaseHeld.exit_code
    done = succeed("backup", "abort", *place, *JSON).last
    assert (done["removed_objects"], done["unfinished_run"], done["released"]) == (1, "", False)
    assert names(store) == {"README.txt"}
    assert succeed("backup", "abort", *place).out == "removed 0 objects\n"
    make_backup(store.location)
    before = names(store)
    refused = tikv_br("backup", "abort", store.location.path)
    assert (refused.code, "complete backup" in refused.err) == (BackupPathInUse.exit_code, True)
    assert names(store) == before


def test_prune_leaves_a_path_that_is_worked_at(tmp_path: Path) -> None:
    """It says who works there, with an exit code of its own; afterwards the backup goes."""
    index = index_at(tmp_path)
    for day, path in enumerate(("old", "new")):
        shelve(index, path, day)
    command = ("prune", "-s", str(tmp_path), "--keep-last", "1", "--confirm")
    with lease.acquire(index.store_of("old"), "backup"):
        refused = tikv_br(*command, *JSON)
        assert (refused.code, refused.last["name"]) == (LeaseHeld.exit_code, "LeaseHeld")
        assert "old: " in refused.last["message"]
        assert (tmp_path / "old" / "backupmeta").exists()
    succeed(*command)
    assert not (tmp_path / "old").exists()


def test_abort_and_unlock_find_a_backup_by_its_id(tmp_path: Path) -> None:
    """It is complete, so only its unfinished restores can be discarded."""
    entry = shelve(index_at(tmp_path), "one")
    root = ("-s", str(tmp_path))
    assert succeed("backup", "abort", entry.id[:8], *root, "--restores", *JSON).last["forgotten_restores"] == 0
    assert tikv_br("backup", "abort", "newest", *root).code == BackupPathInUse.exit_code
    assert not succeed("backup", "unlock", "newest", *root, *JSON).last["held"]
    assert tikv_br("backup", "unlock", str(tmp_path / "one"), *root).code == 2
