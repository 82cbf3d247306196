"""The tasks of a verification: each checks one file, or one range of a cluster, and returns findings.

Errors are raised only for what prevents a check, such as a storage or a cluster that does not answer.

Checks of a backup's records, and of the listing of its objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from tikv_br.backupset import backupmeta, layout, manifest
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.backupmeta import meta_content
from tikv_br.backupset.coverage import codec_of, require_disjoint
from tikv_br.backupset.files import (
    FileEntry,
    FileKind,
    FilePair,
    content_damage,
    replaced_size_damage,
    verify_file_identity,
)
from tikv_br.backupset.manifest import Manifest
from tikv_br.backupset.rows import kind_of
from tikv_br.backupset.sealed import with_key_of
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.compare.files import BackupComparison, Comparison, FilePart, TxnComparison
from tikv_br.errors import BackupDamaged, BackupUnsupported, CoverageError, CrypterMismatch, StorageObjectMissing
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import CHUNK_SIZE, ObjectInfo, ObjectSource, ObjectStore, exists
from tikv_br.tasks.task import TaskContext
from tikv_br.verify.options import Finding, Level

if TYPE_CHECKING:
    from tikv_br.verify.row_sums import RowSums


class TaskFindings(Struct, frozen=True):
    """Result of a task."""

    findings: tuple[Finding, ...]
    size: int = 0
    """Stored bytes read."""
    rows: int = 0
    """Rows without a finding that were read, or counted by the cluster."""


class FileJob(Struct, frozen=True):
    """Parameters that all tasks that read files share. Picklable."""

    store: ObjectStore
    api_version: ApiVersion
    key_mode: KeyMode
    level: Level
    """Level of the check: `Level.FILES` or `Level.DATA`."""
    expiry_recorded: bool
    """True if the backup records the expiring rows of each file; tikv-br's backups do."""
    backup_ts: int
    is_increment: bool = False
    """True if files have tombstones, as in incremental backups."""


def check_part(job: FileJob, part: FilePair, context: TaskContext) -> TaskFindings:
    """Read the files of a part once as a whole, and check them at the job's level."""
    try:
        data = {file: HashedFile(job.store, file, lambda size: context.report(data_bytes=size)) for file in part.files}
        rows, causes = _check_rows(job, part, data) if job.level is Level.DATA else (0, [])
        findings = [
            Finding(file.name, cause, Level.FILES) for file in data for cause in _check_content(job, file, data[file])
        ]
    except StorageObjectMissing:
        gone = next((file for file in part.files if not exists(job.store, file.name)), part.file)
        return TaskFindings((Finding(gone.name, "was removed during the check", Level.FILES),))
    except BackupDamaged as error:  # encrypted, but no IV is recorded
        return TaskFindings((Finding(part.file.name, error.message, Level.FILES),))
    findings += [Finding(part.file.name, cause, Level.DATA) for cause in causes]
    context.report(keys=rows)
    return TaskFindings(tuple(findings), sum(each.size for each in data.values()), rows)


class HashedFile(ObjectSource):
    """A stored file that hashes its bytes while they are read, so that rows and SHA-256 need one pass."""

    def __init__(self, store: ObjectStore, file: FileEntry, on_bytes: Callable[[int], None]) -> None:
        super().__init__(store, file.name, file.cipher_iv)
        self._sha256 = hashlib.sha256()
        self._hashed = 0
        self._on_bytes = on_bytes

    def read_stored(self, offset: int, length: int) -> bytes:
        """Return ``length`` stored bytes from ``offset``; hashes those that follow the bytes hashed so far."""
        data = super().read_stored(offset, length)
        known = self._hashed - offset
        if 0 <= known < len(data):
            self._sha256.update(memoryview(data)[known:])
            self._hashed = offset + len(data)
            self._on_bytes(len(data) - known)
        return data

    def digest(self) -> bytes:
        """The SHA-256 of the whole object; reads the rest of it."""
        while self._hashed < self.size:
            if not self.read_stored(self._hashed, min(CHUNK_SIZE, self.size - self._hashed)):
                break  # truncated since: the hash will differ
        return self._sha256.digest()


