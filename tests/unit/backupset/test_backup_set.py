from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest
from msgspec import structs

from tests.support.faulty_store import FaultyStore
from tests.support.ledgers import begin_backup
from tests.unit.backupset.samples import describe, do_all, do_task
from tests.unit.backupset.shelves import make_backup
from tikv_br.backupset import backupmeta, layout, manifest
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.backup_writer import BackupWriter
from tikv_br.backupset.files import ColumnFamily
from tikv_br.backupset.ledger import one_per_interval, write_entry
from tikv_br.backupset.manifest import Manifest
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupPathInUse,
    BackupUnsupported,
    CoverageError,
    LeaseLost,
    StorageUnreachable,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse


@pytest.fixture
def complete(store: ObjectStore) -> ObjectStore:
    """A store with a complete backup."""
    begin_backup(store).commit(describe(store), do_all(store))
    return store


def names(store: ObjectStore) -> set[str]:
    """All objects."""
    return {info.name for info in store.list()}


# ------------------------------------------------------------------------------------------------------------- writing


def test_backup_is_read_back(store: ObjectStore) -> None:
    """The opened backup equals the committed one: files in key order, ranges, versions, sums, description."""
    writer = begin_backup(store)
    entries = [
        structs.replace(entry, dropped_ttls=number, dropped_tombstones=1) for number, entry in enumerate(do_all(store))
    ]
    for entry in entries:
        write_entry(store, entry)
    made = writer.commit(structs.replace(describe(store), backup_ts=4711), entries)
    opened = BackupSet.open(store)
    assert opened.manifest == made
    assert opened.files == tuple(file for entry in entries for file in entry.files)
    assert (opened.api_version, opened.backup_ts) == (ApiVersion.V2, 4711)
    assert opened.ranges == describe(store).ranges
    assert (opened.cluster_id, opened.cluster_version) == (7710567106009038031, "9.0.0-beta.2")
    assert opened.totals == (
        made.statistics.crc64xor,
        made.statistics.total_kvs,
        made.statistics.total_bytes,
        made.statistics.backup_size,
    )
    statistics = made.statistics
    assert (statistics.tasks, statistics.dropped_ttls, statistics.dropped_tombstones) == (3, 3, 3)
    for file in opened.files:
        opened.verify_identity(file)
        opened.verify_content(file)


def test_a_transactional_backup_is_told_from_a_raw_one(store: ObjectStore) -> None:
    """Default and write file of a part share its range; only who can read such data opens it."""
    writer, place = begin_backup(store), store.location.redacted()
    entries = []
    for entry in do_all(store):
        pair = [
            structs.replace(
                file, name=f"{file.name[:-4]}_{cf}.sst", start_key=txn(file.start_key), end_key=txn(file.end_key), cf=cf
            )
            for file in entry.files
            for cf in get_args(ColumnFamily)
        ]
        for file, raw in zip(pair, [file for file in entry.files for _ in range(2)], strict=True):
            store.put(file.name, store.get(raw.name))
        entries.append(structs.replace(entry, files=tuple(pair)))
    description = describe(store)
    ranges = tuple(KeyRange(txn(part.start), txn(part.end)) for part in description.ranges)
    made = writer.commit(structs.replace(description, key_mode=KeyMode.TXN, ranges=ranges), entries)
    opened = BackupSet.open(store, KeyMode.TXN)
    assert (opened.manifest, opened.ranges, opened.key_mode) == (made, ranges, KeyMode.TXN)
    assert {file.cf for file in opened.files} == {"default", "write"}
    assert opened == BackupSet.open_any(store, key_mode=None)
    assert opened.codec_of(ranges[0]).prefix == b"x\0\0\0"
    assert json.loads(store.get(layout.MANIFEST))["format_version"] == 2
    with pytest.raises(BackupUnsupported, match=f"{re.escape(place)} is a backup of TxnKV data") as refused:
        BackupSet.open(store)
    assert "restore txn" in refused.value.hint
    store.put(layout.MANIFEST, store.get(layout.MANIFEST).replace(b'version": 2', b'version": 1', 1))
    with pytest.raises(BackupDamaged, match="format version"):
        BackupSet.open(store, KeyMode.TXN)


def test_a_raw_backup_is_no_transactional_one(complete: ObjectStore) -> None:
    """The refusal names the command for it."""
    with pytest.raises(BackupUnsupported, match="is a backup of RawKV data") as refused:
        BackupSet.open(complete, KeyMode.TXN)
    assert "restore raw" in refused.value.hint


def test_overlapping_files_of_one_family_are_refused(store: ObjectStore) -> None:
    """Only default and write file of a part may have the same range."""
    writer, entry = begin_backup(store), do_task(store, 0)
    file, name = entry.files[0], f"{entry.files[0].name}-again.sst"
    store.put(name, store.get(file.name))
    with pytest.raises(CoverageError, match="overlap"):
        writer.commit(describe(store), [structs.replace(entry, files=(file, structs.replace(file, name=name)))])


