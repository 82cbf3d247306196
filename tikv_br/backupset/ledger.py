"""The ledger: one object per finished task, which the commit reads, and by which a resumed run skips finished work.

An entry of many files has 10 KB, and a large backup 100,000 entries. So a driver keeps a `FinishedTask` of each, and reads the
entries from the storage one after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec import Struct

from tikv_br.backupset import layout
from tikv_br.backupset.coverage import RegionPart
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.cancellation import inherit
from tikv_br.errors import BackupDamaged, CoverageError, StorageObjectMissing
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.json_types import Hex
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.records import Later
from tikv_br.storage.base import ObjectStore

READ_THREADS = 16
"""Concurrent reads of entries."""
_READ_AT_ONCE = 8
"""Entries that a thread reads one after another."""
_START_OVER = (
    "The ledger was altered while the backup ran. Check the storage, and run the backup again with --no-resume."
)


class LedgerEntry(Struct, frozen=True):
    """An attempt has finished its interval: the files have all of its rows. No files = the interval is empty."""

    start: Hex
    """RPC keys of the source, as planned; `end` empty = unbounded."""
    end: Hex
    attempt: str
    """The attempt's own name: letters, digits and ``-``."""
    files: tuple[FileEntry, ...]
    source: Checksum = msgspec.field(default_factory=Checksum)
    """Checksum of the rows written, as the source's stores compute it; empty if it was not requested."""
    vanished: int = 0
    """Rows left out because they had expired when their TTL was read."""
    dropped_ttls: int = 0
    """Rows whose expiry the destination could not keep."""
    dropped_tombstones: int = 0
    run: str = ""
    """Id of the run; a discarded one may have used other options."""
    regions: Later[tuple[RegionPart, ...]] = ()
    """The regions that the rows came from; empty = not recorded."""
    expiry_error_seconds: Later[int] = 0
    """Maximum by which the rows' expiries may be too early."""

    @property
    def parts(self) -> tuple[RegionPart, ...]:
        """`regions`, or one part per file if they are not recorded."""
        by_file = (RegionPart(file.start_key, file.end_key, file.total_kvs, file.total_bytes, 0) for file in self.files)
        return self.regions or tuple(by_file)

    @property
    def interval(self) -> KeyRange:
        return KeyRange(self.start, self.end)


class FinishedTask(Struct, frozen=True):
    """Identity and counts of an entry, which a driver keeps."""

    start: bytes
    """`start`, `end` and the counts are the entry's."""
    end: bytes
    attempt: str
    vanished: int = 0
    dropped_ttls: int = 0
    dropped_tombstones: int = 0
    expiry_error_seconds: int = 0

    @classmethod
    def of(cls, entry: LedgerEntry) -> FinishedTask:
        return cls(**{name: getattr(entry, name) for name in cls.__struct_fields__})

    @property
    def interval(self) -> KeyRange:
        return KeyRange(self.start, self.end)

    @property
    def name(self) -> str:
        return layout.ledger_name(self.interval, self.attempt)


def write_entry(store: ObjectStore, entry: LedgerEntry) -> None:
    """Record it; the files it names must be there already. Raises `StorageError`."""
    write_record(store, layout.ledger_name(entry.interval, entry.attempt), entry)


def read_entry(store: ObjectStore, finished: FinishedTask) -> LedgerEntry:
    """The entry of a finished task. Raises `CoverageError` if it is gone, `BackupDamaged` if it cannot be read or is another one."""
    try:
        entry = read_record(store, LedgerEntry, finished.name)
    except StorageObjectMissing:
        raise missing_entry(finished) from None
    except BackupDamaged as error:
        error.hint = _START_OVER
        raise
    if FinishedTask.of(entry) != finished:
        raise BackupDamaged(
            f"{finished.name} is damaged: it is not the entry that the task of {finished.interval} has written",
            hint=_START_OVER,
        )
    return entry


def missing_entry(finished: FinishedTask) -> CoverageError:
    """The error for an entry that was written, but is not there."""
    return CoverageError(
        f"the ledger entry {finished.name} of {finished.interval} is missing: it was removed after the interval was backed up"
    )


def read_ordered(store: ObjectStore, finished: Iterable[FinishedTask]) -> Iterator[LedgerEntry]:
    """Yield the entries of finished tasks in key order; holds a few of them in memory. Raises as `read_entry`."""
    ordered = sorted(finished, key=lambda each: each.interval)
    return map_ahead(lambda each: read_entry(store, each), ordered)


Item = TypeVar("Item")
Found = TypeVar("Found")


def map_ahead(function: Callable[[Item], Found], items: Sequence[Item]) -> Iterator[Found]:
    """The results in order, computed on threads that stay a few items ahead. Raises the first error."""

    def work(first: int) -> list[Found]:
        return [function(item) for item in items[first : first + _READ_AT_ONCE]]

    starts = iter(range(0, len(items), _READ_AT_ONCE))
    pending: deque[Future[list[Found]]] = deque()
    pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="ledger")
    try:
        while True:
            for first in islice(starts, 2 * READ_THREADS - len(pending)):
                pending.append(pool.submit(inherit(work), first))
            if not pending:
                return
            yield from pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


R = TypeVar("R", LedgerEntry, FinishedTask)


def one_per_interval(entries: Iterable[R]) -> list[R]:
    """Return one entry per interval, in key order: of several attempts at one interval, the first by name."""
    chosen: dict[KeyRange, R] = {}
    for entry in sorted(entries, key=lambda entry: (entry.interval, entry.attempt)):
        chosen.setdefault(entry.interval, entry)
    return list(chosen.values())


def has_its_files(entry: LedgerEntry, sizes: Mapping[str, int]) -> bool:
    """Return whether all its files exist with their size; ``sizes`` by name."""
    return all(sizes.get(file.name) == file.size for file in entry.files)


def without_overlaps(entries: Iterable[R]) -> list[R]:
    """Entries to resume from: no two share a key. In the order of keys.

    Intervals may overlap where a task of a run that was killed ended after the next run had planned again.
    """
    chosen: list[R] = []
    for entry in one_per_interval(entries):
        if not chosen or (bool(chosen[-1].interval.end) and chosen[-1].interval.end <= entry.interval.start):
            chosen.append(entry)
    return chosen


def remove_entries(store: ObjectStore, but: Iterable[LedgerEntry | FinishedTask] = ()) -> None:
    """Delete the ledger, or all of it ``but`` some entries. Idempotent."""
    kept = {layout.ledger_name(entry.interval, entry.attempt) for entry in but}
    for name in layout.own(info.name for info in store.list(layout.LEDGER)):
        if name not in kept:
            store.delete(name)