def _check_content(job: FileJob, file: FileEntry, sst: HashedFile) -> Iterator[str]:
    digest = sst.digest()
    if not file.sha256:
        yield "has no recorded sha256 to compare with"
    elif digest != file.sha256:
        yield content_damage(job.store, file, file.sha256, digest)
        return
    try:
        verify_file_identity(job.store, file, etag_counts=False)
    except BackupDamaged as error:
        yield error.message


def _check_rows(job: FileJob, part: FilePair, data: Mapping[FileEntry, HashedFile]) -> tuple[int, list[str]]:
    """Check every row and their sums; returns the number of rows, and the causes of findings."""
    file = part.file
    codec = codec_of(job.api_version, file.key_range, job.key_mode)
    if codec.mode is KeyMode.TXN and file.cf != "write":  # the other file of the part is missing
        return 0, []
    try:
        if codec.mode is KeyMode.TXN:
            from tikv_br.verify.row_sums import sum_txn

            sums = sum_txn(part, data, codec, job.backup_ts)
        elif kind_of(file) is FileKind.PARQUET:
            sums = _sum_parquet(file, data[file], codec)
        else:
            sums = _sum_sst(file, data[file], codec)
    except FormatError as error:
        return 0, [f"is damaged: {error}"]
    against = sums.against(
        part.sums,
        with_ts=codec.is_v2,  # some versions of TiKV reported meaningless ones of V1TTL files, which were recorded
        with_expiry=job.expiry_recorded,
        is_increment=job.is_increment,
    )
    causes = [
        f"has {what} {found}, but the backup recorded {recorded}"
        for what, found, recorded in against
        if found != recorded
    ]
    return 0 if causes else sums.rows, causes


def _sum_sst(file: FileEntry, data: HashedFile, codec: KeyCodec) -> RowSums:
    """The sums of an SST, after checking every block and row."""
    from tikv_br.formats.sst.check import check_structure
    from tikv_br.formats.sst.row_check import check_rows
    from tikv_br.verify.row_sums import SummingReader

    reader = SummingReader(data, codec)
    check_structure(reader.table, codec, codec.bound(file.start_key), codec.bound(file.end_key))
    check_rows(reader, codec.api_version)
    return reader.sums


def _sum_parquet(file: FileEntry, data: HashedFile, codec: KeyCodec) -> RowSums:
    from tikv_br.formats.parquet import ParquetReader
    from tikv_br.verify.row_sums import sum_records

    return sum_records(ParquetReader(data, file.total_bytes).records(), file, codec)


class CompareJob(Struct, frozen=True):
    """Parameters that all tasks of a comparison share. Picklable."""

    cluster: ClusterConfig
    store: ObjectStore
    api_version: ApiVersion
    key_mode: KeyMode
    expiry_recorded: bool

    def comparison(self, cluster: Cluster) -> Comparison:
        """The comparison for data of this mode."""
        if self.key_mode is KeyMode.TXN:
            return TxnComparison(cluster, self.store, self.api_version)
        return BackupComparison(cluster, self.store, self.api_version, expiry_recorded=self.expiry_recorded)


def name_of(task: FilePart | KeyRange) -> str:
    """The object of findings: a file, or a range without rows in the backup."""
    return str(task) if isinstance(task, FilePart) else f"cluster {task}"


def compare_with_cluster(job: CompareJob, task: FilePart | KeyRange, context: TaskContext) -> TaskFindings:
    """Compare a file, or a range without rows in the backup, with the cluster."""
    comparison = job.comparison(context.shared(ClusterPool).get(job.cluster))
    try:
        if isinstance(task, FilePart):
            equal, difference = comparison.compare(task)
        else:
            equal, difference = Checksum(), comparison.compare_empty(task)
    except BackupDamaged as error:
        return TaskFindings((Finding(name_of(task), error.message, Level.DATA),))
    except StorageObjectMissing:
        return TaskFindings((Finding(name_of(task), "was removed during the check", Level.FILES),))
    context.report(data_bytes=equal.total_bytes, keys=equal.total_kvs)
    findings = (Finding(name_of(task), difference, Level.RESTORE),) if difference else ()
    return TaskFindings(findings, rows=equal.total_kvs)


