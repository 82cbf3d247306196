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

from tikv_br.backupset import coverage, layout, ledger, manifest, run_record
from tikv_br.backupset.coverage import RegionList, require_disjoint
from tikv_br.backupset.files import (
    FileEntry,
    FileKind,
    FileList,
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
    Statistics,
    decode,
    encode,
    encode_checked,
)
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

    @classmethod
    def create(cls, store: ObjectStore) -> BackupWriter:
        """Start at an empty path. Raises `BackupPathInUse` if it has a backup or a part of one."""
        if run_record.path_state(store) is not run_record.PathState.FREE:
            raise BackupPathInUse(f"{store.location} holds an interrupted backup")
        run_record.mark_path(store)
        return cls(store)

    def commit(
        self,
        description: Description,
        entries: Iterable[LedgerEntry],
        confirm: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Verify that the entries cover the source ranges and that their files exist, then commit the backup.

        ``confirm`` is called right before each of the two writes, and raises if this run has lost the path.
        Raises `CoverageError`, `BackupDamaged` for a missing or truncated file, `BackupPathInUse` if another run has
        committed. May be repeated after an error. Cleans up at the end.
        """
        return self.commit_ordered(description, ledger.one_per_interval(entries), confirm)

    def commit_ordered(
        self,
        description: Description,
        entries: Iterable[LedgerEntry],
        confirm: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """As `commit`, with one entry for each interval, in the order of keys. Keeps none of them, and little of each file."""
        done = _read_work(entries)
        coverage.require_coverage(description.source_ranges, done.intervals)
        _check_files(self._store, done.files)
        sums = totals(done.files)
        crypter = self._store.location.crypter
        data = encode_checked(
            meta_content(description, ()), done.files, crypter
        )  # publishes nothing that `open` would refuse
        made = Manifest(
            description=description,
            statistics=Statistics(
                crc64xor=sums.crc64xor,
                total_kvs=sums.total_kvs,
                total_bytes=sums.total_bytes,
                backup_size=sums.size,
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
        self.clean_up(made)
        return made

    def clean_up(self, made: Manifest) -> None:
        """Remove the run's temporary objects. Errors are only logged."""
        try:
            ledger.remove_entries(self._store)
            self.remove_files_except({file.name for file in made.files})
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
        run_record.unmark_path(self._store)
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
    """What a commit takes out of the ledger."""

    intervals: list[KeyRange] = field(default_factory=list)
    files: FileList = field(default_factory=FileList)
    regions: RegionList = field(default_factory=RegionList)
    has_regions: bool = False
    """Whether any task has recorded the regions that its rows came from."""
    dropped_ttls: int = 0
    dropped_tombstones: int = 0


def _read_work(entries: Iterable[LedgerEntry]) -> _Work:
    """Read the entries once. Raises `CoverageError` if files overlap."""
    work, previous = _Work(), None
    for entry in entries:
        work.intervals.append(entry.interval)
        work.dropped_ttls += entry.dropped_ttls
        work.dropped_tombstones += entry.dropped_tombstones
        work.has_regions = work.has_regions or bool(entry.regions)
        for part in sorted(entry.parts, key=lambda part: part.start):
            work.regions.add(part)
        files = sorted(entry.files, key=lambda file: file.key_range)
        ranges = [file.key_range for file in files]
        if previous is not None and ranges:
            if ranges[0] < previous:
                raise CoverageError(f"{ranges[0]} and {previous} overlap, or are not within their intervals")
            ranges.insert(0, previous)
        require_disjoint(ranges)
        for file in files:
            work.files.append(file)
        previous = ranges[-1] if ranges else previous
    return work


@dataclass(frozen=True, slots=True)
class BackupSet:
    """A complete backup, according to its own records."""

    store: ObjectStore
    api_version: ApiVersion
    """In which the files are written."""
    cluster_id: int
    cluster_version: str
    ranges: tuple[KeyRange, ...]
    """RPC keys of `api_version`."""
    files: tuple[FileEntry, ...]
    backup_ts: int
    """0 = none."""
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
        """The backup with these records, which must agree."""
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

    @classmethod
    def open_any(cls, store: ObjectStore) -> BackupSet:
        """As `open`, for a backup that may be encrypted or not: the store's key is used only if it is."""
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
        """Whether it has only the changes since another backup."""
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
        """Sums over all files."""
        return totals(self.files)

    @property
    def is_at_original_location(self) -> bool:
        """Whether it is where it was written, so that the recorded ETags are valid."""
        return self.manifest is not None and self.manifest.description.storage == self.store.location.redacted()

    def verify_identity(self, file: FileEntry) -> None:
        """See `verify_file_identity`; ETags are compared only where the backup was written."""
        verify_file_identity(self.store, file, etag_counts=self.is_at_original_location)

    def verify_content(self, file: FileEntry) -> None:
        """See `verify_file_content`."""
        verify_file_content(self.store, file)


def _parent_location(here: StorageLocation, description: Description) -> StorageLocation:
    """Where the parent is: at its recorded place relative to the child's, as backups may have been copied together."""
    written, parent = parse_url(description.storage), parse_url(description.parent)
    if (parent.scheme, parent.bucket) != (written.scheme, written.bucket):
        return replace(parent, s3=here.s3, azure=here.azure, gcs=here.gcs, crypter=here.crypter)
    relative = posixpath.relpath("/" + parent.path.lstrip("/"), "/" + written.path.lstrip("/"))
    path = posixpath.normpath(posixpath.join("/" + here.path.lstrip("/"), relative))
    return replace(here, path=path if here.scheme == "local" else path.lstrip("/"))


def _meta_damage(data: bytes, known: Manifest, crypter: Crypter) -> str:
    """What is wrong with a `backupmeta` that does not belong to the manifest."""
    problem = f"its hash is not the one in {layout.MANIFEST}"
    try:
        names = {file.name for file in decode(data, crypter).files}
    except BackupDamaged as error:
        return error.message
    except BackupSetError:
        return f"{layout.META} is altered: {problem}"
    is_other = names != {file.name for file in known.files}
    return f"{layout.META} {'belongs to another backup' if is_other else 'is altered'}: {problem}"


def _check_files(store: ObjectStore, files: FileList) -> None:
    """Add the ETags that are not known. Raises `BackupDamaged` unless a listing has each of the files, once, with its size."""
    there = {info.name: (info.size, info.etag) for info in store.list() if layout.is_data(info.name)}

    def checked(file: FileEntry) -> FileEntry:
        found = there.pop(file.name, None)
        if found is None:
            raise BackupDamaged(f"{file.name} was written but is missing")
        size, etag = found
        if damage := size_damage(size, file.size):
            raise BackupDamaged(f"{file.name} {damage}")
        return file if file.etag or not etag else replace(file, etag=etag)

    files.replace_each(checked)


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
    """Whether `backupmeta` reads with a key, or without one."""
    try:
        decode(backupmeta, crypter)
    except BackupSetError:
        return False
    return True
