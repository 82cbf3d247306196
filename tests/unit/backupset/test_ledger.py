from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import structs

from tests.support.ledgers import read_entries
from tests.unit.backupset.samples import do_all, do_task
from tikv_br.backupset.ledger import (
    LedgerEntry,
    has_its_files,
    one_per_interval,
    remove_entries,
    without_overlaps,
    write_entry,
)
from tikv_br.formats.checksum import Checksum
from tikv_br.storage.base import ObjectStore


def test_entries_round_trip_in_key_order(store: ObjectStore) -> None:
    """Entries are read in key order, whatever their order of writing."""
    said: dict[str, Any] = {
        "source": Checksum(2**64 - 1, 2, 3),
        "vanished": 4,
        "dropped_ttls": 5,
        "dropped_tombstones": 6,
        "run": "0123abcd",
    }
    entries = [structs.replace(entry, **said) for entry in do_all(store)]
    for entry in reversed(entries):
        write_entry(store, entry)
    assert read_entries(store) == entries


def test_attempts_do_not_overwrite_each_other(store: ObjectStore) -> None:
    """Two attempts at one interval leave two entries, of which the first by name counts, whatever the order."""
    first, second = do_task(store, 0, "a1"), do_task(store, 0, "a2")
    for entry in (second, first):
        write_entry(store, entry)
    assert read_entries(store) == [first, second]
    assert one_per_interval([second, first]) == [first]


def test_removal_leaves_the_files(store: ObjectStore) -> None:
    """Only the ledger goes, as often as asked."""
    entry = do_task(store, 0)
    write_entry(store, entry)
    for _twice in range(2):
        remove_entries(store)
    assert {info.name for info in store.list()} == {file.name for file in entry.files}


def usable_entries(entries: Iterable[LedgerEntry], sizes: Mapping[str, int]) -> list[LedgerEntry]:
    """Those that a resumed run takes over."""
    return without_overlaps(entry for entry in entries if has_its_files(entry, sizes))


def test_only_sound_entries_are_gone_on_from(store: ObjectStore) -> None:
    """A file that is gone or cut, and an interval that overlaps one before it, make an entry count for nothing."""
    entries = do_all(store)
    sizes = {info.name: info.size for info in store.list()}
    assert usable_entries(reversed(entries), sizes) == entries
    cut = entries[0].files[1].name
    for odd in ({**sizes, cut: 1}, {name: size for name, size in sizes.items() if name != cut}):
        assert usable_entries(entries, odd) == entries[1:]
    without_files = structs.replace(
        entries[0], attempt="a0", files=(structs.replace(entries[0].files[0], name="sst/gone.sst"),)
    )
    assert usable_entries([without_files, *entries], sizes) == entries
    late = structs.replace(entries[1], start=b"h", attempt="a0")
    assert usable_entries([*entries, late], sizes) == entries
    assert usable_entries([late, entries[0], entries[2]], sizes) == [entries[0], late, entries[2]]
    unbounded = structs.replace(entries[1], end=b"")
    assert usable_entries([entries[0], unbounded, entries[2]], sizes) == [entries[0], unbounded]


def test_removal_may_spare_entries(store: ObjectStore) -> None:
    """Those that are gone on from stay."""
    entries = do_all(store)
    for entry in entries:
        write_entry(store, entry)
    remove_entries(store, but=entries[1:2])
    assert read_entries(store) == entries[1:2]
