"""A commit that reads the ledger, and the lists of files and regions that keep it small."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from msgspec import structs

from tests.support.ledgers import begin_backup
from tests.unit.backupset.samples import describe, do_all, do_task
from tikv_br.backupset import layout, manifest
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.backupmeta import MetaContent, MetaEncoder, encode
from tikv_br.backupset.coverage import RegionList, RegionPart
from tikv_br.backupset.files import Expiry, FileEntry
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry, map_ahead, read_entry, read_ordered, write_entry
from tikv_br.backupset.manifest import Manifest, Statistics
from tikv_br.errors import BackupDamaged, CoverageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.records import RecordList
from tikv_br.storage.base import ObjectStore, exists

MANY = 10_500
"""Files: more than are written as a whole, and no multiple of a block."""


def record(store: ObjectStore, entries: list[LedgerEntry]) -> list[FinishedTask]:
    """Write the entries; returns what the driver keeps of them."""
    for entry in entries:
        write_entry(store, entry)
    return [FinishedTask.of(entry) for entry in entries]


def files(count: int) -> list[FileEntry]:
    """File entries in key order; every seventh has rows that expire."""
    return [
        FileEntry(
            name=f"sst/{number:08d}_default.sst",
            size=number + 1,
            start_key=b"r\0\0\0%08d" % number,
            end_key=b"r\0\0\0%08d" % (number + 1),
            crc64xor=number << 40,
            total_kvs=number,
            total_bytes=3 * number,
            sha256=number.to_bytes(32, "big"),
            etag=f"{number:x}",
            expiry=Expiry(1, 2, 3, 4, 5) if number % 7 == 0 else Expiry(),
        )
        for number in range(count)
    ]


def test_a_commit_takes_the_entries_that_the_driver_knows(store: ObjectStore) -> None:
    """Tasks ended in any order, and one ran twice to its end: only the attempt whose outcome counted is in the backup."""
    writer = begin_backup(store)
    finished = record(store, do_all(store)[::-1])
    second = do_task(store, 0, "a0")  # first by name
    write_entry(store, second)
    made = writer.commit(describe(store), read_ordered(store, finished))
    opened = BackupSet.open(store)
    assert opened.manifest == made
    assert [file.name.split("_")[1] for file in opened.files] == ["a1"] * 3
    assert opened.files == tuple(file for entry in do_all(store) for file in entry.files)
    assert not any(exists(store, file.name) for file in second.files)
    assert not list(store.list(layout.LEDGER))


def test_an_entry_that_is_gone_is_no_backup(store: ObjectStore) -> None:
    """Though the driver has the outcome of its task."""
    writer = begin_backup(store)
    finished = record(store, do_all(store))
    store.delete(finished[1].name)
    with pytest.raises(CoverageError, match=r"is missing: it was removed after"):
        writer.commit(describe(store), read_ordered(store, finished))
    assert not exists(store, layout.META)
    assert not exists(store, layout.MANIFEST)


@pytest.mark.parametrize("damage", ["of another task", "of another attempt", "with other counts", "cut"])
def test_an_entry_that_is_not_the_one_reported_is_no_backup(store: ObjectStore, damage: str) -> None:
    """The entry in the ledger is compared with the result of its task."""
    writer = begin_backup(store)
    entries = do_all(store)
    finished = record(store, entries)
    other = {
        "of another task": entries[2],
        "of another attempt": structs.replace(entries[0], attempt="a9"),
        "with other counts": structs.replace(entries[0], dropped_ttls=1),
        "cut": entries[0],
    }[damage]
    write_entry(store, other)
    data = store.get(FinishedTask.of(other).name)
    store.put(finished[0].name, data[:-9] if damage == "cut" else data)
    with pytest.raises(BackupDamaged, match=finished[0].name) as caught:
        read_entry(store, finished[0])
    assert "--no-resume" in caught.value.hint  # a resumed run would meet the same entry
    with pytest.raises(BackupDamaged, match=finished[0].name):
        writer.commit(describe(store), read_ordered(store, finished))
    assert not exists(store, layout.META)


def test_files_out_of_the_order_of_their_intervals_are_refused(store: ObjectStore) -> None:
    """A file that lies before those of an earlier interval may overlap one of them."""
    writer = begin_backup(store)
    entries = do_all(store)
    moved = structs.replace(entries[2].files[0], start_key=b"r\0\0\0a", end_key=b"r\0\0\0b")
    with pytest.raises(CoverageError, match="overlap"):
        writer.commit(describe(store), [*entries[:2], structs.replace(entries[2], files=(moved,))])


def test_results_of_many_reads_keep_their_order() -> None:
    """Threads read ahead; an error comes in its place."""
    assert list(map_ahead(lambda number: number * 2, range(1000))) == list(range(0, 2000, 2))
    assert list(map_ahead(str, [])) == []
    found, seen = map_ahead(lambda number: 1 // (number - 500), range(1000)), list[int]()
    with pytest.raises(ZeroDivisionError):
        seen.extend(found)
    assert seen == [1 // (number - 500) for number in range(496)]


def test_a_list_of_files_is_as_a_tuple() -> None:
    """Whole, by place and by part."""
    wanted = files(1300)
    found = RecordList(FileEntry, wanted)
    assert found == tuple(wanted)
    assert tuple(wanted) == found
    assert found != tuple(wanted[:-1])
    assert (len(found), found[0], found[511], found[512], found[-1]) == (
        1300,
        *(wanted[at] for at in (0, 511, 512, -1)),
    )
    assert found[510:514] == tuple(wanted[510:514])
    with pytest.raises(IndexError):
        found[1300]
    assert list(RecordList(FileEntry)) == []


def test_a_list_of_files_is_small() -> None:
    """A file takes less than 300 bytes, a tenth of what it takes as an object."""
    tracemalloc.start()
    found = RecordList(FileEntry)
    for file in files(MANY):
        found.append(file)
    del file
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size / len(found) < 300


@pytest.mark.parametrize("count", [0, 1, 512, 1300])
def test_backupmeta_made_by_blocks_is_the_same(count: int) -> None:
    """Byte for byte what protobuf makes of all files at once."""
    content = MetaContent(7, "8.5.2", "tikv-br 1", ApiVersion.V2, (KeyRange(b"r\0\0\0", b"r\0\0\1"),), (), backup_ts=99)
    encoder = MetaEncoder(content)
    for at in range(0, count, 100):
        encoder.add(files(count)[at : at + 100])
    assert encoder.finish() == encode(structs.replace(content, files=tuple(files(count))))


def test_a_manifest_written_in_pieces_is_read_back(store: ObjectStore) -> None:
    """A large one is never whole in memory; what is read is what was written."""
    wanted = Manifest(
        describe(store), Statistics(1, 2, 3, 4, 5, 6), tuple(files(MANY)), b"sha", (RegionPart(b"", b"", 1, 2),)
    )
    manifest.write(store, structs.replace(wanted, files=RecordList(FileEntry, wanted.files)))
    assert manifest.load(store.get(layout.MANIFEST)) == wanted


def test_regions_of_a_large_backup_are_joined() -> None:
    """However many there are, parts stay few and in order, and lose nothing."""
    found = RegionList(10)
    for number in range(1234):
        found.add(RegionPart(b"%04d" % number, b"%04d" % (number + 1), number, 10 * number))
    parts = found.merged()
    assert len(parts) <= 10
    assert all(left.end == right.start for left, right in pairwise(parts))
    assert (parts[0].start, parts[-1].end) == (b"0000", b"1234")
    assert sum(part.total_kvs for part in parts) == sum(range(1234))
    assert sum(part.regions for part in parts) == 1234
