"""Damage to what lies beside backups: leases, ledgers, records of runs, the index. It is named, and never acted on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.damage import Victim, by_kind, cases, kind_of, read_objects
from tests.support.ledgers import begin_backup, read_entries
from tests.unit.backupset.samples import describe, do_task
from tests.unit.backupset.shelves import index_at, shelve
from tikv_br import records
from tikv_br.backupset import layout, lease, ledger, manifest
from tikv_br.backupset.index import removal_name
from tikv_br.backupset.manifest import RunRecord
from tikv_br.backupset.prune import Policy, Removal, plan
from tikv_br.backupset.sealed import write_record
from tikv_br.errors import BackupDamaged
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


def unfinished(folder: Path) -> ObjectStore:
    """A run that holds its path, has left word of itself, and has done two tasks."""
    store = open_store(parse(str(folder)))
    begin_backup(store)
    write_record(
        store, layout.RUN, RunRecord("run", describe(store), assume_no_ttl=False, checksum=True, allow_loss=())
    )
    for number in (0, 2):
        ledger.write_entry(store, do_task(store, number, attempt="a1" * 8))
    held = lease.acquire(store, "backup")
    held._stop()  # as a killed process leaves it
    return store


READERS: dict[str, Callable[[ObjectStore], object]] = {
    "run": manifest.read_run,
    "ledger": read_entries,
    "lease": lease.newest,
}


@pytest.mark.parametrize("kind", READERS)
def test_records_of_unfinished_runs(tmp_path: Path, kind: str) -> None:
    """Whatever bit is turned over, whatever is cut or emptied, is said by the object's name; nothing is made of it."""
    store = unfinished(tmp_path)
    objects = {name: data for name, data in read_objects(tmp_path).items() if kind_of(name) == kind}
    usable_entries = READERS[kind](store)
    assert usable_entries
    seen = 0
    for case in cases(objects, {}, lambda _kind: 50):
        if case.damage in {"missing", "swapped"}:
            continue
        data = case.change[case.name]
        assert data is not None
        store.put(case.name, data)
        with pytest.raises(BackupDamaged, match=case.name) as caught:
            READERS[kind](store)
        assert caught.value.exit_code == 32
        store.put(case.name, objects[case.name])
        seen += 1
    assert seen == 53
    assert READERS[kind](store) == usable_entries


def test_ledger_entries_that_changed_places_say_the_same(tmp_path: Path) -> None:
    """Entries count by content: swapping two loses nothing; removing one loses its work."""
    store = unfinished(tmp_path)
    one, other = by_kind(dict.fromkeys(read_objects(tmp_path), b""))["ledger"]
    usable_entries = read_entries(store)
    first, second = store.get(one), store.get(other)
    store.put(one, second)
    store.put(other, first)
    assert read_entries(store) == usable_entries
    store.put(other, second)
    sizes = {info.name: info.size for info in store.list()}
    usable_entries = [entry for entry in read_entries(store) if ledger.has_its_files(entry, sizes)]
    assert len(ledger.without_overlaps(usable_entries)) == 1


def test_a_damaged_lease_says_what_to_do(tmp_path: Path) -> None:
    """It is no damage of a backup: the way out is another."""
    store = unfinished(tmp_path)
    (name,) = by_kind(dict.fromkeys(read_objects(tmp_path), b""))["lease"]
    store.put(name, b"{}")
    with pytest.raises(BackupDamaged) as caught:
        lease.check_free(store)
    assert "storage's own tools" in caught.value.hint


def test_an_index_entry_of_another_backup_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An entry in another's place is warned of and left out, as is one with a flipped bit; the rest is listed."""
    index = index_at(tmp_path)
    for path in ("a", "b"):
        shelve(index, path)
    names = sorted(info.name for info in index.root.list("tikv-br-index/entries"))
    index.root.delete("tikv-br-index/snapshot.json")
    index.root.put(names[0], index.root.get(names[1]))
    assert len(index.read()) == 1
    assert "holds the entry of" in caplog.text


def test_by_a_damaged_mark_of_a_removal_nothing_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A mark that does not read is named and ignored; the removals with an intact one are finished."""
    index = index_at(tmp_path)
    for path in ("a", "b", "c"):
        entry = shelve(index, path)
        store = index.store_of(path)
        names = tuple(info.name for info in store.list("sst"))
        removal = Removal(entry.id, path, ("tikv-br/manifest.json",), names)
        index.root.put(removal_name(entry.id), records.dump(removal))
        if path != "c":
            store.delete("backupmeta")
    objects = read_objects(tmp_path)
    marks = {name: data for name, data in objects.items() if name.startswith("tikv-br-index/removals/")}
    victim, usable_entries, seen = Victim(tmp_path, objects), plan(index, Policy(last=1)), set()
    assert len(usable_entries.interrupted_removals) == 3
    for case in cases(marks, {}, lambda _kind: 50):
        seen.add(case.damage)
        victim.damage(case)
        caplog.clear()
        left = plan(index, Policy(last=1)).interrupted_removals
        assert {removal_name(each.id) for each in left} == marks.keys() - case.change.keys(), str(case)
        if case.damage != "missing":
            assert all(name in caplog.text for name in case.change), str(case)
        victim.mend(case)
    assert seen == {"missing", "empty", "truncated", "short of a byte", "swapped", "flipped"}


def test_a_pin_holds_whatever_it_has_become(tmp_path: Path) -> None:
    """Pins count by their names, whatever their content. A missing one pins nothing, which cannot be detected."""
    index = index_at(tmp_path)
    old, new = shelve(index, "a"), shelve(index, "b", day=1)
    index.pin(old)
    for data in (b"", b"x", bytes(1000)):
        index.root.put(f"tikv-br-index/pins/{old.id}", data)
        assert plan(index, Policy(last=1)).to_remove == []
    index.root.delete(f"tikv-br-index/pins/{old.id}")
    assert plan(index, Policy(last=1)).to_remove == [old]
    assert new.id in {each.entry.id for each in index.read()}
