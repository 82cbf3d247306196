"""Removal of backups: resumable after an interruption anywhere, and nothing else is ever removed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.support.faulty_store import FaultyStore
from tests.support.ledgers import begin_backup
from tests.unit.backupset.shelves import index_at, make_backup, make_foreign, names, shelve
from tikv_br import records
from tikv_br.backupset import layout, lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index, entry_name, pin_name, removal_name
from tikv_br.backupset.index_entry import entry_of_backup
from tikv_br.backupset.prune import check_deletable, delete, execute, plan
from tikv_br.backupset.removal import Removal, finish_removal, interrupted_removals, remove
from tikv_br.backupset.retention import Policy
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupPathInUse,
    LeaseHeld,
    StorageUnreachable,
    UsageError,
)
from tikv_br.storage.base import ObjectInfo, ObjectStore
from tikv_br.storage.local import TEMPORARY_PREFIX
from tikv_br.storage.open import open_store

LAST = Policy(last=1)
STEPS = 21
"""Writes that removing one sample backup takes: lease (2), mark, lease, lock, lease, meta, manifest, three files, lease, lock,
the lease's (4), folder, pin, entry, mark."""
META_GONE = 7
"""After so many of them it is a backup no more."""


class Journal(FaultyStore):
    """Writes down every change, for all stores of one index together; fails by a script that they share."""

    def __init__(self, inner: ObjectStore, changes: list[str], script: list[str]) -> None:
        super().__init__(inner, "")
        self._script = script
        self._changes = changes

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """Note and pass on."""
        done = super().put(name, data)
        self._changes.append(f"put {name}")
        return done

    def delete(self, name: str) -> None:
        """Note and pass on."""
        super().delete(name)
        self._changes.append(f"delete {name}")


class JournalIndex(Index):
    """An index whose root and backups note their changes."""

    def __init__(self, root: ObjectStore, script: str = "") -> None:
        self.changes: list[str] = []
        self._script = list(script)
        super().__init__(Journal(root, self.changes, self._script))

    def store_of(self, path: str) -> ObjectStore:
        """A store that takes part in the journal."""
        return Journal(super().store_of(path), self.changes, self._script)


def prune(index: Index, policy: Policy = LAST, *, include_foreign: bool = False) -> set[str]:
    """Plan and carry out; the paths that went."""
    gone: set[str] = set()
    failed = execute(index, plan(index, policy, include_foreign=include_foreign), lambda _id, path: gone.add(path))
    assert failed == []
    return gone


def paths(index: Index) -> list[str]:
    """Paths of the listed backups."""
    return [each.entry.path for each in index.read()]


def test_order_is_the_reverse_of_writing(index: Index) -> None:
    """The mark before all; then backupmeta, manifest, files, lock, index entry, and the mark last."""
    entry = shelve(index, "a")
    files = BackupSet.open(index.store_of("a")).files
    journal = JournalIndex(index.root)
    assert remove(journal, entry)
    changes = journal.changes
    assert changes[:4] == [
        f"put {removal_name(entry.id)}",
        "put backup.lock",
        "delete backupmeta",
        "delete tikv-br/manifest.json",
    ]
    assert sorted(changes[4:7]) == sorted(f"delete {file.name}" for file in files)
    assert changes[7:] == [
        "delete backup.lock",
        *(f"delete tikv-br/lease/0000000{number}.json" for number in (1, 2, 3, 4)),
        "delete a/backup.lock.gone",
        f"delete {pin_name(entry.id)}",
        f"delete {entry_name(entry.id)}",
        f"delete {removal_name(entry.id)}",
    ]
    assert len(changes) == STEPS - 5


@pytest.mark.parametrize("sign", ["a", "b"])
@pytest.mark.parametrize("step", range(STEPS + 2))
def test_broken_off_anywhere_and_run_again(index: Index, step: int, sign: str) -> None:
    """Whichever change fails, before or after its effect: the next prune leaves the kept backup and nothing of the other."""
    shelve(index, "old", 0)
    shelve(index, "new", 1)
    (Path(index.root.location.path) / "foreign.txt").write_text("mine")
    with contextlib.suppress(StorageUnreachable):
        prune(JournalIndex(index.root, "." * step + sign))
    assert BackupSet.open(index.store_of("new")).files
    half_way = {name for name in names(index.root) if name.startswith("old/")}
    listed = paths(index)
    if half_way:
        assert "old" in listed
    prune(index)
    assert paths(index) == ["new"]
    assert not any(name.startswith("old/") for name in names(index.root))
    assert not any("removals" in name for name in names(index.root))
    assert "foreign.txt" in names(index.root)
    make_backup(index.root.location.child("old"))


@pytest.mark.parametrize("step", range(META_GONE, STEPS + 1))
def test_new_backup_at_the_path_of_a_broken_off_removal_is_safe(index: Index, step: int) -> None:
    """Wherever a new backup may begin at the path, finishing the old removal harms neither it nor, later, its files."""
    shelve(index, "a", 0)
    shelve(index, "b", 1)
    with contextlib.suppress(StorageUnreachable):
        prune(JournalIndex(index.root, "." * step + "b"))
    location = index.root.location.child("a")
    try:
        begin_backup(open_store(location))
    except BackupPathInUse:
        return
    store = open_store(location)
    store.put("tikv-br/manifest.json", b"of the new one")
    parts = {name for name in names(store) if not name.startswith("tikv-br/lease/")}
    before = {name: store.get(name) for name in parts}
    assert layout.LOCK in before
    prune(index)
    assert {name: store.get(name) for name in names(store)} == before