def txn(key: bytes) -> bytes:
    """The key with the mode of transactions."""
    return b"x" + key[1:]


def test_a_commit_leaves_only_the_backup(store: ObjectStore) -> None:
    """After the commit there are lock, manifest, meta and the files it names; no ledger, no files of failed attempts."""
    writer = begin_backup(store)
    entries = do_all(store)
    failed_attempt = do_task(store, 0, "a0-failed")
    for entry in entries:
        write_entry(store, entry)
    assert failed_attempt.files[0].name in names(store)
    writer.commit(describe(store), entries)
    files = {file.name for entry in entries for file in entry.files}
    assert names(store) == {"backupmeta", "backup.lock", "tikv-br/manifest.json"} | files


def test_two_attempts_at_one_interval_count_once(store: ObjectStore) -> None:
    """A task that ran twice to its end gives its files once."""
    writer = begin_backup(store)
    twice = [*do_all(store), do_task(store, 1, "a2"), do_task(store, 2, "a2")]
    made = writer.commit(describe(store), one_per_interval(twice))
    assert [file.name.split("_")[1] for file in made.files] == ["a1"] * 3


def test_empty_backup(store: ObjectStore) -> None:
    """A range without any row is a complete backup without files."""
    entry = structs.replace(do_task(store, 1), start=b"", end=b"")
    begin_backup(store).commit(describe(store), [entry])
    assert BackupSet.open(store).files == ()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_hole_is_never_committed(store: ObjectStore, lost: int) -> None:
    """A missing interval, an empty one included, is a CoverageError and no backup."""
    writer = begin_backup(store)
    entries = do_all(store)
    del entries[lost]
    with pytest.raises(CoverageError):
        writer.commit(describe(store), entries)
    assert not exists(store, layout.META)


def test_overlaps_are_never_committed(store: ObjectStore) -> None:
    """Neither intervals nor the files' ranges may overlap: rows would count twice."""
    writer = begin_backup(store)
    entries = do_all(store)
    with pytest.raises(CoverageError, match="overlap"):
        writer.commit(describe(store), [*entries, structs.replace(entries[0], end=b"h")])
    wide = structs.replace(entries[0].files[0], end_key=b"r\0\0\0d")
    with pytest.raises(CoverageError, match="overlap"):
        writer.commit(describe(store), [structs.replace(entries[0], files=(wide, entries[0].files[1])), *entries[1:]])
    assert not exists(store, layout.META)


def test_lost_or_cut_file_is_never_committed(store: ObjectStore) -> None:
    """The commit looks whether each file is there in its length."""
    writer = begin_backup(store)
    entries = do_all(store)
    file = entries[0].files[1]
    store.put(file.name, b"cut")
    with pytest.raises(BackupDamaged, match=f"{file.name} is truncated .3 of "):
        writer.commit(describe(store), entries)
    store.delete(file.name)
    with pytest.raises(BackupDamaged, match=f"{file.name} was written but is missing"):
        writer.commit(describe(store), entries)
    assert not exists(store, layout.META)


def test_file_outside_the_range_is_never_committed(store: ObjectStore) -> None:
    """A commit refuses what `open` would refuse."""
    writer = begin_backup(store)
    description = structs.replace(describe(store), ranges=(KeyRange(b"r\0\0\0", b"r\0\0\0h"),))
    with pytest.raises(BackupDamaged, match="outside"):
        writer.commit(description, do_all(store))
    assert not exists(store, layout.META)


def test_path_in_use(complete: ObjectStore) -> None:
    """A path with a backup is refused and not touched; so is one with an unfinished backup."""
    before = names(complete)
    with pytest.raises(BackupPathInUse, match="already holds a backup"):
        begin_backup(complete)
    assert names(complete) == before
    complete.delete(layout.META)
    with pytest.raises(BackupPathInUse, match="an interrupted backup"):
        begin_backup(complete)


def test_rival_commit_loses(store: ObjectStore) -> None:
    """If a backupmeta of another appears nevertheless, it stays as it is and the later commit fails."""
    writer = begin_backup(store)
    entries = do_all(store)
    store.put(layout.META, b"of a rival")
    with pytest.raises(BackupPathInUse, match="another run has finished"):
        writer.commit(describe(store), entries)
    assert store.get(layout.META) == b"of a rival"


