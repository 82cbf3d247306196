"""A backup as a whole: `BackupWriter` makes one, `BackupSet` reads one, ours or the Go tool's.

Written in this order: lock, record of the run, files, ledger, manifest, ``backupmeta``. Read in the reverse: nothing is
believed that the object written after it does not name.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from formats.api_version import ApiVersion
from tikv_br.backupset import layout, ledger, lock, manifest, meta
from tikv_br.backupset.coverage import KeyRange, prove, prove_disjoint
from tikv_br.backupset.files import FileEntry, FileKind, Totals, totals
from tikv_br.backupset.identity import verify_file_content, verify_file_identity
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.backupset.manifest import Description, Manifest, Statistics
from tikv_br.backupset.meta import MetaContent
from tikv_br.backupset.regions import RegionPart, put_together
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupPathInUse,
    BackupSetError,
    BackupUnsupported,
    CrypterMismatch,
    StorageConflict,
    StorageError,
    StorageObjectMissing,
)
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.crypter import PLAIN, Crypter
from tikv_br.storage.open import open_store

log = logging.getLogger(__name__)


class BackupWriter:
    """A backup under way at a path that is this run's alone, by its lease."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @classmethod
    def create(cls, store: ObjectStore) -> BackupWriter:
        """Begin at an empty path. Raises `BackupPathInUse` when it holds a backup or a part of one."""
        if lock.survey(store) is not lock.PathState.FREE:
            raise BackupPathInUse(f"at {store.location} a backup was broken off")
        lock.put(store)
        return cls(store)

    def commit(
        self,
        description: Description,
        entries: Iterable[LedgerEntry],
        confirm: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Prove that the entries cover the source ranges and that their files are there, then make it a backup.

        ``confirm`` is called right before each of the two writes that do so, and raises when the path is not ours any more.
        Raises `CoverageError`, `BackupDamaged` for a file that is not there as recorded, `BackupPathInUse` when there is
        another `backupmeta` by now. May be repeated after an error. Then tidies up.
        """
        done = ledger.one_an_interval(entries)
        files = _present_files(self._store, _proven_files(description, done))
        sums = totals(files)
        crypter = self._store.location.crypter
        data = meta.encode(_meta_content(description, files), crypter)
        meta.decode(data, crypter)  # what `open` would refuse is not published
        made = Manifest(
            description=description,
            statistics=Statistics(
                crc64xor=sums.crc64xor,
                total_kvs=sums.total_kvs,
                total_bytes=sums.total_bytes,
                backup_size=sums.size,
                finished_ms=time.time_ns() // 1_000_000,
                tasks=len(done),
                dropped_ttls=sum(entry.dropped_ttls for entry in done),
                dropped_tombstones=sum(entry.dropped_tombstones for entry in done),
            ),
            files=files,
            backupmeta_sha256=hashlib.sha256(data).digest(),
            regions=_regions(done),
        )
        confirm()
        self._store.put(layout.MANIFEST, manifest.dump(made, crypter))
        confirm()
        self._publish(data)
        self.tidy(made)
        return made

    def tidy(self, made: Manifest) -> None:
        """Remove what the run has left beside the backup; what cannot be removed is an untidiness, not a failure."""
        try:
            ledger.remove_entries(self._store)
            self.remove_files_but({file.name for file in made.files})
            self._sweep()
        except StorageError as error:
            log.warning("some leftovers of the backup stay in the storage: %s", error.message)

    def remove_files_but(self, wanted: Collection[str]) -> None:
        """Remove the data files of failed attempts, and of tasks that nobody waited for."""
        for info in list(self._store.list()):
            if layout.is_data(info.name) and info.name not in wanted:
                self._store.delete(info.name)

    def discard(self, check: Callable[[], None] = lambda: None) -> int:
        """Remove all that unfinished runs have left, the lock last; how many objects there were.

        ``check`` is called before each is deleted, and raises when the path is not ours any more.
        Refuses (`BackupPathInUse`) a complete backup, and what is not of this tool.
        """
        if exists(self._store, layout.META):
            raise BackupPathInUse(
                f"{self._store.location} holds a complete backup, which is not removed",
                hint="`tikv-br prune` removes complete backups.",
            )
        if lock.survey(self._store) is lock.PathState.FREE:
            return 0
        names = [info.name for info in self._store.list()]
        gone = [name for name in names if layout.is_data(name) or layout.is_record(name)]
        # Broken off half-way, it leaves a run that has done less, and can be gone on with.
        for name in sorted(gone, key=lambda name: (name == layout.RUN, not name.startswith(layout.LEDGER))):
            check()
            self._store.delete(name)
        self._sweep()
        check()
        lock.remove(self._store)
        return len(gone)

    def _sweep(self) -> None:
        for folder in ("", layout.FOLDER):
            self._store.sweep(folder)
        for folder in (layout.LEDGER, *layout.DATA_FOLDERS):
            self._store.sweep(folder, deep=True)

    def _publish(self, data: bytes) -> None:
        try:
            self._store.put_if_absent(layout.META, data)
        except StorageConflict:
            if self._store.get(layout.META) != data:  # else an answer got lost, and it is ours
                raise BackupPathInUse(f"another run has finished a backup at {self._store.location}") from None


def _regions(entries: Sequence[LedgerEntry]) -> tuple[RegionPart, ...]:
    """Where all rows came from, if any task has noted it."""
    if not any(entry.regions for entry in entries):
        return ()
    return put_together([part for entry in entries for part in entry.parts])


@dataclass(frozen=True, slots=True)
class BackupSet:
    """A complete backup, as far as its own records tell."""

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
        """Read the records and hold them against each other; no file is looked at.

        Raises `BackupNotFound`, `BackupDamaged` naming the object, `BackupUnsupported`, `CrypterMismatch`.
        """
        try:
            data = store.get(layout.META)
        except StorageObjectMissing as error:
            raise BackupNotFound(f"no finished backup at {store.location}: {error.message}") from None
        known = _read_manifest(store, data)
        if known is not None and hashlib.sha256(data).digest() != known.backupmeta_sha256:
            raise BackupDamaged(f"{layout.META} is not the one that {layout.MANIFEST} was written with")
        content = meta.decode(data, store.location.crypter)
        if known is None and content.tool.startswith(meta.TOOL_PREFIX):
            raise BackupDamaged(f"{layout.MANIFEST} is missing, though {layout.META} is of this tool")
        files = content.files if known is None else known.files
        if known is not None:
            _check_agreement(content, known)
        return cls(
            store=store,
            api_version=content.api_version,
            cluster_id=content.cluster_id,
            cluster_version=content.cluster_version,
            ranges=content.ranges,
            files=files,
            backup_ts=content.backup_ts,
            file_kind=content.file_kind,
            manifest=known,
        )

    @classmethod
    def open_any(cls, store: ObjectStore) -> BackupSet:
        """As `open`, where backups of both kinds may lie: the store's key serves for those that are encrypted."""
        if store.location.crypter.encrypts:
            with contextlib.suppress(CrypterMismatch):
                return cls.open(open_store(replace(store.location, crypter=PLAIN)))
        return cls.open(store)

    @property
    def encryption(self) -> str:
        """`Crypter.method` of files and records."""
        return self.store.location.crypter.method

    @property
    def totals(self) -> Totals:
        """Sums over all files."""
        return totals(self.files)

    @property
    def at_home(self) -> bool:
        """Whether it lies where it was written, so that the storage's recorded marks of the files count."""
        return self.manifest is not None and self.manifest.description.storage == self.store.location.redacted()

    def verify_identity(self, file: FileEntry) -> None:
        """See `verify_file_identity`; the storage's marks count only where the backup was written."""
        verify_file_identity(self.store, file, etag_counts=self.at_home)

    def verify_content(self, file: FileEntry) -> None:
        """See `verify_file_content`."""
        verify_file_content(self.store, file)


def _proven_files(description: Description, entries: Sequence[LedgerEntry]) -> tuple[FileEntry, ...]:
    """The files by key, once it is proved that the entries cover the source, and that no files overlap."""
    prove(description.source_ranges, (entry.interval for entry in entries))
    files = sorted((file for entry in entries for file in entry.files), key=lambda file: file.key_range)
    prove_disjoint(file.key_range for file in files)
    return tuple(files)


def _present_files(store: ObjectStore, files: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """The files with the storage's marks, once a listing has shown that each is there in its size."""
    there = {info.name: info for info in store.list()}
    for file in files:
        if file.name not in there:
            raise BackupDamaged(f"{file.name} was written and is gone")
        if there[file.name].size != file.size:
            raise BackupDamaged(f"{file.name} has {there[file.name].size} bytes, {file.size} were written")
    return tuple(file if file.etag else replace(file, etag=there[file.name].etag) for file in files)


def file_kind(description: Description) -> FileKind:
    """What the files are. Raises `BackupUnsupported` for what a newer version may know."""
    try:
        return FileKind(description.file_format)
    except ValueError:
        raise BackupUnsupported(f"the backup's files are of kind {description.file_format!r}") from None


def _meta_content(description: Description, files: tuple[FileEntry, ...]) -> MetaContent:
    return MetaContent(
        cluster_id=description.cluster_id,
        cluster_version=description.cluster_version,
        tool=f"{meta.TOOL_PREFIX}{description.tool_version}",
        api_version=description.dst_api_version,
        ranges=description.ranges,
        files=files,
        backup_ts=description.backup_ts,
        file_kind=file_kind(description),
    )


def _read_manifest(store: ObjectStore, backupmeta: bytes) -> Manifest | None:
    try:
        data = store.get(layout.MANIFEST)
    except StorageObjectMissing:
        return None
    try:
        return manifest.load(data, store.location.crypter)
    except CrypterMismatch as error:  # a damaged one may look as if it were of another key
        if not _fits(backupmeta, store.location.crypter):
            raise
        raise BackupDamaged(f"{layout.MANIFEST} is damaged: the key fits {layout.META}, but {error.message}") from None


def _fits(backupmeta: bytes, crypter: Crypter) -> bool:
    """Whether `backupmeta` reads with a key, or without one."""
    try:
        meta.decode(backupmeta, crypter)
    except BackupSetError:
        return False
    return True


def _check_agreement(content: MetaContent, known: Manifest) -> None:
    """Both carry hashes of their own; this finds what a faulty writer, or a patient editor, has made of them."""
    if content != meta.decode(meta.encode(_meta_content(known.description, known.files))):
        raise BackupDamaged(f"{layout.META} and {layout.MANIFEST} contradict each other")
