"""Removal of backups: resumable after an interruption anywhere, and nothing else is ever removed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

import pytest
from msgspec import structs

from tests.support.faulty_store import FaultyStore
from tests.support.ledgers import begin_backup
from tests.support.openssl import crypter
from tests.unit.backupset.shelves import (
    DAY_MS,
    FIRST_MS,
    index_at,
    index_entry,
    make_backup,
    make_foreign,
    names,
    shelve,
)
from tikv_br import records
from tikv_br.backupset import layout, lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import (
    Index,
    IndexEntry,
    entry_id,
    entry_name,
    entry_of_backup,
    pin_name,
    rebuild,
    removal_name,
)
from tikv_br.backupset.prune import (
    Policy,
    Removal,
    check_deletable,
    delete,
    execute,
    finish_removal,
    interrupted_removals,
    plan,
    remove,
)
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupPathInUse,
    CrypterMismatch,
    LeaseHeld,
    StorageNotRegular,
    StorageUnreachable,
    UsageError,
)
from tikv_br.storage.base import ObjectInfo, ObjectStore
from tikv_br.storage.local import TEMPORARY_PREFIX
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

LAST = Policy(last=1)
STEPS = 23
"""Writes that removing one sample backup takes: lease (2), mark, lease, copy, lock, lease, meta, manifest, three files, copy, lease,
lock, the lease's (4), folder, pin, entry, mark."""
META_GONE = 8
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
    """The mark before all; then backupmeta, manifest, files, the copy that names them, lock, index entry, and the mark last."""
    entry = shelve(index, "a")
    files = BackupSet.open(index.store_of("a")).files
    journal = JournalIndex(index.root)
    assert remove(journal, entry)
    changes = journal.changes
    assert changes[:5] == [
        f"put {removal_name(entry.id)}",
        "put tikv-br/removed-backupmeta",
        "put backup.lock",
        "delete backupmeta",
        "delete tikv-br/manifest.json",
    ]
    assert sorted(changes[5:8]) == sorted(f"delete {file.name}" for file in files)
    assert changes[8:] == [
        "delete tikv-br/removed-backupmeta",
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
    os.utime(Path(index.root.location.path, "go/backupmeta"), (1, 1))
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
    assert "`tikv-br backup abort`" in refused.value.hint


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


def forge_entry(index: Index, entry: IndexEntry, **changes: object) -> None:
    """Have an entry say something else, in place of its own words or under another id."""
    forged = structs.replace(entry, **changes)
    index.root.delete(entry_name(entry.id))
    index.root.put(entry_name(forged.id), records.dump(forged))


FORGED: dict[str, dict[str, object] | None] = {
    "lost": None,
    "without a parent": {"parent": ""},
    "with another parent": {"parent": "local:///elsewhere/other"},
    "of another tool": {"engine": "go", "parent": ""},
    "at another path": {"path": "other", "parent": ""},
    "of another id": {"id": "f" * 16, "parent": ""},
    "from the future": {"finished_ms": FIRST_MS + 10**12, "parent": ""},
    "without a time": {"finished_ms": 0, "parent": "", "cluster_id": 9, "scope": "e" * 16},
}


@pytest.mark.parametrize("forged", FORGED)
def test_the_base_of_an_increment_stays_whatever_its_entry_says(index: Index, forged: str) -> None:
    """By the increment's own manifest, wherever it lies below the root; to prune as to delete, and to finish a removal."""
    root = index.root.location
    base = shelve(index, "full", 0, backup_ts=5)
    shelve(index, "new", 1, backup_ts=9)
    child = shelve(index, "below/next", 2, backup_ts=6, since_ts=5, parent=root.child("full").redacted())
    if (changes := FORGED[forged]) is None:
        index.root.delete(entry_name(child.id))
    else:
        forge_entry(index, child, **changes)
    index.root.delete("tikv-br-index/snapshot.json")
    wanted = plan(index, LAST)
    assert "full" not in {entry.path for entry in wanted.to_remove}
    with pytest.raises(UsageError, match=f"{child.id} \\(below/next\\)"):
        delete(index, index.find_path("full"))
    index.root.put(removal_name(base.id), records.dump(Removal(base.id, "full", (), ())))
    store = index.store_of("full")
    store.put(layout.REMOVED, store.get(layout.META))
    store.delete(layout.META)
    before = everything(index)
    assert plan(index, LAST).interrupted == []
    execute(index, plan(index, LAST))
    assert {name for name in before if name.startswith("full/")} <= set(everything(index))


@pytest.mark.parametrize("hidden", ["one", "two", "one two"])
def test_a_chain_with_hidden_links_is_kept_whole(index: Index, hidden: str) -> None:
    """A link without an entry connects those that have one."""
    place = index.root.location
    shelve(index, "full", 0, backup_ts=5)
    for day, (name, parent) in enumerate((("one", "full"), ("two", "one"), ("three", "two")), 1):
        entry = shelve(index, name, day, backup_ts=5 + day, parent=place.child(parent).redacted())
        if name in hidden:
            index.root.delete(entry_name(entry.id))
    assert prune(index) == set()
    assert prune(index, Policy(daily=1)) == set()


def test_a_damaged_increment_keeps_its_base_only_by_its_entry(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be restored; an object that is in no index must not keep what prune would remove for ever."""
    shelve(index, "full", 0, backup_ts=5)
    child = shelve(index, "next", 1, backup_ts=6, parent=index.root.location.child("full").redacted())
    shelve(index, "new", 2, backup_ts=9)
    index.root.put("next/tikv-br/manifest.json", b"\0garbage")
    assert plan(index, LAST).to_remove == []
    index.root.delete(entry_name(child.id))
    assert prune(index) == {"full"}
    assert "ignored next, which is not in the index" in caplog.text


def test_nothing_is_removed_beside_a_hidden_backup_of_another_key(tmp_path: Path) -> None:
    """It may continue any backup; with its key, or with its entry, prune goes on. One in clear without timestamps has no increments."""
    place = parse(str(tmp_path))
    index, with_key = Index(open_store(place)), Index(open_store(replace(place, crypter=crypter("aes256-ctr"))))
    shelve(index, "old", 0, backup_ts=5)
    shelve(index, "new", 1, backup_ts=6)
    entry = shelve(with_key, "other", 2, encryption="aes256-ctr", cluster_id=3)
    index.root.delete(entry_name(entry.id))
    index.write_snapshot([])
    for refused in (partial(plan, index, LAST), partial(delete, index, index.find_path("old"))):
        with pytest.raises(CrypterMismatch, match="what other continues") as error:
            refused()
        assert "list --rebuild" in error.value.hint
    assert [each.path for each in plan(with_key, LAST).to_remove] == ["old"]
    with_key.add(entry)
    assert prune(index) == {"old"}


def test_backups_without_timestamps_are_removed_without_a_listing(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of API V1: nothing can continue them."""
    for day in range(3):
        shelve(index, f"backup-{day}", day)
    monkeypatch.setattr("tikv_br.backupset.prune.backups_below", None)
    assert prune(index) == {"backup-0", "backup-1"}
    delete(index, index.find_path("backup-2"))


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


def test_mark_cannot_lead_out_of_the_root(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    """An edited mark does not make prune delete elsewhere."""
    index.root.put(removal_name("0" * 16), records.dump(Removal("0" * 16, "../outside", (), ("x",))))
    assert interrupted_removals(index) == []
    assert "not a valid object name" in caplog.text


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


def everything(index: Index) -> dict[str, bytes]:
    """All objects but those of leases and of the index."""
    found = names(index.root)
    return {
        name: index.root.get(name) for name in found if "/lease/" not in name and not name.startswith("tikv-br-index/")
    }


def forge_removal(index: Index, path: str, listed: tuple[str, ...], meta: bytes = b"") -> str:
    """A mark as whoever may write to the storage can make it, with the entry and the copy that it needs; returns its id."""
    forged = entry_id(path, hashlib.sha256(meta).digest())
    index.root.put(
        entry_name(forged), records.dump(structs.replace(index_entry(1), id=forged, path=path, finished_ms=1))
    )
    index.root.put(removal_name(forged), records.dump(Removal(forged, path, listed, listed)))
    if meta:
        index.root.put(f"{path}/{layout.REMOVED}", meta)
    return forged


def forged_meta(*listed: str) -> bytes:
    """A `backupmeta` that lists files of these names."""
    message = brpb_pb2.BackupMeta(
        cluster_id=1, br_version="v1.1.0", is_raw_kv=True,
        raw_ranges=[brpb_pb2.RawRange(start_key=b"a", end_key=b"z", cf="default")],
        files=[brpb_pb2.File(name=name, start_key=b"a", end_key=b"z", cf="default", sha256=bytes(32)) for name in listed],
    )  # fmt: skip
    return message.SerializeToString()


@pytest.mark.parametrize("path", ["prod", "prod/sst", "up", "up/prod"])
def test_a_forged_mark_destroys_no_backup(index: Index, path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it lists, and wherever it lies: in a backup, above one, or without an entry of its own."""
    pinned = shelve(index, "prod", 0)
    index.pin(pinned)
    shelve(index, "up/prod", 1, cluster_id=5)
    victims = sorted(everything(index))
    before = everything(index)
    listed = tuple(PurePosixPath(os.path.relpath(name, path)).as_posix() for name in victims if name.startswith(path))
    forged = forge_removal(index, path, listed)
    execute(index, plan(index, LAST))
    assert everything(index) == before
    index.root.delete(entry_name(forged))
    index.root.put(removal_name(forged), records.dump(Removal(forged, path, listed, listed)))
    execute(index, plan(index, LAST))
    assert everything(index) == before
    assert f"{forged}) is being removed: the index has no such backup" in caplog.text
    assert forged not in index.removal_ids()


def test_a_forged_copy_names_no_file_of_another_backup(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    """Mark, entry and copy agree, and list the files of a backup in a folder below, or of the one that they lie in, or records."""
    shelve(index, "up/prod", 0)
    files = [file.name for file in BackupSet.open(index.store_of("up/prod")).files]
    deep = files[0].rpartition("/")
    forge_removal(index, "up", (), forged_meta(*(f"prod/{name}" for name in files)))
    forge_removal(index, f"up/prod/{deep[0]}", (), forged_meta(deep[2]))
    forge_removal(index, "record", (), forged_meta("tikv-br/x.sst"))
    forge_removal(index, "odd", (), forged_meta("notes.txt"))
    index.root.put("odd/notes.txt", b"mine")
    index.root.put("record/tikv-br/x.sst", b"mine")
    before = everything(index)
    assert len(plan(index, LAST).interrupted_removals) == 4
    assert execute(index, plan(index, LAST)) == []
    assert everything(index) == before
    assert caplog.text.count("which is another backup") == 2
    assert caplog.text.count("which is no data file") == 2


def test_a_backup_that_claims_files_of_another_is_not_removed(index: Index) -> None:
    """A complete one, with an old date, in the folder above: the policy would remove it."""
    shelve(index, "up/prod", 1)
    files = [file.name for file in BackupSet.open(index.store_of("up/prod")).files]
    meta = forged_meta(*(f"prod/{name}" for name in files))
    index.root.put("up/backupmeta", meta)
    os.utime(Path(index.root.location.path, "up/backupmeta"), (1, 1))
    index.add(entry_of_backup("up", BackupSet.open(index.store_of("up")), 1000))
    before = everything(index)
    shelve(index, "other", 9, cluster_id=1)
    with pytest.raises(BackupDamaged, match="which is another backup"):
        remove(index, index.find_path("up").entry)
    assert {name: data for name, data in everything(index).items() if not name.startswith("other/")} == before


def test_marks_of_pinned_backups_and_of_parents_are_ignored(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    """Although `backupmeta` is gone, as by an interrupted removal: who deleted it did not have to be a prune."""
    for path in ("pinned", "full"):
        entry = shelve(index, path)
        store = index.store_of(path)
        index.root.put(removal_name(entry.id), records.dump(Removal(entry.id, path, (), ())))
        store.put(layout.REMOVED, store.get(layout.META))
        if path == "pinned":
            index.root.put(pin_name(entry.id), b"")
    shelve(index, "next", 1, parent=index.root.location.child("full").redacted())
    for path in ("pinned", "full"):
        index.store_of(path).delete(layout.META)
    before = everything(index)
    execute(index, plan(index, LAST))
    assert everything(index) == before
    assert "the backup is pinned" in caplog.text
    assert "others continue the backup" in caplog.text


def test_entries_from_the_future_push_out_no_backup(index: Index) -> None:
    """Neither forged entries without a backup, nor those of other ids at its path, nor ones that count a backup anew."""
    shelve(index, "one", 0)
    shelve(index, "two", 1)
    newest = shelve(index, "three", 2)
    future = FIRST_MS + 10**12
    for number in range(3):
        forged = structs.replace(newest, id=f"{number:016x}", path=f"forged-{number}", finished_ms=future + number)
        index.root.put(entry_name(forged.id), records.dump(forged))
    wanted = plan(index, Policy(last=3))
    assert wanted.to_remove == []
    assert len(wanted.ghosts) == 3
    forged = structs.replace(newest, id="f" * 16, path="one", finished_ms=future)
    index.root.put(entry_name(forged.id), records.dump(forged))
    wanted = plan(index, Policy(last=1))
    assert [entry.path for entry in wanted.to_remove] == ["two"]
    ((refused, error),) = wanted.refused
    assert (refused, type(error)) == (forged, BackupNotFound)


def test_what_an_entry_says_of_its_backup_does_not_count(index: Index) -> None:
    """Dates and scope are those of the manifest: the newest stays, and the oldest goes."""
    old, new = shelve(index, "old", 0), shelve(index, "new", 1)
    for entry, changes in ((old, {"finished_ms": FIRST_MS + 9 * DAY_MS}), (new, {"finished_ms": 5, "scope": "f" * 16})):
        index.root.put(entry_name(entry.id), records.dump(structs.replace(entry, **changes)))
    index.root.delete("tikv-br-index/snapshot.json")
    assert prune(index) == {"old"}


def test_backups_that_were_finished_in_the_future_count_as_none(index: Index) -> None:
    """By their own manifests: compared with the storage's time of `backupmeta`, and with the clock of this machine."""
    shelve(index, "real", 0)
    shelve(index, "future", 100_000)
    shelve(index, "later", 1)
    os.utime(Path(index.root.location.path, "later/backupmeta"), (FIRST_MS / 1000 - 7200, FIRST_MS / 1000 - 7200))
    wanted = plan(index, LAST)
    assert wanted.to_remove == []
    assert {entry.path for entry, _error in wanted.refused} == {"future", "later"}
    assert all("finished in the future" in error.message for _entry, error in wanted.refused)


def test_a_clock_that_is_behind_removes_less(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose clock stands before all backups nothing counts, and nothing goes."""
    for day in range(3):
        shelve(index, f"backup-{day}", day)
    monkeypatch.setattr(time, "time", lambda: FIRST_MS / 1000 - 7200)
    wanted = plan(index, LAST)
    assert (wanted.to_remove, len(wanted.refused)) == ([], 3)


def test_an_entry_takes_no_pin_of_another_backup(index: Index) -> None:
    """A forged entry at the path of a new backup has the id of a pinned one."""
    pinned = shelve(index, "prod", 0)
    index.pin(pinned)
    index.root.put(entry_name(pinned.id), records.dump(structs.replace(pinned, path="daily")))
    index.root.delete("tikv-br-index/snapshot.json")
    shelve(index, "daily", 1)
    rebuild(index)
    assert [each.pinned for each in index.read() if each.entry.path == "prod"] == [True]


def test_links_in_place_of_backups_are_not_followed(index: Index, tmp_path: Path) -> None:
    """A backup elsewhere, that a link below the root leads to, is neither counted nor removed; a linked ledger is not looked into."""
    outside = index_at(tmp_path.parent / f"{tmp_path.name}-outside")
    shelve(outside, "victim", 0)
    entry = structs.replace(shelve(index, "linked", 0))
    shelve(index, "new", 1)
    shutil.rmtree(Path(index.root.location.path, "linked"))
    Path(index.root.location.path, "linked").symlink_to(Path(outside.root.location.path, "victim"))
    before = everything(outside)
    ((failed, error),) = execute(index, plan(index, LAST))
    assert (failed, type(error)) == (entry, StorageNotRegular)
    assert everything(outside) == before
    shelve(index, "old", -5)
    Path(index.root.location.path, "old/tikv-br/ledger").symlink_to(Path(outside.root.location.path))
    execute(index, plan(index, LAST))
    assert everything(outside) == before
    assert not index.is_backup(structs.replace(entry, path="old"))
