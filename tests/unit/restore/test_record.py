"""The record of an unfinished restore, broken off at every change to the storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faulty_store import FaultyStore
from tikv_br.backupset.coverage import KeyRange, subtract
from tikv_br.errors import BackupDamaged, StorageUnreachable
from tikv_br.restore.record import Begun, RestoreRecord, remove_all
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

WHOLE = KeyRange(b"a", b"")
SPANS = [KeyRange(b"a", b"b"), KeyRange(b"b", b"c"), KeyRange(b"c", b"")]
BEGUN = Begun(cluster_id=7, empty=(WHOLE,), started_ms=1)


def record_in(store: ObjectStore) -> RestoreRecord:
    """The same restore each time."""
    return RestoreRecord.of(store, 7, b"backupmeta", [(b"", b"")])


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """An empty storage."""
    return open_store(parse(f"local://{tmp_path / 'backup'}"))


def missing_now(store: ObjectStore) -> list[KeyRange] | None:
    """What a run would still have to do; None when it would begin anew."""
    record = record_in(store)
    begun = record.begun()
    return None if begun is None else subtract([WHOLE], record.restored(begun))


def test_what_was_added_is_not_missing(store: ObjectStore) -> None:
    """Begun, then one part after the other, then nothing is left to be seen."""
    record = record_in(store)
    assert missing_now(store) is None
    record.begin(BEGUN)
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
    record.begin(BEGUN)
    for span in SPANS:
        record.add(span)
    try:
        record_in(FaultyStore(store, "." * step + fault)).complete(BEGUN, [WHOLE])
    except StorageUnreachable:
        assert missing_now(store) in ([], None)
        record.complete(BEGUN, [WHOLE])
    assert list(store.list()) == []


@pytest.mark.parametrize("step", range(5))
def test_a_fresh_begin_broken_off_never_takes_over_old_entries(store: ObjectStore, step: int) -> None:
    """What another restore has left must not count as done by the one that begins anew."""
    record = record_in(store)
    record.begin(BEGUN)
    for span in SPANS:
        record.add(span)
    with pytest.raises(StorageUnreachable):
        record_in(FaultyStore(store, "." * step + "b")).begin(BEGUN)
    if step:
        assert missing_now(store) is None
    record.begin(BEGUN)
    assert missing_now(store) == [WHOLE]


def test_restores_of_other_kinds_have_records_of_their_own(store: ObjectStore) -> None:
    """Another cluster, another backup, another prefix: none goes on with what is not its own."""
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
    record.begin(BEGUN)
    record.add(SPANS[0])
    (name,) = (info.name for info in store.list() if not info.name.endswith("begun.json"))
    store.put(name, store.get(name).replace(b'"start": "61"', b'"start": ""'))
    with pytest.raises(BackupDamaged, match=name):
        record.restored(BEGUN)


def test_all_records_of_a_backup_go_at_once(store: ObjectStore) -> None:
    """Abort knows no cluster: it removes the records of every restore."""
    for cluster in (1, 2):
        record = RestoreRecord.of(store, cluster, b"backupmeta", [])
        record.begin(BEGUN)
        record.add(SPANS[0])
    assert remove_all(store) == 2
    assert list(store.list()) == []