@pytest.mark.parametrize("losing", ["before the manifest", "after it"])
def test_path_lost_during_the_commit_is_left_alone(store: ObjectStore, losing: str) -> None:
    """The new owner of the path finds neither a replaced manifest nor our backupmeta."""
    writer = begin_backup(store)
    entries = do_all(store)
    store.put(layout.MANIFEST, b"of who has the path now")
    answers = iter([losing == "before the manifest", True])

    def confirm() -> None:
        if next(answers):
            raise LeaseLost("it went to another")

    with pytest.raises(LeaseLost):
        writer.commit(describe(store), entries, confirm)
    assert not exists(store, layout.META)
    assert (store.get(layout.MANIFEST) == b"of who has the path now") is (losing == "before the manifest")


@pytest.mark.parametrize("sign", ["b", "a"])
@pytest.mark.parametrize("step", range(12))
def test_commit_broken_at_any_write(store: ObjectStore, sign: str, step: int) -> None:
    """Broken before or after any of its writes, a commit has made either no backup or the whole; again, it is whole."""
    writer = begin_backup(store)
    entries = do_all(store)
    for entry in entries:
        write_entry(store, entry)
    do_task(store, 0, "a0-failed")
    faulty = BackupWriter(FaultyStore(store, "." * step + sign))
    try:
        faulty.commit(describe(store), entries)
    except StorageUnreachable:
        if exists(store, layout.META):
            assert len(BackupSet.open(store).files) == 3
        else:
            with pytest.raises(BackupNotFound):
                BackupSet.open(store)
        writer.commit(describe(store), entries)
    opened = BackupSet.open(store)
    assert len(opened.files) == 3
    for file in opened.files:
        opened.verify_content(file)


@pytest.mark.parametrize("sign", ["a", "b", "ba", "bba", "bbb"])
def test_commit_recognizes_its_own_backupmeta(store: ObjectStore, sign: str) -> None:
    """A lost answer to the write that completes the backup does not fail the command."""
    begin_backup(store)
    entries = do_all(store)
    for entry in entries:
        write_entry(store, entry)
    BackupWriter(FaultyStore(store, "." + sign)).commit(describe(store), entries)
    assert len(BackupSet.open(store).files) == 3