T = TypeVar("T")


def read_records(store: ObjectStore) -> tuple[BackupSet | None, list[Finding]]:
    """Read `backupmeta` and the manifest. If one is damaged, use the other; None if both are.

    Raises `BackupNotFound`, `BackupUnsupported`, `CrypterMismatch` and `StorageError`.
    """
    try:
        return BackupSet.open(store, key_mode=None), []
    except BackupDamaged as error:
        damage = error.message
    findings: list[Finding] = []
    store = with_key_of(store, layout.MANIFEST)
    crypter = store.location.crypter
    known = _read(store, layout.MANIFEST, partial(manifest.load, crypter=crypter), findings)
    content = _read(store, layout.META, partial(backupmeta.decode, crypter=crypter), findings)
    if not findings and known is None and content is not None:
        findings = [Finding(layout.MANIFEST, "is missing, although tikv-br made the backup", Level.META)]
    elif not findings:
        findings = [Finding(layout.META, damage, Level.META)]
    if known is not None:
        content = meta_content(known.description, known.files)
    return (None if content is None else BackupSet.from_records(store, content, known)), findings


def check_records(backup: BackupSet) -> Iterator[Finding]:
    """Check the records for contradictions: overlapping ranges, and sums that do not add up."""
    try:
        require_disjoint(backup.ranges)
    except CoverageError as error:
        yield Finding(layout.META, f"has overlapping ranges: {error.message}", Level.META)
    for before, file in pairwise(sorted(backup.files, key=lambda file: (file.cf, file.key_range))):
        if before.cf == file.cf and (not before.key_range.end or file.start_key < before.end_key):
            cause = f"its range {file.key_range} overlaps the range of {before.name}, {before.key_range}"
            yield Finding(file.name, cause, Level.META)
    if backup.manifest is not None:
        yield from _check_statistics(backup, backup.manifest)


def check_listing(
    backup: BackupSet, listing: Mapping[str, ObjectInfo]
) -> tuple[list[FileEntry], list[Finding], list[str]]:
    """The files that exist with the recorded size, the findings on the others, and the names of foreign objects."""
    present: list[FileEntry] = []
    findings: list[Finding] = []
    for file in backup.files:
        info = listing.get(file.name)
        if info is None:
            findings.append(Finding(file.name, "is missing", Level.META))
        elif damage := replaced_size_damage(backup.store, file, info.size):
            findings.append(Finding(file.name, damage, Level.META))
        else:
            present.append(file)
    named = {layout.META, layout.MANIFEST, layout.LOCK, *(file.name for file in backup.files)}
    foreign = [name for name in listing.keys() - named if not name.startswith(f"{layout.RESTORE}/")]
    return present, findings, sorted(foreign)


def _read(store: ObjectStore, name: str, parse: Callable[[bytes], T], findings: list[Finding]) -> T | None:
    try:
        return parse(store.get(name))
    except StorageObjectMissing:
        return None
    except (BackupDamaged, BackupUnsupported, CrypterMismatch) as error:
        findings.append(Finding(name, error.message, Level.META))
    return None


def _check_statistics(backup: BackupSet, known: Manifest) -> Iterator[Finding]:
    sums, said = backup.totals, known.statistics
    for name, found, recorded in (
        ("rows", sums.total_kvs, said.total_kvs),
        ("bytes of keys and values", sums.total_bytes, said.total_bytes),
        ("stored bytes", sums.size, said.backup_size),
        ("crc64xor", sums.crc64xor, said.crc64xor),
    ):
        if found != recorded:
            yield Finding(layout.MANIFEST, f"records {recorded} {name}, but its files have {found}", Level.META)
