"""Rebuilding the index from the backups."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from tests.support.ledgers import begin_backup
from tests.unit.backupset.shelves import index_at, make_backup, make_foreign, names, shelve
from tikv_br.backupset.index import Index, entry_name, entry_of, rebuild
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import BackupDamaged, BackupUnsupported


def paths(index: Index) -> set[str]:
    """Paths of the listed backups."""
    return {each.entry.path for each in index.read()}


def test_lost_index_comes_back_the_same(index: Index) -> None:
    """All of its objects deleted, a rebuild gives the very entries that the backups had written themselves."""
    for path in ("a", "b", "deeper/down/c"):
        made = make_backup(index.root.location.child(path))
        index.add(entry_of(path, made))
    before = index.read()
    for name in names(index.root):
        if name.startswith("tikv-br-index/"):
            index.root.delete(name)
    done = rebuild(index)
    assert (done.found, done.added, done.dropped, done.problems) == (3, 3, 0, ())
    assert index.read() == before
    assert rebuild(index)[:3] == (3, 0, 0)


def test_pins_survive(index: Index) -> None:
    """Ids are derived from the backups, so a pin finds its backup again."""
    entry = shelve(index, "a")
    index.pin(entry)
    index.root.delete(entry_name(entry.id))
    rebuild(index)
    assert [each.pinned for each in index.read()] == [True]


def test_ghosts_and_nonsense_go(index: Index) -> None:
    """Entries without a backup, and objects that are no entries, leave the index."""
    shelve(index, "a", 0)
    shelve(index, "gone", 1)
    index.root.delete("gone/backupmeta")
    index.root.put(entry_name("f" * 16), b"nonsense")
    done = rebuild(index)
    assert (done.found, done.added, done.dropped) == (1, 0, 2)
    assert paths(index) == {"a"}


def test_wrong_entry_is_put_right(index: Index) -> None:
    """The content of an entry is checked against its backup, and corrected."""
    made = make_backup(index.root.location.child("a"))
    right = entry_of("a", made)
    index.add(structs.replace(right, total_kvs=1))
    rebuild(index)
    assert [each.entry for each in index.read()] == [right]


def test_unfinished_backups_are_none(index: Index) -> None:
    """Only backupmeta makes a backup."""
    begin_backup(index.store_of("running"))
    assert rebuild(index).found == 0


def test_damaged_backup_is_reported_and_keeps_its_entry(index: Index) -> None:
    """It may be the one that is needed: it stays in the list that it was in, and the report names it."""
    shelve(index, "a", 0)
    shelve(index, "damaged", 1)
    index.root.put("damaged/tikv-br/manifest.json", b"{}")
    done = rebuild(index)
    assert [(problem.path, type(problem.error)) for problem in done.problems] == [("damaged", BackupDamaged)]
    assert paths(index) == {"a", "damaged"}


def test_backups_of_other_tools_are_listed_as_such(index: Index) -> None:
    """Go backups get an entry with the time of their backupmeta; those of TiDB are a problem, not an entry."""
    shelve(index, "go")
    make_foreign(index.store_of("go"))
    index.root.put("tidb/backupmeta", brpb_pb2.BackupMeta(br_version="v8").SerializeToString())
    done = rebuild(index)
    assert [(problem.path, type(problem.error)) for problem in done.problems] == [("tidb", BackupUnsupported)]
    (listed,) = index.read()
    assert listed.entry.is_foreign
    assert (listed.entry.path, listed.entry.api_version, listed.entry.files) == ("go", None, 3)
    assert listed.entry.finished_ms == index.store_of("go").stat("backupmeta").modified_ms


def test_backup_that_finishes_meanwhile_keeps_its_entry(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entered after the listing has passed its place, it is neither found nor dropped."""
    shelve(index, "a")
    plain = index.root.list

    def list_then_commit(folder: str = "") -> object:
        yield from list(plain(folder))
        if not folder:
            shelve(index_at(Path(index.root.location.path)), "late", 1)

    monkeypatch.setattr(index.root, "list", list_then_commit)
    rebuild(index)
    assert paths(index) == {"a", "late"}


def test_moved_backup_is_found_where_it_is(index: Index, tmp_path: Path) -> None:
    """A directory renamed by hand is one entry at its new path."""
    shelve(index, "a")
    (tmp_path / "a").rename(tmp_path / "b")
    done = rebuild(index)
    assert (done.found, done.added, done.dropped) == (1, 1, 1)
    assert paths(index) == {"b"}