def test_leftovers_that_stay_do_not_fail_a_complete_backup(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Once backupmeta is there the backup is made; what cannot be tidied up is logged."""
    begin_backup(store)
    entries = do_all(store)
    for entry in entries:
        write_entry(store, entry)
    BackupWriter(FaultyStore(store, "..b")).commit(describe(store), entries)
    assert "cannot remove temporary objects" in caplog.text
    assert len(BackupSet.open(store).files) == 3


def test_discard_leaves_nothing(store: ObjectStore) -> None:
    """An unfinished backup goes entirely, what is not of it stays, and the path is free again."""
    store.put("README.txt", b"not ours")
    writer = begin_backup(store)
    for entry in do_all(store):
        write_entry(store, entry)
    writer.discard()
    assert names(store) == {"README.txt"}
    begin_backup(store)


def test_discard_never_takes_a_complete_backup(complete: ObjectStore) -> None:
    """Not even its own writer may."""
    before = names(complete)
    with pytest.raises(BackupPathInUse, match="complete") as refused:
        BackupWriter(complete).discard()
    assert "tikv-br backup delete" in refused.value.hint
    assert names(complete) == before


# ------------------------------------------------------------------------------------------------------------- reading


def _edit_meta(store: ObjectStore, **change: object) -> None:
    message = brpb_pb2.BackupMeta.FromString(store.get(layout.META))
    for name, value in change.items():
        setattr(message, name, value)
    store.put(layout.META, message.SerializeToString(deterministic=True))


@pytest.mark.parametrize("change", [{"api_version": 0}, {"cluster_id": 1}, {"end_version": 5}, {"is_raw_kv": False}])
def test_edited_backupmeta(complete: ObjectStore, change: dict[str, object]) -> None:
    """Any edit of backupmeta is noticed by the manifest's hash, before anything in it is believed."""
    _edit_meta(complete, **change)
    with pytest.raises(BackupDamaged, match="backupmeta is altered: its hash is not the one"):
        BackupSet.open(complete)


def test_a_flipped_bit_in_a_file_name_is_not_another_backup(complete: ObjectStore) -> None:
    """Only the `backupmeta` of another backup is reported as such."""
    data = complete.get(layout.META)
    for file in BackupSet.open(complete).files:
        at = data.index(file.name.encode())
        for place in range(at, at + len(file.name)):
            complete.put(layout.META, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(BackupDamaged, match="backupmeta") as caught:
                BackupSet.open(complete)
            assert "another backup" not in caught.value.message


def test_the_backupmeta_of_another_backup(complete: ObjectStore, tmp_path: Path) -> None:
    """It is reported although both backups have the same intervals."""
    other = open_store(parse(str(tmp_path / "other")))
    begin_backup(other).commit(describe(other), [do_task(other, at, "0123456789abcdef") for at in range(3)])
    complete.put(layout.META, other.get(layout.META))
    with pytest.raises(BackupDamaged, match="backupmeta belongs to another backup"):
        BackupSet.open(complete)


def test_damaged_manifest(complete: ObjectStore) -> None:
    """Damage to the manifest names the manifest; so does its loss, because backupmeta refers to it."""
    data = complete.get(layout.MANIFEST)
    complete.put(layout.MANIFEST, data.replace(b'"scan"', b'"scam"'))
    with pytest.raises(BackupDamaged, match=layout.MANIFEST):
        BackupSet.open(complete)
    complete.delete(layout.MANIFEST)
    with pytest.raises(BackupDamaged, match=f"{layout.MANIFEST} is missing"):
        BackupSet.open(complete)


def test_manifest_of_a_newer_tool(complete: ObjectStore) -> None:
    """A format we do not know is not damage; what is ours but for its number is."""
    document = json.loads(complete.get(layout.MANIFEST)) | {"format_version": 99, "signature": "further field"}
    complete.put(layout.MANIFEST, json.dumps(document).encode())
    with pytest.raises(BackupUnsupported, match="format 99"):
        BackupSet.open(complete)


def test_patient_editor(complete: ObjectStore) -> None:
    """A meta and a manifest each sound and sealed, the one naming the other, still must say the same."""
    known = manifest.load(complete.get(layout.MANIFEST))
    complete.put(
        layout.MANIFEST,
        manifest.dump(structs.replace(known, description=structs.replace(known.description, backup_ts=1))),
    )
    with pytest.raises(BackupDamaged, match="contradict"):
        BackupSet.open(complete)


def test_directory_of_the_go_tool(complete: ObjectStore) -> None:
    """Without a manifest, a meta of another tool suffices."""
    complete.delete(layout.MANIFEST)
    _edit_meta(complete, br_version="BR\nRelease Version: br-v1.1.0")
    opened = BackupSet.open(complete)
    assert opened.manifest is None
    assert len(opened.files) == 3
    assert opened.files == backupmeta.decode(complete.get(layout.META)).files
    for file in opened.files:
        opened.verify_identity(file)


def continuing(location: StorageLocation, parent: StorageLocation, sha256: bytes, since_ts: int = 1) -> Manifest:
    """An incremental backup that names a parent."""
    store = open_store(location)
    description = structs.replace(
        describe(store), parent=parent.redacted(), parent_sha256=sha256, since_ts=since_ts, backup_ts=since_ts + 1
    )
    return begin_backup(store).commit(description, do_all(store))


def name_parent(location: StorageLocation, made: Manifest, parent: StorageLocation, sha256: bytes) -> None:
    """Rewrite a manifest as whoever may write to the storage can."""
    description = structs.replace(made.description, parent=parent.redacted(), parent_sha256=sha256)
    manifest.write(open_store(location), structs.replace(made, description=description))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_chain_in_a_circle_ends_with_an_error(tmp_path: Path, length: int) -> None:
    """A backup that is its own parent, and two or three that continue each other: `backupmeta` does not change by that."""
    places = [parse(str(tmp_path / f"backup-{number}")) for number in range(length)]
    made = [continuing(place, place, bytes(32), 1 + number) for number, place in enumerate(places)]
    for number in range(length):
        above = (number + 1) % length
        name_parent(places[number], made[number], places[above], made[above].backupmeta_sha256)
    with pytest.raises(BackupDamaged, match="continues itself"):
        BackupSet.open(open_store(places[0])).chain()


def test_a_chain_of_copies_ends_with_an_error(tmp_path: Path) -> None:
    """The same backup at another place, or by another path, is the same backup."""
    first, copy = parse(str(tmp_path / "first")), parse(str(tmp_path / "copy"))
    made = continuing(first, copy, bytes(32))
    shutil.copytree(first.path, copy.path)
    (tmp_path / "link").symlink_to(first.path)
    for other in (copy, parse(str(tmp_path / "link"))):
        name_parent(first, made, other, made.backupmeta_sha256)
        with pytest.raises(BackupDamaged, match="continues itself"):
            BackupSet.open(open_store(first)).chain()


def test_a_chain_has_a_maximum_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it the error names the place where the walk ended."""
    monkeypatch.setattr("tikv_br.backupset.backup_set.MAX_CHAIN", 2)
    places = [parse(str(tmp_path / f"backup-{number}")) for number in range(3)]
    sha256 = make_backup(places[0]).backupmeta_sha256
    for number in (1, 2):
        sha256 = continuing(places[number], places[number - 1], sha256, number).backupmeta_sha256
    assert len(BackupSet.open(open_store(places[1])).chain()) == 2
    with pytest.raises(BackupDamaged, match="continues more than 2 backups"):
        BackupSet.open(open_store(places[2])).chain()