def test_complete_backup_is_not_finished_off(index: Index) -> None:
    """The mark of an interrupted or older prune beside a whole backup removes nothing; the policy decides again."""
    entry = shelve(index, "a")
    with pytest.raises(StorageUnreachable):
        remove(JournalIndex(index.root, "." * (META_GONE - 1) + "b"), entry)
    (removal,) = interrupted_removals(index)
    assert not finish_removal(index, removal)
    assert BackupSet.open(index.store_of("a")).files
    assert [each.removing for each in index.read()] == [False]
    index.pin(entry)


def test_pinned_backup_stays_under_any_policy(index: Index) -> None:
    """Also when the pin comes after the plan was made."""
    pinned = shelve(index, "pinned", 0)
    late = shelve(index, "late", 1)
    shelve(index, "new", 2)
    index.pin(pinned)
    wanted = plan(index, LAST)
    assert [entry.path for entry in wanted.to_remove] == ["late"]
    index.pin(late)
    assert execute(index, wanted) == []
    assert paths(index) == ["new", "late", "pinned"]
    for path in paths(index):
        assert BackupSet.open(index.store_of(path)).files
    assert interrupted_removals(index) == []


def test_backup_under_removal_cannot_be_pinned(index: Index) -> None:
    """The mark is written first: a pin that comes later learns that it is too late."""
    entry = shelve(index, "a")
    with pytest.raises(StorageUnreachable):
        remove(JournalIndex(index.root, "." * META_GONE + "b"), entry)
    with pytest.raises(BackupNotFound, match="being removed"):
        index.pin(entry)
    assert [(each.pinned, each.removing) for each in index.read()] == [(False, True)]


def test_ghost_does_not_push_out_a_backup(index: Index) -> None:
    """A newer entry without a backup counts for nothing: keep-last 1 keeps the newest that exists."""
    shelve(index, "real", 0)
    shelve(index, "ghost", 1)
    index.root.delete("ghost/backupmeta")
    wanted = plan(index, LAST)
    assert wanted.to_remove == []
    assert [ghost.path for ghost in wanted.ghosts] == ["ghost"]
    assert prune(index) == set()


def test_foreign_and_unfinished_things_stay(index: Index) -> None:
    """Backups of the Go tool, running backups and foreign files are neither removed nor counted."""
    shelve(index, "old", 0)
    shelve(index, "new", 1)
    foreign = shelve(index, "go", 9)
    make_foreign(index.store_of("go"))
    index.remove_entry(foreign.id)
    backup = BackupSet.open(index.store_of("go"))
    index.add(entry_of_backup("go", backup, 10**13))
    begin_backup(index.store_of("unfinished"))
    index.root.put("old/sst/notes.txt", b"mine")
    index.root.put("old/nested/sst/x_default.sst", b"mine")
    before = names(index.root)
    assert prune(index) == {"old"}
    after = names(index.root)
    assert {name for name in before if not name.startswith(("old/", "tikv-br-index/"))} <= after
    assert {name for name in after if name.startswith("old/")} == {"old/sst/notes.txt", "old/nested/sst/x_default.sst"}
    assert paths(index) == ["go", "new"]
    assert prune(index, include_foreign=True) == {"new"}
    assert paths(index) == ["go"]


def test_foreign_backup_is_removed_when_asked(index: Index) -> None:
    """With include_foreign a Go backup goes like any other, files and all."""
    entry = shelve(index, "go", 0)
    make_foreign(index.store_of("go"))
    index.remove_entry(entry.id)
    backup = BackupSet.open(index.store_of("go"))
    index.add(entry_of_backup("go", backup, 1000))
    shelve(index, "new", 1)
    assert prune(index, include_foreign=True) == {"go"}
    assert not any(name.startswith("go/") for name in names(index.root))


def test_other_ranges_and_clusters_have_histories_of_their_own(index: Index) -> None:
    """keep-last 1 keeps one for each cluster."""
    shelve(index, "one-old", 0, cluster_id=1)
    shelve(index, "one-new", 1, cluster_id=1)
    shelve(index, "two-old", 0, cluster_id=2)
    assert prune(index) == {"one-old"}


def test_backups_of_drills_do_not_push_out_others(index: Index) -> None:
    """They have the same cluster and ranges, but their own history."""
    shelve(index, "daily", day=0)
    for day in (1, 2):
        shelve(index, f"drill-2026112{day}T000000-0a1b", day=day)
    prune(index)
    assert set(paths(index)) == {"daily", "drill-20261122T000000-0a1b"}


