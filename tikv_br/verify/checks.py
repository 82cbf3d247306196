"""The tasks of a verification: each checks one file, or one range of a cluster, and returns findings.

Errors are raised only for what prevents a check, such as a storage or a cluster that does not answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileEntry, FileKind, FilePair
from tikv_br.backupset.identity import content_damage, verify_file_identity
from tikv_br.backupset.rows import kind_of
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.compare.files import BackupComparison, Comparison, FilePart
from tikv_br.compare.txn import TxnComparison
from tikv_br.errors import BackupDamaged, StorageObjectMissing
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import CHUNK_SIZE, ObjectSource, ObjectStore, exists
from tikv_br.tasks.task import TaskContext
from tikv_br.verify.options import Finding, Level

if TYPE_CHECKING:
    from tikv_br.verify.row_sums import RowSums


@dataclass(frozen=True, slots=True)
class TaskFindings:
    """Result of a task."""

    findings: tuple[Finding, ...]
    size: int = 0
    """Stored bytes read."""
    rows: int = 0
    """Rows without a finding that were read, or counted by the cluster."""


@dataclass(frozen=True, slots=True)
class FileJob:
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
    """True if files have tombstones, as those of incremental backups."""


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


@dataclass(frozen=True, slots=True)
class CompareJob:
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
