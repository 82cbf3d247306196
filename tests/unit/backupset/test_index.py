"""The index: what it lists, what may be lost of it, and what never is."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.support.faulty_store import FaultyStore
from tests.unit.backupset.shelves import index_at, index_entry, make_backup, names, shelve
from tikv_br import records
from tikv_br.backupset import index as index_module
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import SNAPSHOT, Index, add_to_index, entry_name, entry_of, load, place_of
from tikv_br.backupset.lease import Lease, LeaseOwner
from tikv_br.backupset.prune import Policy, plan
from tikv_br.cluster.timestamps import compose, show_time
from tikv_br.errors import BackupDamaged, BackupNotFound, StorageDenied, StorageError, StorageUnreachable, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.base import ObjectInfo, ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import S3Options, StorageLocation, parse


def ids(index: Index) -> list[str]:
    """As listed."""
    return [each.entry.id for each in index.read()]


class CountingStore(FaultyStore):
    """Counts what is read."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner, "")
        self.reads = 0

    def get(self, name: str) -> bytes:
        """Count and pass on."""
        self.reads += 1
        return super().get(name)


class MemoryStore(FaultyStore):
    """Keeps its objects in a dictionary: quick enough for many examples."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """Keep the object."""
        self.objects[name] = data
        return ObjectInfo(name, len(data))

    def get(self, name: str) -> bytes:
        """Return it."""
        return self.objects[name]

    def sweep(self, folder: str = "", *, deep: bool = False, older_than: float = 0.0) -> None:
        """Nothing is ever half written."""

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """Name all below a folder."""
        return (ObjectInfo(name, len(data)) for name, data in self.objects.items() if name.startswith(f"{folder}/"))


def test_backups_are_listed_newest_first(index: Index) -> None:
    """The list has the entries unchanged, in the order of finishing."""
    entries = [shelve(index, f"b{day}", day) for day in (2, 0, 1)]
    assert [each.entry for each in index.read()] == [entries[0], entries[2], entries[1]]
    assert not any(each.pinned or each.removing for each in index.read())


def test_folder_without_index_is_empty_and_without_objects_missing(index: Index) -> None:
    """Objects without an index are no backups; no object at all is a wrong URL."""
    with pytest.raises(BackupNotFound, match="nothing at"):
        index.read()
    index.root.put("other", b"")
    assert index.read() == []


def test_entry_tells_what_the_manifest_tells(index: Index) -> None:
    """The figures are the manifest's own, and the id is the same whenever it is computed."""
    made = make_backup(index.root.location.child("b"), backup_ts=77)
    entry = entry_of("b", made)
    assert (entry.total_kvs, entry.total_bytes) == (made.statistics.total_kvs, made.statistics.total_bytes)
    assert (entry.backup_size, entry.files, entry.backup_ts) == (made.statistics.backup_size, len(made.files), 77)
    assert (entry.api_version, entry.dst_api_version) == (ApiVersion.V1, ApiVersion.V2)
    assert entry == entry_of("b", made)
    assert entry.id != entry_of("elsewhere", made).id


def test_complete_snapshot_is_all_that_is_read(index: Index) -> None:
    """Fifty backups cost one object; entries that the snapshot lacks cost one more each."""
    for number in range(50):
        index.root.put(entry_name(index_entry(number).id), records.dump(index_entry(number)))
    index.refresh()
    counting = CountingStore(index.root)
    assert len(Index(counting).read()) == 50
    assert counting.reads == 1
    index.root.put(entry_name(index_entry(50).id), records.dump(index_entry(50)))
    assert len(Index(counting).read()) == 51
    assert counting.reads == 3


@pytest.mark.parametrize("data", [None, b"", b"{", b'{"format_version": 99}', b"\xff" * 100])
def test_snapshot_is_worth_nothing(index: Index, data: bytes | None) -> None:
    """A lost, cut, newer or invalid snapshot does not change the list, and the next writer replaces it."""
    before = [shelve(index, "a", 0), shelve(index, "b", 1)]
    if data is None:
        index.root.delete(SNAPSHOT)
    else:
        index.root.put(SNAPSHOT, data)
    assert {each.entry for each in index.read()} == set(before)
    index.refresh()
    counting = CountingStore(index.root)
    assert len(Index(counting).read()) == 2
    assert counting.reads == 1


def test_old_snapshot_shows_nothing_that_is_gone(index: Index) -> None:
    """An entry deleted after the snapshot was written is not listed."""
    first, second = shelve(index, "a", 0), shelve(index, "b", 1)
    old = index.root.get(SNAPSHOT)
    index.remove_entry(first.id)
    index.root.put(SNAPSHOT, old)
    assert ids(index) == [second.id]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_no_order_of_two_writers_loses_an_entry(order: list[int], data: st.DataObject) -> None:
    """Writers put entries and then snapshots made of what they saw earlier, in any order: all entries are listed."""
    store = MemoryStore()
    index = Index(store)
    seen: list[bytes] = [b""]
    for number in order:
        store.put(entry_name(index_entry(number).id), records.dump(index_entry(number)))
        if data.draw(st.booleans()):
            index.refresh()
            seen.append(store.get(SNAPSHOT))
        if stale := data.draw(st.sampled_from(seen)):
            store.put(SNAPSHOT, stale)
    assert set(ids(index)) == {index_entry(number).id for number in order}


