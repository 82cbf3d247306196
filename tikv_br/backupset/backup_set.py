"""A backup as a whole: `BackupWriter` makes one, `BackupSet` reads one, ours or the Go tool's.

Written in this order: lock, record of the run, files, ledger, manifest, ``backupmeta``. Read in reverse order: an object
counts only if the one written after it names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import posixpath
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import ne

from tikv_br.backupset import coverage, layout, ledger, manifest, run_record
from tikv_br.backupset.coverage import RegionList, require_disjoint
from tikv_br.backupset.files import (
    FileEntry,
    FileKind,
    Totals,
    size_damage,
    totals,
    verify_file_content,
    verify_file_identity,
)
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.backupset.manifest import (
    TOOL_PREFIX,
    Description,
    Manifest,
    MetaContent,
    MetaEncoder,
    Statistics,
    decode,
    encode,
)
from tikv_br.cluster.versions import lacks_expiry
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupPathInUse,
    BackupSetError,
    BackupUnsupported,
    CoverageError,
    CrypterMismatch,
    StorageError,
    StorageObjectMissing,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.records import RecordList
from tikv_br.storage.base import ObjectStore, create_once, exists
from tikv_br.storage.crypter import PLAIN, Crypter
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.storage.url import parse as parse_url

log = logging.getLogger(__name__)


class BackupWriter:
    """A backup in progress, at a path that this run holds the lock on."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def commit(
        self,
        description: Description,
        entries: Iterable[LedgerEntry],
        confirm: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Verify that the entries cover the source ranges and that their files exist, then commit the backup.

        There is one entry for each interval, and they come in key order; none is kept, and little of each file. ``confirm``
        is called right before each of the two writes, and raises if this run has lost the path.
        Raises `CoverageError`, `BackupDamaged` for a missing or truncated file, `BackupPathInUse` if another run has
        committed. May be repeated after an error. Cleans up at the end.
        """
        listed = {info.name: (info.size, info.etag) for info in self._store.list() if layout.is_data(info.name)}
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
        for info in list(self._store.list()):
            if layout.is_data(info.name) and info.name not in wanted:
                self._store.delete(info.name)

    def discard(self, check: Callable[[], None] = lambda: None) -> int:
        """Remove all objects of unfinished runs, the lock last; returns their number.

        ``check`` is called before each deletion, and raises if this run has lost the path.
        Raises `BackupPathInUse` for a complete backup, or one of another tool.
        """
        if exists(self._store, layout.META):
            raise BackupPathInUse(
                f"{self._store.location} holds a complete backup, which is not removed",
                hint="`tikv-br prune` removes complete backups.",
            )
        if run_record.path_state(self._store) is run_record.PathState.FREE:
            return 0
        names = [info.name for info in self._store.list()]
        gone = [name for name in names if layout.is_data(name) or layout.is_record(name)]
        # If interrupted, it leaves a run that has done less and can be resumed.
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


@dataclass(slots=True)
class _Work:
    """Contents of the ledger that a commit needs."""

    meta: MetaEncoder
    """Raises for what `BackupSet.open` would refuse."""
    listed: dict[str, tuple[int, str]]
    """Size and ETag of the data files in the storage, by name, but for those of the entries."""
    intervals: list[KeyRange] = field(default_factory=list)
    files: RecordList[FileEntry] = field(default_factory=lambda: RecordList(FileEntry))
    last: KeyRange | None = None
    """Range of the last file."""
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
        if not entry.files:
            return
        files = sorted(entry.files, key=lambda file: (file.start_key, file.end_key))
        ranges = [file.key_range for file in files]
        if self.last is not None and ranges[0] < self.last:
            raise CoverageError(f"{ranges[0]} and {self.last} overlap, or are not within their intervals")
        require_disjoint(ranges if self.last is None else [self.last, *ranges])
        self.last = ranges[-1]
        files = [self._find(file) for file in files]
        self.meta.add(files)
        for file in files:
            self.files.append(file)
        self.totals = totals([self.totals, *files])

    def _find(self, file: FileEntry) -> FileEntry:
        """The entry of a file that the listing has, with its ETag."""
        found = self.listed.pop(file.name, None)
        if found is None:
            raise BackupDamaged(f"{file.name} was written but is missing")
        size, etag = found
        if damage := size_damage(size, file.size):
            raise BackupDamaged(f"{file.name} {damage}")
        return file if file.etag or not etag else replace(file, etag=etag)


@dataclass(frozen=True, slots=True)
class BackupSet:
    """A complete backup, according to its own records."""

    store: ObjectStore
    api_version: ApiVersion
    """API version of the files."""
    cluster_id: int
    cluster_version: str
    ranges: tuple[KeyRange, ...]
    """RPC keys of `api_version`."""
    files: tuple[FileEntry, ...]
    backup_ts: int
    """Backup-ts; 0 = none."""
    file_kind: FileKind
    manifest: Manifest | None
    """None for a backup of the Go tool."""

    @classmethod
    def open(cls, store: ObjectStore) -> BackupSet:
        """Read the records and compare them with each other; reads no data file.

        Raises `BackupNotFound`, `BackupDamaged` naming the object, `BackupUnsupported`, `CrypterMismatch`.
        """
        try:
            data = store.get(layout.META)
        except StorageObjectMissing as error:
            raise BackupNotFound(f"no complete backup at {store.location}: {error.message}") from None
        known = _read_manifest(store, data)
        if known is not None and hashlib.sha256(data).digest() != known.backupmeta_sha256:
            raise BackupDamaged(_meta_damage(data, known, store.location.crypter))
        content = decode(data, store.location.crypter)
        if known is None and content.tool.startswith(TOOL_PREFIX):
            raise BackupDamaged(f"{layout.MANIFEST} is missing, although {layout.META} was written by tikv-br")
        # Both carry hashes of their own; this finds what a faulty writer, or an edit of both, has changed.
        if known is not None and content != decode(encode(meta_content(known.description, known.files))):
            raise BackupDamaged(f"{layout.META} and {layout.MANIFEST} contradict each other")
        return cls.from_records(store, content, known)

    @classmethod
    def from_records(cls, store: ObjectStore, content: MetaContent, known: Manifest | None) -> BackupSet:
        return cls(
            store=store,
            api_version=content.api_version,
            cluster_id=content.cluster_id,
            cluster_version=content.cluster_version,
            ranges=content.ranges,
            files=tuple(content.files if known is None else known.files),
            backup_ts=content.backup_ts,
            file_kind=content.file_kind,
            manifest=known,
        )

    @property
    def expiry_recorded(self) -> bool:
        """Return whether file entries have expiries. Entries of the Go tool do not, nor V2 ones by some versions of TiKV."""
        if self.manifest is None:
            return False
        description = self.manifest.description
        by_stores = description.engine == "store" and description.api_version is self.api_version is ApiVersion.V2
        return not (by_stores and lacks_expiry(description.cluster_version))

    @classmethod
    def open_any(cls, store: ObjectStore) -> BackupSet:
        """Open as `open`, also with a key that a backup in clear does not need."""
        if store.location.crypter.encrypts:
            with contextlib.suppress(CrypterMismatch):
                return cls.open(open_store(replace(store.location, crypter=PLAIN)))
        return cls.open(store)

    def chain(self) -> list[BackupSet]:
        """The full backup that this one continues, the increments since then, and this one; itself alone if it is full.

        Raises `BackupNotFound` for a parent that is gone, `BackupDamaged` if another backup is in its place.
        """
        found = [self]
        while (parent := found[0].parent()) is not None:
            found.insert(0, parent)
        return found

    def parent(self) -> BackupSet | None:
        """The backup that this one continues, if it is incremental. Raises as `chain`."""
        if self.manifest is None or not self.manifest.description.parent:
            return None
        description = self.manifest.description
        store = open_store(_parent_location(self.store.location, description))
        parent = BackupSet.open_any(store)
        found = hashlib.sha256(store.get(layout.META)).digest()
        if found != description.parent_sha256:
            raise BackupDamaged(
                f"{store.location} is another backup than the one that {self.store.location} continues: its "
                f"{layout.META} has the sha256 {found.hex()[:16]}…, not {description.parent_sha256.hex()[:16]}…"
            )
        return parent

    @property
    def is_increment(self) -> bool:
        """Return whether it has only the changes since another backup."""
        return self.manifest is not None and bool(self.manifest.description.parent)

    def require_full(self) -> None:
        """Raise `BackupUnsupported` for an increment, whose rows are only the changes since another backup."""
        if self.is_increment:
            raise BackupUnsupported(
                f"{self.store.location} is an incremental backup: it has only the changes since another one",
                hint="Use `tikv-br restore raw`, which restores all of its chain, or `tikv-br backup merge` to make a full backup.",
            )

    @property
    def encryption(self) -> str:
        """`Crypter.method` of files and records."""
        return self.store.location.crypter.method

    @property
    def totals(self) -> Totals:
        return totals(self.files)

    @property
    def is_at_original_location(self) -> bool:
        """Return whether it is at the location where it was written, so that the recorded ETags are valid."""
        return self.manifest is not None and self.manifest.description.storage == self.store.location.redacted()

    def verify_identity(self, file: FileEntry) -> None:
        """See `verify_file_identity`; ETags are compared only where the backup was written."""
        verify_file_identity(self.store, file, etag_counts=self.is_at_original_location)

    def verify_content(self, file: FileEntry, readers: int = 1) -> None:
        verify_file_content(self.store, file, readers)


def _parent_location(here: StorageLocation, description: Description) -> StorageLocation:
    """Return the location of the parent: relative to the child's as recorded, since backups may have been copied together."""
    written, parent = parse_url(description.storage), parse_url(description.parent)
    if (parent.scheme, parent.bucket) != (written.scheme, written.bucket):
        return replace(parent, s3=here.s3, azure=here.azure, gcs=here.gcs, crypter=here.crypter)
    relative = posixpath.relpath("/" + parent.path.lstrip("/"), "/" + written.path.lstrip("/"))
    path = posixpath.normpath(posixpath.join("/" + here.path.lstrip("/"), relative))
    return replace(here, path=path if here.scheme == "local" else path.lstrip("/"))