def test_delete_refuses_the_base_of_another_backup(index: Index) -> None:
    """It names the backups that continue it; these can be deleted, and then the base."""
    shelve(index, "full", 1)
    child = shelve(index, "next", 2, parent=index.root.location.child("full").redacted())
    with pytest.raises(UsageError, match=f"{child.id} \\(next\\)"):
        delete(index, index.find_path("full"))
    assert index.is_backup(index.find_path("full").entry)
    delete(index, index.find_path("next"))
    delete(index, index.find_path("full"))
    assert index.read() == []
    assert names(index.root) <= {"tikv-br-index/snapshot.json"}


def test_delete_of_what_is_not_listed(index: Index) -> None:
    """It may be unfinished: the command that removes it is named."""
    shelve(index, "one")
    with pytest.raises(BackupNotFound, match="no backup at two") as refused:
        index.find_path("two")
    assert "`tikv-br abort`" in refused.value.hint


def test_delete_refuses_a_pinned_backup(index: Index) -> None:
    """It names the command that would allow it."""
    entry = shelve(index, "one")
    index.pin(entry)
    with pytest.raises(UsageError, match="is pinned") as refused:
        check_deletable(index, index.find_path("one"))
    assert f"unpin {entry.id}" in str(refused.value.hint)


@pytest.mark.parametrize("done", [META_GONE - 1, META_GONE, STEPS - 2])
def test_interrupted_delete_is_finished_by_the_next(tmp_path: Path, done: int) -> None:
    """Before and after `backupmeta` is gone."""
    shelve(index_at(tmp_path), "one")
    failing = JournalIndex(open_store(index_at(tmp_path).root.location), "." * done + "b")
    with pytest.raises(StorageUnreachable):
        delete(failing, failing.find_path("one"))
    index = index_at(tmp_path)
    delete(index, index.find_path("one"))
    assert index.read() == []
    assert interrupted_removals(index) == []
    assert not (tmp_path / "one").exists()


def test_parent_of_a_kept_backup_stays(index: Index) -> None:
    """An incremental keeps what it continues."""
    shelve(index, "full", 0)
    shelve(index, "other", 1)
    shelve(index, "next", 2, parent=index.root.location.child("full").redacted())
    assert prune(index) == {"other"}


@pytest.mark.parametrize("victim", ["tikv-br/manifest.json", "backupmeta"])
def test_damaged_backup_is_left_alone(index: Index, victim: str) -> None:
    """A backup whose records do not name its files is reported, not half removed; the others go."""
    shelve(index, "damaged", 0)
    shelve(index, "old", 1)
    shelve(index, "new", 2)
    index.root.put(f"damaged/{victim}", b"\0garbage")
    before = {name for name in names(index.root) if name.startswith("damaged/")}
    failed = execute(index, plan(index, LAST))
    assert [(entry.path, type(error)) for entry, error in failed] == [("damaged", BackupDamaged)]
    assert {name for name in names(index.root) if name.startswith("damaged/")} == before
    assert paths(index) == ["new", "damaged"]


def test_replaced_backup_is_not_removed_in_the_place_of_another(index: Index) -> None:
    """An entry whose path holds another backup by now removes nothing."""
    entry = shelve(index, "a")
    for name in names(index.store_of("a")):
        index.store_of("a").delete(name)
    make_backup(index.root.location.child("a"), cluster_id=99)
    with pytest.raises(BackupNotFound, match="not the one in the index"):
        remove(index, entry)
    assert BackupSet.open(index.store_of("a")).cluster_id == 99
    assert interrupted_removals(index) == []


def test_mark_cannot_lead_out_of_the_root(index: Index) -> None:
    """An edited mark does not make prune delete elsewhere."""
    index.root.put(removal_name("0" * 16), records.dump(Removal("0" * 16, "../outside", (), ("x",))))
    with pytest.raises(BackupDamaged, match="not a valid object name"):
        interrupted_removals(index)


def test_path_that_a_run_works_at_is_left_to_it(index: Index) -> None:
    """A living lease keeps prune away from a backup and from the rest of a removal; all else is done."""
    old = shelve(index, "old", 0)
    shelve(index, "older", 0)
    shelve(index, "new", 1)
    wanted = plan(index, LAST)
    with lease.acquire(index.store_of("old"), "backup"):
        ((entry, error),) = execute(index, wanted)
        assert (entry.id, type(error)) == (old.id, LeaseHeld)
        assert BackupSet.open(index.store_of("old")).files
    assert sorted(paths(index)) == ["new", "old"]
    with pytest.raises(StorageUnreachable):
        prune(JournalIndex(index.root, "." * META_GONE + "b"))
    with lease.acquire(index.store_of("old"), "backup"):
        prune(index)
        assert [removal.path for removal in interrupted_removals(index)] == ["old"]
    prune(index)
    assert paths(index) == ["new"]


def test_files_of_a_killed_prune_are_removed_with_the_backup(index: Index, tmp_path: Path) -> None:
    """The temporary file of a rewritten lock, which no listing shows, is removed with its folder."""
    for day, path in enumerate(("old", "new")):
        shelve(index, path, day)
    (tmp_path / "old" / f"{TEMPORARY_PREFIX}half").write_bytes(b"DO NOT")
    assert prune(index) == {"old"}
    assert not (tmp_path / "old").exists()