@pytest.mark.parametrize(
    "content", [b"{}", b'{"content":' + b"[" * 100_000, b"[" * 100_000], ids=["empty", "deep", "bare"]
)
def test_damaged_entry_hides_only_itself(index: Index, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The others are listed, and a warning describes the repair."""
    first, second = shelve(index, "a", 0), shelve(index, "b", 1)
    index.root.delete(SNAPSHOT)
    index.root.put(entry_name(first.id), content)
    with caplog.at_level(logging.WARNING):
        assert ids(index) == [second.id]
    assert "list --rebuild" in caplog.text


@pytest.mark.parametrize("path", ["../outside", "/etc", "a/../../b", ""])
def test_entries_cannot_lead_out_of_the_root(index: Index, path: str) -> None:
    """An edited index does not make prune delete elsewhere: such an entry is refused on reading."""
    hostile = records.dump(structs.replace(index_entry(1), path=path))
    with pytest.raises(BackupDamaged, match="not a valid object name"):
        load(hostile, "x")


def test_hostile_id_is_refused() -> None:
    """An id becomes the name of an object."""
    with pytest.raises(BackupDamaged, match="is not a backup id"):
        load(records.dump(structs.replace(index_entry(1), id="../../x")), "x")


def test_one_path_holds_one_backup(index: Index, tmp_path: Path) -> None:
    """A backup removed by hand and replaced by another leaves no ghost, even if its clock was ahead."""
    shelve(index, "nightly", 9)
    for name in names(open_store(parse(str(tmp_path / "nightly")))):
        (tmp_path / "nightly" / name).unlink()
    second = shelve(index, "nightly", 1, cluster_id=5)
    assert ids(index) == [second.id]
    assert index.ids() == {second.id}


def test_find_takes_a_unique_beginning(index: Index) -> None:
    """Whole ids and unique prefixes, in any case, name a backup; the errors for none and several differ."""
    for number in (0xAB << 56, 0xAC << 56):
        entry = structs.replace(index_entry(0), id=f"{number:016x}", path=f"{number}")
        index.root.put(entry_name(entry.id), records.dump(entry))
    assert index.find("ab").entry.id == "ab00000000000000"
    assert index.find("AC00000000000000").entry.id == "ac00000000000000"
    with pytest.raises(UsageError, match="2 backups"):
        index.find("a")
    for wrong in ("", "b", "ab000000000000000"):
        with pytest.raises(BackupNotFound):
            index.find(wrong)


def test_newest_until_a_time_is_the_newest_before_it(index: Index) -> None:
    """Not the newest of all, whose rows are later; one that was not yet complete does not count."""
    old, new = (shelve(index, path, day) for path, day in (("old", 1), ("new", 2)))
    assert index.find("newest").entry == index.find("newest", compose(new.finished_ms)).entry == new
    assert index.location_of("newest", compose(new.finished_ms - 1)) == index.root.location.child("old")
    with pytest.raises(BackupNotFound, match=r"no backup from before .*the oldest, old,"):
        index.find("newest", compose(old.finished_ms - 1))


def test_find_takes_newest_if_it_is_clear_which(index: Index) -> None:
    """The newest that is not being removed; with backups of two clusters, the ids of both are in the refusal."""
    index.root.put("x", b"")
    with pytest.raises(BackupNotFound, match="lists no backup"):
        index.find("newest")
    old, new = shelve(index, "old", 1), shelve(index, "new", 2)
    assert index.find("newest").entry == new
    assert index.location_of("newest") == index.root.location.child("new")
    index.root.put(index_module.removal_name(new.id), b"")
    assert index.find("newest").entry == old
    other = shelve(index, "other", 3, cluster_id=5)
    with pytest.raises(UsageError, match=r"several clusters, kinds or ranges.*\(other, raw\)") as refused:
        index.find("newest")
    assert {old.id, other.id} == {each for each in (old.id, new.id, other.id) if each in refused.value.message}


def test_pins_come_and_go(index: Index) -> None:
    """Pinning shows in the list, may be repeated, and leaves with unpin and with the entry."""
    entry = shelve(index, "a")
    for _twice in range(2):
        index.pin(entry)
    assert [each.pinned for each in index.read()] == [True]
    for _twice in range(2):
        index.unpin(entry)
    assert [each.pinned for each in index.read()] == [False]
    index.pin(entry)
    index.remove_entry(entry.id)
    assert not any(name.startswith(index_module.PINS) for name in names(index.root))


def test_entries_without_backup_cannot_be_pinned(index: Index) -> None:
    """A pin on a ghost would promise what it cannot hold."""
    entry = shelve(index, "a")
    index.root.delete("a/backupmeta")
    with pytest.raises(BackupNotFound, match="no complete backup"):
        index.pin(entry)
    assert [each.pinned for each in index.read()] == [False]


@pytest.mark.parametrize(
    ("url", "root", "path"),
    [
        ("/backups/nightly/1", "/backups/nightly", "1"),
        ("/1", "/", "1"),
        ("s3://bucket/a/b/c?endpoint=http://h:1", "a/b", "c"),
        ("s3://bucket/a?endpoint=http://h:1", "", "a"),
    ],
)
def test_place_is_the_folder_above(url: str, root: str, path: str) -> None:
    """The index lies beside the backups; all else of the location stays, and the way leads back."""
    place = place_of(parse(url))
    assert place is not None
    assert (place.root.path, place.path) == (root, path)
    assert place.root.child(place.path) == parse(url)


@pytest.mark.parametrize("location", [StorageLocation("s3", "", "bucket", S3Options()), StorageLocation("local", "/")])
def test_a_bucket_has_no_folder_above(location: StorageLocation) -> None:
    """A backup that fills a bucket has no folder above."""
    assert place_of(location) is None


def test_top_of_a_bucket_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such a backup is complete; a warning explains why no list has it."""
    made = make_backup(parse(str(tmp_path / "b")))
    with caplog.at_level(logging.WARNING):
        add_to_index(StorageLocation("local", "/"), made)
    assert "no index can list it" in caplog.text


@pytest.mark.parametrize("error", [StorageUnreachable("on purpose"), StorageDenied("on purpose")])
def test_failing_index_fails_no_backup(
    tmp_path: Path, error: StorageError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The backup is complete when the index is written: a failure there is a warning that names the remedy."""
    location = parse(str(tmp_path / "b"))
    made = make_backup(location)

    def fail(_location: StorageLocation) -> ObjectStore:
        raise error

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(index_module, "open_store", fail)
        add_to_index(location, made)
    assert "on purpose" in caplog.text
    assert "list --rebuild" in caplog.text


@pytest.mark.parametrize("script", ["b", "a", ".b", ".a"])
def test_entry_survives_a_broken_off_writer(tmp_path: Path, script: str) -> None:
    """An interruption before the entry leaves none; after it the backup is listed, with or without a snapshot."""
    index = index_at(tmp_path)
    made = make_backup(parse(str(tmp_path / "b")))
    entry = entry_of("b", made)
    with pytest.raises(StorageUnreachable):
        Index(FaultyStore(index.root, script)).add(entry)
    assert ids(index) == ([] if script == "b" else [entry.id])


def test_index_holds_no_secret(tmp_path: Path) -> None:
    """Entries name a path below the root, not a URL."""
    index = index_at(tmp_path)
    entry = shelve(index, "a")
    content = json.loads(index.root.get(entry_name(entry.id)))["content"]
    assert content["path"] == "a"
    assert str(tmp_path) not in json.dumps(content)


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 253_402_300_800_000, -1])
@pytest.mark.parametrize("field", ["finished_ms", "started_ms"])
def test_a_time_that_no_calendar_has_costs_its_entry_only(
    index: Index, field: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In an entry, and in the snapshot: it is named and left out, and the rest is listed and can be pruned."""
    kept = shelve(index, "real")
    bad = index_entry(1)
    bad = structs.replace(bad, **{field: value})
    index.root.put(entry_name(bad.id), records.dump(bad))
    snapshot = json.loads(index.root.get(SNAPSHOT))["content"]
    snapshot["entries"].append(json.loads(records.dump(bad))["content"])
    digest = hashlib.sha256(json.dumps(snapshot, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    document = {"format_version": 1, "content": snapshot, "content_sha256": digest}
    index.root.put(SNAPSHOT, f"{json.dumps(document)}\n".encode())
    assert [each.entry for each in index.read()] == [kept]
    assert entry_name(bad.id) in caplog.text
    assert plan(index, Policy(last=1)).to_remove == []


def test_times_of_other_records_are_bounded() -> None:
    """Of a lease, as of each record with a time: loading says which field is invalid."""
    lease = Lease("t", LeaseOwner("h", "m", 1, 1), "", "w", 1)
    assert records.load(Lease, records.dump(lease), "x") == lease
    for value in (2**63, 10**15, -1):
        with pytest.raises(BackupDamaged, match="expires_ms"):
            records.load(Lease, records.dump(structs.replace(lease, expires_ms=value)), "x")


def test_any_number_is_shown_as_a_time_without_an_error() -> None:
    """Numbers come from servers, too, that no record bounds."""
    for value in (2**63, -1, 253_402_300_800_000):
        assert show_time(value) == f"an invalid time ({value} ms)"
    assert show_time(253_402_300_799_999, age=False) == "9999-12-31 23:59:59 UTC"


def test_url_of_many_backups_in_place_of_one(tmp_path: Path) -> None:
    """The hint names `newest`; that of an empty path does not."""
    index = index_at(tmp_path)
    shelve(index, "a")
    with pytest.raises(BackupNotFound, match="no complete backup") as failure:
        BackupSet.open(open_store(parse(str(tmp_path))))
    assert f"`newest`, with --storage local://{tmp_path}" in failure.value.hint
    with pytest.raises(BackupNotFound) as failure:
        BackupSet.open(open_store(parse(str(tmp_path / "empty"))))
    assert "newest" not in failure.value.hint
