"""The ledger: one object per finished task, by which a resumed run skips finished work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from formats.checksum import Checksum
from formats.keys.ranges import KeyRange
from tikv_br.backupset import layout
from tikv_br.backupset.coverage import RegionPart
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.records import LATER, read_record, write_record
from tikv_br.storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """An attempt has finished its interval: the files have all of its rows. No files = the interval is empty."""

    start: bytes
    """RPC keys of the source, as planned; `end` empty = unbounded."""
    end: bytes
    attempt: str
    """The attempt's own name: letters, digits and ``-``."""
    files: tuple[FileEntry, ...]
    source: Checksum = field(default_factory=Checksum)
    """Of the rows written, as the source's stores compute it; empty if it was not requested."""
    vanished: int = 0
    """Rows left out because they had expired when their TTL was read."""
    dropped_ttls: int = 0
    """Rows whose expiry the destination could not keep."""
    dropped_tombstones: int = 0
    run: str = ""
    """Id of the run; a discarded one may have used other options."""
    regions: tuple[RegionPart, ...] = field(default=(), metadata=LATER)
    """The regions that the rows came from; empty = not recorded."""
    expiry_error_seconds: int = field(default=0, metadata=LATER)
    """How much too early the rows' expiries may be, at most."""

    @property
    def parts(self) -> tuple[RegionPart, ...]:
        """`regions`, or one part per file if they are not recorded."""
        by_file = (RegionPart(file.start_key, file.end_key, file.total_kvs, file.total_bytes, 0) for file in self.files)
        return self.regions or tuple(by_file)

    @property
    def interval(self) -> KeyRange:
        """`start` and `end`."""
        return KeyRange(self.start, self.end)


def write_entry(store: ObjectStore, entry: LedgerEntry) -> None:
    """Record it; the files it names must be there already. Raises `StorageError`."""
    write_record(store, layout.ledger_name(entry.interval, entry.attempt), entry)


def read_entries(store: ObjectStore) -> list[LedgerEntry]:
    """All entries, by interval and attempt. Raises `BackupDamaged` or `CrypterMismatch` if one cannot be read."""
    names = [info.name for info in store.list(layout.LEDGER)]
    entries = [read_record(store, LedgerEntry, name) for name in names]
    return sorted(entries, key=lambda entry: (entry.interval, entry.attempt))


def one_per_interval(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Of several attempts at the very same interval (a task ran twice), the first by name; in the order of keys."""
    chosen: dict[KeyRange, LedgerEntry] = {}
    for entry in sorted(entries, key=lambda entry: (entry.interval, entry.attempt)):
        chosen.setdefault(entry.interval, entry)
    return list(chosen.values())


def usable_entries(entries: Iterable[LedgerEntry], sizes: Mapping[str, int]) -> list[LedgerEntry]:
    """Entries to resume from: all their files exist with their size (``sizes`` by name), and no two share a key.

    Intervals may overlap where a task of a run that was killed ended after the next run had planned again.
    """
    chosen: list[LedgerEntry] = []
    whole = (entry for entry in entries if all(sizes.get(file.name) == file.size for file in entry.files))
    for entry in one_per_interval(whole):
        if not chosen or (bool(chosen[-1].end) and chosen[-1].end <= entry.start):
            chosen.append(entry)
    return chosen


def remove_entries(store: ObjectStore, but: Iterable[LedgerEntry] = ()) -> None:
    """Delete the ledger, or all of it ``but`` some entries. Idempotent."""
    kept = {layout.ledger_name(entry.interval, entry.attempt) for entry in but}
    for info in list(store.list(layout.LEDGER)):
        if info.name not in kept:
            store.delete(info.name)