def _meta_damage(data: bytes, known: Manifest, crypter: Crypter) -> str:
    """Return the difference if `backupmeta` does not belong to the manifest."""
    problem = f"its hash is not the one in {layout.MANIFEST}"
    try:
        names = [file.name for file in decode(data, crypter).files]
    except BackupDamaged as error:
        return error.message
    except BackupSetError:
        return f"{layout.META} is altered: {problem}"
    wanted = [file.name for file in known.files]
    is_other = names != wanted and not any(map(_differs_little, names, wanted))
    return f"{layout.META} {'belongs to another backup' if is_other else 'is altered'}: {problem}"


def _differs_little(one: str, other: str) -> bool:
    """Return whether two names differ in at most one character, as after a flipped bit. Different backups differ in many."""
    return len(one) == len(other) and sum(map(ne, one, other)) <= 1


def meta_content(description: Description, files: Sequence[FileEntry]) -> MetaContent:
    """The content of `backupmeta`. Raises `BackupUnsupported` for a file format that only a newer version knows."""
    try:
        kind = FileKind(description.file_format)
    except ValueError:
        raise BackupUnsupported(f"the backup's file format {description.file_format!r} is not supported") from None
    return MetaContent(
        cluster_id=description.cluster_id,
        cluster_version=description.cluster_version,
        tool=f"{TOOL_PREFIX}{description.tool_version}",
        api_version=description.dst_api_version,
        ranges=description.ranges,
        files=tuple(files),
        backup_ts=description.backup_ts,
        file_kind=kind,
        is_increment=bool(description.parent),
    )


def _read_manifest(store: ObjectStore, backupmeta: bytes) -> Manifest | None:
    try:
        data = store.get(layout.MANIFEST)
    except StorageObjectMissing:
        return None
    try:
        return manifest.load(data, store.location.crypter)
    except CrypterMismatch as error:  # a damaged one may look encrypted with another key
        if not _fits(backupmeta, store.location.crypter):
            raise
        raise BackupDamaged(f"{layout.MANIFEST} is damaged: the key fits {layout.META}, but {error.message}") from None


def _fits(backupmeta: bytes, crypter: Crypter) -> bool:
    """Return whether `backupmeta` can be decoded with a key, or without one."""
    try:
        decode(backupmeta, crypter)
    except BackupSetError:
        return False
    return True
