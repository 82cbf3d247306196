"""The record of an unfinished restore, interrupted at every change to the storage."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from tests.support.damage import FLIPS, Victim, cases, read_objects
from tests.support.faulty_store import FaultyStore
from tikv_br.errors import BackupDamaged, StorageUnreachable
from tikv_br.formats.keys.ranges import KeyRange, subtract
from tikv_br.restore.record import (
    ImportModeRecord,
    RestoreCheckpoint,
    RestoreRecord,
    import_mode_records,
    remove_all,
    schedulers_of,
)
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

WHOLE = KeyRange(b"a", b"")
SPANS = [KeyRange(b"a", b"b"), KeyRange(b"b", b"c"), KeyRange(b"c", b"")]
BEGUN = RestoreCheckpoint(cluster_id=7, empty=(WHOLE,), started_ms=1)


def record_in(store: ObjectStore) -> RestoreRecord:
    """The same restore each time."""
    return RestoreRecord.of(store, 7, b"backupmeta", [(b"", b"")])


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """An empty storage."""
    return open_store(parse(f"local://{tmp_path / 'backup'}"))


def missing_now(store: ObjectStore) -> list[KeyRange] | None:
    """Parts that a run still has to ingest; None when it would start over."""
    record = record_in(store)
    begun = record.read_checkpoint()
    return None if begun is None else subtract([WHOLE], record.restored_ranges(begun))


def test_added_parts_are_not_missing(store: ObjectStore) -> None:
    """After its creation, parts are added until nothing is missing."""
    record = record_in(store)
    assert missing_now(store) is None
    record.create_checkpoint(BEGUN)
    for span in SPANS:
        assert missing_now(store) == [KeyRange(span.start, b"")]
        record.add(span)
    assert missing_now(store) == []
    record.complete(BEGUN, [WHOLE])
    assert list(store.list()) == []


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("fault", "ba")
def test_an_end_broken_off_anywhere_leaves_nothing_to_do(store: ObjectStore, step: int, fault: str) -> None:
    """Whichever change fails, before or after its effect, the next run has nothing to ingest and finishes the end."""
    record = record_in(store)
    record.create_checkpoint(BEGUN)
    for span in SPANS:
        record.add(span)
    try:
        record_in(FaultyStore(store, "." * step + fault)).complete(BEGUN, [WHOLE])
    except StorageUnreachable:
        assert missing_now(store) in ([], None)
        record.complete(BEGUN, [WHOLE])
    assert list(store.list()) == []


@pytest.mark.parametrize("faults", ["a", "b", "bba"])
def test_a_restore_does_not_fail_by_its_last_deletion(store: ObjectStore, faults: str) -> None:
    """A lost answer to it would leave rows in the target and no word of whose they are: it is asked for again."""
    record = record_in(store)
    record.create_checkpoint(BEGUN)
    for span in SPANS:
        record.add(span)
    record_in(FaultyStore(store, "." * (1 + len(SPANS)) + faults)).complete(BEGUN, [WHOLE])
    assert list(store.list()) == []


@pytest.mark.parametrize("step", range(5))
def test_a_fresh_begin_broken_off_never_takes_over_old_entries(store: ObjectStore, step: int) -> None:
    """Parts of another restore must not count as done for a new one."""
    record = record_in(store)
    record.create_checkpoint(BEGUN)
    for span in SPANS:
        record.add(span)
    with pytest.raises(StorageUnreachable):
        record_in(FaultyStore(store, "." * step + "b")).create_checkpoint(BEGUN)
    if step:
        assert missing_now(store) is None
    record.create_checkpoint(BEGUN)
    assert missing_now(store) == [WHOLE]


def test_restores_of_other_kinds_have_records_of_their_own(store: ObjectStore) -> None:
    """Restores of another cluster, backup or prefix do not resume from it."""
    ways = {
        RestoreRecord.of(store, cluster, meta, rewrites).id
        for cluster in (7, 8)
        for meta in (b"one", b"two")
        for rewrites in ([(b"", b"")], [(b"a", b"b")], [(b"a", b""), (b"", b"b")])
    }
    assert len(ways) == 12


def test_a_damaged_entry_is_no_proof(store: ObjectStore) -> None:
    """An entry that does not read ends the restore; it is not taken for done."""
    record = record_in(store)
    record.create_checkpoint(BEGUN)
    record.add(SPANS[0])
    (name,) = (info.name for info in store.list() if not info.name.endswith("begun.json"))
    store.put(name, store.get(name).replace(b'"start":"61"', b'"start":""'))
    with pytest.raises(BackupDamaged, match=name):
        record.restored_ranges(BEGUN)


def test_all_records_of_a_backup_go_at_once(store: ObjectStore) -> None:
    """Abort knows no cluster: it removes the records of every restore."""
    for cluster in (1, 2):
        record = RestoreRecord.of(store, cluster, b"backupmeta", [])
        record.create_checkpoint(BEGUN)
        record.add(SPANS[0])
    assert remove_all(store) == 2
    assert list(store.list()) == []


def test_damaged_records_of_restores_count_for_nothing(store: ObjectStore, tmp_path: Path) -> None:
    """Each of two restores has its own records: damaged or foreign ones are reported."""
    records = [RestoreRecord.of(store, cluster, b"backupmeta", []) for cluster in (7, 8)]
    before: dict[str, bytes] = {}
    for number, record in enumerate(records):
        record.create_checkpoint(structs.replace(BEGUN, cluster_id=7 + number))
        before = before or read_objects(tmp_path / "backup")
        record.update_checkpoint(structs.replace(BEGUN, cluster_id=7 + number, empty=(*BEGUN.empty, WHOLE)))
        for span in SPANS:
            record.add(span)
    objects = read_objects(tmp_path / "backup")
    victim, seen = Victim(tmp_path / "backup", objects), set()
    sound = [reported(record) for record in records]
    for case in cases(objects, before, lambda _kind: FLIPS):
        seen.add((case.kind, case.damage))
        victim.damage(case)
        found = [reported(record) for record in records]
        if case.damage in {"missing", "older"}:
            assert all(one <= other for one, other in zip(found, sound, strict=True)), str(case)
        else:
            said = " ".join(each for one in found for each in one if isinstance(each, str))
            assert any(name in said for name in case.change), str(case)
        victim.mend(case)
    every = {"missing", "empty", "truncated", "short of a byte", "swapped", "flipped"}
    assert seen == {(kind, damage) for kind in ("restore begun", "restore part") for damage in every} | {
        ("restore begun", "older")
    }


def reported(record: RestoreRecord) -> set[object]:
    """The spans that a restore may take for done or for its own, or what is said of a record that does not read."""
    try:
        begun = record.read_checkpoint()
        return set() if begun is None else {*record.restored_ranges(begun), *begun.empty}
    except BackupDamaged as error:
        return {error.message}


def test_damaged_records_of_import_mode_put_back_no_scheduler_of_others(store: ObjectStore, tmp_path: Path) -> None:
    """Whatever befalls a record, it stays known which restores want import mode, and only what one of them has paused goes on."""
    records = [RestoreRecord.of(store, 7, b"backupmeta", [(b"", new)]) for new in (b"a", b"b")]
    for record, name in zip(records, ("balance-leader-scheduler", "balance-region-scheduler"), strict=True):
        record.add_import_mode(7, ImportModeRecord((name,)))
    objects = read_objects(tmp_path / "backup")
    victim, sound, seen = Victim(tmp_path / "backup", objects), import_mode_records(store, 7), set()
    assert sound.keys() == {record.id for record in records}
    for case in cases(objects, {}, lambda _kind: FLIPS):
        seen.add(case.damage)
        victim.damage(case)
        found = import_mode_records(store, 7)
        assert schedulers_of(found) <= schedulers_of(sound), str(case)
        assert len(found) == 1 + (case.damage != "missing"), str(case)
        victim.mend(case)
    assert seen == {"missing", "empty", "truncated", "short of a byte", "swapped", "flipped"}
