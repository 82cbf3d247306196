"""The tasks: one file, or one range of the cluster, looked at; what is wrong comes back as findings, not as errors.

Errors are what keeps a task from looking: a storage or a cluster that does not answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from formats.api_version import ApiVersion
from formats.checksum import Checksum
from formats.errors import FormatError
from formats.keys import KeyCodec
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import FileEntry, FileKind
from tikv_br.backupset.identity import verify_file_identity
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.shared import shared_cluster
from tikv_br.errors import BackupDamaged, StorageObjectMissing
from tikv_br.proof.prover import Prover
from tikv_br.proof.ranges import codec_of
from tikv_br.proof.stored_file import StoredFile
from tikv_br.proof.stored_rows import kind_of
from tikv_br.spark.task import TaskContext
from tikv_br.storage.base import CHUNK_SIZE, ObjectStore
from tikv_br.verify.options import Finding, Level

if TYPE_CHECKING:
    from tikv_br.verify.row_sums import RowSums


@dataclass(frozen=True, slots=True)
class Report:
    """What a task has looked at, and what it found wrong."""

    findings: tuple[Finding, ...]
    size: int = 0
    """Stored bytes read."""
    rows: int = 0
    """Rows that were read, or that the cluster has counted, and found right."""


@dataclass(frozen=True, slots=True)
class FileJob:
    """What all tasks that read files share. Pickles."""

    store: ObjectStore
    api_version: ApiVersion
    level: Level
    """`Level.FILES` or `Level.DATA`."""
    expiry_recorded: bool
    """Whether the backup says of each file which rows expire: ours do."""


def check_file(job: FileJob, file: FileEntry, context: TaskContext) -> Report:
    """Read a file once, from its first to its last byte, and look at it as deep as the job says."""
    try:
        sst = HashedFile(job.store, file, lambda size: context.report(data_bytes=size))
        rows, findings = 0, []
        if job.level is Level.DATA:
            rows, causes = _check_rows(job, file, sst)
            findings = [Finding(file.name, cause, Level.DATA) for cause in causes]
        findings = [Finding(file.name, cause, Level.FILES) for cause in _check_content(job, file, sst)] + findings
    except StorageObjectMissing:
        return Report((Finding(file.name, "went missing while it was checked", Level.FILES),))
    except BackupDamaged as error:  # encrypted, and nothing recorded to decrypt it by
        return Report((Finding(file.name, error.message, Level.FILES),))
    context.report(keys=rows)
    return Report(tuple(findings), sst.size, rows)


class HashedFile(StoredFile):
    """A stored file that hashes its stored bytes in passing, so that rows and sha256 cost one pass."""

    def __init__(self, store: ObjectStore, file: FileEntry, on_bytes: Callable[[int], None]) -> None:
        super().__init__(store, file.name, file.cipher_iv)
        self._sha256 = hashlib.sha256()
        self._hashed = 0
        self._on_bytes = on_bytes

    def read_stored(self, offset: int, length: int) -> bytes:
        """Return ``length`` stored bytes from ``offset``; those that continue what was hashed are hashed."""
        data = super().read_stored(offset, length)
        known = self._hashed - offset
        if 0 <= known < len(data):
            self._sha256.update(memoryview(data)[known:])
            self._hashed = offset + len(data)
            self._on_bytes(len(data) - known)
        return data

    def digest(self) -> bytes:
        """The sha256 of the whole object, of which the rest is read now."""
        while self._hashed < self.size:
            if not self.read_stored(self._hashed, min(CHUNK_SIZE, self.size - self._hashed)):
                break  # cut meanwhile: the hash will tell
        return self._sha256.digest()


def _check_content(job: FileJob, file: FileEntry, sst: HashedFile) -> Iterator[str]:
    digest = sst.digest()
    if not file.sha256:
        yield "has no recorded sha256 to compare with"
    elif digest != file.sha256:
        yield "is altered: its sha256 is not the recorded one"
        return
    try:
        verify_file_identity(job.store, file, etag_counts=False)
    except BackupDamaged as error:
        yield error.message


def _check_rows(job: FileJob, file: FileEntry, data: HashedFile) -> tuple[int, list[str]]:
    """Check every row, and what they come to; the number of rows, and what is wrong."""
    codec = codec_of(job.api_version, file.key_range)
    try:
        sums = _sum_parquet(file, data, codec) if kind_of(file) is FileKind.PARQUET else _sum_sst(file, data, codec)
    except FormatError as error:
        return 0, [f"is not sound: {error}"]
    causes = [
        f"has {what} {found}, the backup recorded {recorded}"
        for what, found, recorded in sums.against(file, with_expiry=job.expiry_recorded)
        if found != recorded
    ]
    return 0 if causes else sums.rows, causes


def _sum_sst(file: FileEntry, data: HashedFile, codec: KeyCodec) -> RowSums:
    """Of every row of an SST, once each block and row was checked."""
    from formats.sst import check_rows
    from tikv_br.verify.row_sums import SummingReader

    reader = SummingReader(data, codec)
    reader.check_structure(codec.api_version, codec.bound(file.start_key), codec.bound(file.end_key))
    check_rows(reader, codec.api_version)
    return reader.sums


def _sum_parquet(file: FileEntry, data: HashedFile, codec: KeyCodec) -> RowSums:
    from formats.parquet_reader import ParquetReader
    from tikv_br.verify.row_sums import sum_records

    return sum_records(ParquetReader(data).records(), file, codec)


class Probe(NamedTuple):
    """One task of a comparison with a cluster: the range of a file, or one in which the backup has no row."""

    span: KeyRange
    file: FileEntry | None

    def __str__(self) -> str:
        return f"cluster {self.span}" if self.file is None else self.file.name


@dataclass(frozen=True, slots=True)
class CompareJob:
    """What all tasks of a comparison share. Pickles."""

    cluster: ClusterConfig
    store: ObjectStore
    api_version: ApiVersion


def compare_range(job: CompareJob, probe: Probe, context: TaskContext) -> Report:
    """Compare one range of the cluster with the backup."""
    prover = Prover(shared_cluster(job.cluster), job.store, job.api_version)
    try:
        equal, differences = _compare(prover, probe)
    except BackupDamaged as error:
        return Report((Finding(str(probe), error.message, Level.DATA),))
    except StorageObjectMissing:
        return Report((Finding(str(probe), "went missing while it was checked", Level.FILES),))
    context.report(data_bytes=equal.total_bytes, keys=equal.total_kvs)
    return Report(tuple(Finding(str(probe), cause, Level.RESTORE) for cause in differences), rows=equal.total_kvs)


def _compare(prover: Prover, probe: Probe) -> tuple[Checksum, list[str]]:
    if probe.file is not None:
        return prover.compare(probe.file, probe.span)
    return Checksum(), prover.compare_empty(probe.span)
