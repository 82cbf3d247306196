"""Makes a backup at a path.

Written in this order: lock, record of the run, files, ledger, manifest, ``backupmeta``. A reader goes the other way: ``backupmeta`` names the
manifest, and so on; what nothing names does not count.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import Struct, field, structs

from tikv_br.backupset import coverage, layout, ledger, manifest
from tikv_br.backupset.backupmeta import MetaEncoder, meta_content
from tikv_br.backupset.coverage import RegionList, require_disjoint
from tikv_br.backupset.files import ColumnFamily, FileEntry, Totals, size_damage, totals
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.backupset.manifest import Description, Manifest, Statistics
from tikv_br.errors import BackupDamaged, BackupPathInUse, CoverageError, StorageError
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.records import RecordList
from tikv_br.storage.base import ObjectStore, create_once, exists

log = logging.getLogger(__name__)


class BackupWriter:
    """A backup in progress, at a path that this run holds the lock on."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def commit(
        self, description: Description, entries: Iterable[LedgerEntry], confirm: Callable[[], None] = lambda: None
    ) -> Manifest:
        """Verify that the entries cover the source ranges and that their files exist, then commit the backup.

        There is one entry for each interval, in key order. Memory: no entry is kept, and little of each file. ``confirm``
        is called right before each of the two writes, and raises if this run has lost the path.
        Raises `CoverageError`, `BackupDamaged` for a missing or truncated file, `BackupPathInUse` if another run has
        committed. May be repeated after an error. Cleans up at the end.
        """
        found = {info.name: info for info in self._store.list()}
        listed = {name: (found[name].size, found[name].etag) for name in layout.own(found) if layout.is_data(name)}
        done = _Work(MetaEncoder(meta_content(description, ())), listed)
        for entry in entries:
            done.add(entry)
        coverage.require_coverage(description.source_ranges, done.intervals)
        data = done.meta.finish(self._store.location.crypter)
        made = Manifest(
            description=description,
            statistics=Statistics(
                crc64xor=done.totals.crc64xor,
                total_kvs=done.totals.total_kvs,
                total_bytes=done.totals.total_bytes,
                backup_size=done.totals.size,
                finished_ms=time.time_ns() // 1_000_000,
                tasks=len(done.intervals),
                dropped_ttls=done.dropped_ttls,
                dropped_tombstones=done.dropped_tombstones,
            ),
            files=done.files,
            backupmeta_sha256=hashlib.sha256(data).digest(),
            regions=done.regions.merged() if done.has_regions else (),
        )
        confirm()
        manifest.write(self._store, made)
        confirm()
        self._publish(data)
        self.clean_up(made, done.listed)
        return made

    def clean_up(self, made: Manifest, unnamed: Iterable[str] | None = None) -> None:
        """Remove the run's temporary objects. Errors are only logged.

        ``unnamed``: the data files that the manifest does not name; by default found by a listing.
        """
        try:
            ledger.remove_entries(self._store)
            if unnamed is None:
                self.remove_files_except({file.name for file in made.files})
            for name in unnamed or ():
                self._store.delete(name)
            self._sweep()
        except StorageError as error:
            log.warning("cannot remove temporary objects of the backup: %s", error.message)

    def remove_files_except(self, wanted: Collection[str]) -> None:
        """Remove the data files of failed attempts and abandoned tasks."""
        for name in layout.own(info.name for info in self._store.list()):
            if layout.is_data(name) and name not in wanted:
                self._store.delete(name)

    def discard(self, check: Callable[[], None] = lambda: None) -> int:
        """Remove all objects of unfinished runs, the lock last; returns their number.

        ``check`` is called before each deletion, and raises if this run has lost the path.
        Raises `BackupPathInUse` for a complete backup, or one of another tool.
        """
        if exists(self._store, layout.META):
            raise BackupPathInUse(
                f"{self._store.location} holds a complete backup, which is not removed",
                hint="`tikv-br backup delete` removes a complete backup.",
            )
        if manifest.path_state(self._store) is manifest.PathState.FREE:
            return 0
        names = layout.own(info.name for info in self._store.list())
        gone = [name for name in names if layout.is_data(name) or layout.is_record(name)]
        # The ledger first, the record of the run last: if interrupted, it leaves a run that has done less and can be resumed.
        for name in sorted(gone, key=lambda name: (name == layout.RUN, not name.startswith(layout.LEDGER))):
            check()
            self._store.delete(name)
        self._sweep()
        check()
        self._store.delete(layout.LOCK)
        return len(gone)

    def _sweep(self) -> None:
        for folder in ("", layout.FOLDER):
            self._store.sweep(folder)
        for folder in (layout.LEDGER, *layout.DATA_FOLDERS):
            self._store.sweep(folder, deep=True)

    def _publish(self, data: bytes) -> None:
        if not create_once(self._store, layout.META, data):
            raise BackupPathInUse(f"another run has finished a backup at {self._store.location}")


class _Work(Struct):
    """Contents of the ledger that a commit needs."""

    meta: MetaEncoder
    """Raises for what `BackupSet.open` would refuse."""
    listed: dict[str, tuple[int, str]]
    """Size and ETag of the data files in the storage, by name, without the files of the entries."""
    intervals: list[KeyRange] = field(default_factory=list)
    files: RecordList[FileEntry] = field(default_factory=lambda: RecordList(FileEntry))
    last: dict[ColumnFamily, KeyRange] = field(default_factory=dict)
    """Range of the last file of each column family."""
    totals: Totals = field(default_factory=lambda: totals(()))
    regions: RegionList = field(default_factory=RegionList)
    has_regions: bool = False
    """True if any task has recorded the regions that its rows came from."""
    dropped_ttls: int = 0
    dropped_tombstones: int = 0

    def add(self, entry: LedgerEntry) -> None:
        """Take over the next entry. Raises `CoverageError` if files overlap, `BackupDamaged` if one is not in the storage with its size."""
        self.intervals.append(entry.interval)
        self.dropped_ttls += entry.dropped_ttls
        self.dropped_tombstones += entry.dropped_tombstones
        self.has_regions = self.has_regions or bool(entry.regions)
        for part in sorted(entry.parts, key=lambda part: part.start):
            self.regions.add(part)
        files = sorted(entry.files, key=lambda file: (file.start_key, file.end_key))
        for family in {file.cf for file in files}:
            self._check_order(family, [file.key_range for file in files if file.cf == family])
        files = [self._find(file) for file in files]
        self.meta.add(files)
        for file in files:
            self.files.append(file)
        self.totals = totals([self.totals, *files])

    def _check_order(self, family: ColumnFamily, ranges: Sequence[KeyRange]) -> None:
        last = self.last.get(family)
        if last is not None and ranges[0] < last:
            raise CoverageError(f"{ranges[0]} and {last} overlap, or are not within their intervals")
        require_disjoint(ranges if last is None else [last, *ranges])
        self.last[family] = ranges[-1]

    def _find(self, file: FileEntry) -> FileEntry:
        """The entry of a file that the listing has, with its ETag."""
        found = self.listed.pop(file.name, None)
        if found is None:
            raise BackupDamaged(f"{file.name} was written but is missing")
        size, etag = found
        if damage := size_damage(size, file.size):
            raise BackupDamaged(f"{file.name} {damage}")
        return file if file.etag or not etag else structs.replace(file, etag=etag)
