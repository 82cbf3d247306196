"""What an export reads, and the task that writes one part of it.

A task writes one object, which becomes visible as a whole and replaces that of an earlier attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.rows import read_rows
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.rawkv import RawClient
from tikv_br.dataflow.task import try_task
from tikv_br.errors import UsageError
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.formats.tables import TableOptions


@dataclass(slots=True)
class ExportPart:
    """One file of an export, and what was counted while it was written. Picklable."""

    name: str
    rows: int = 0
    data_bytes: int = 0
    """Of user keys and values."""
    size: int = 0
    """Bytes of the file."""
    vanished: int = 0
    """Rows left out because they no longer existed when their TTL was read."""
    expiry_error_seconds: int = 0
    """Maximum number of seconds by which an expiry may be too early."""


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """A keyspace of a cluster. Picklable."""

    config: ClusterConfig
    codec: KeyCodec
    with_ttl: bool
    """Whether the TTL of each key is requested."""
    rate_limit: RateLimit = field(default_factory=RateLimit)

    def batches(self, span: KeyRange, part: ExportPart, context: TaskContext) -> Iterator[pa.RecordBatch]:
        """The rows of an RPC range, page by page, one page ahead; counts in ``part`` what requests for TTLs show."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from tikv_br.cluster.prefetch import Prefetcher
        from tikv_br.cluster.ttl import TtlFetcher
        from tikv_br.formats import columns

        cluster = context.shared(ClusterPool).get(self.config)
        raw = RawClient(cluster.router, self.codec, cluster.cluster_id)
        ttls = TtlFetcher(cluster, raw) if self.with_ttl else None
        prefix = len(self.codec.prefix)
        for page in Prefetcher(raw.scan_raw_pages(span.start, span.end, rate_limit=self.rate_limit)):
            rows = page.split()
            keys, values, expire_ts = rows.keys, rows.values, None
            if ttls is not None:
                expire_ts, there = ttls.fetch(keys)
                part.vanished += int((~there).sum())
                part.expiry_error_seconds = max(part.expiry_error_seconds, ttls.error_seconds)
                keys, values, expire_ts = keys.filter(pa.array(there)), values.filter(pa.array(there)), expire_ts[there]
            if prefix:
                keys = pc.binary_replace_slice(keys, 0, prefix, b"")
            yield columns.records(keys, values, expire_ts=expire_ts)


@dataclass(frozen=True, slots=True)
class BackupSource:
    """A keyspace of a full backup, and of the increments on it. Picklable."""

    backups: tuple[tuple[StorageLocation, tuple[FileEntry, ...]], ...]
    """In the order of their time; the files of each by key."""
    codec: KeyCodec
    ts: int
    """With increments: the rows of this timestamp are read."""
    now: int
    """Seconds since the epoch: rows that have expired by then are left out."""

    def batches(self, span: KeyRange, part: ExportPart, context: TaskContext) -> Iterator[pa.RecordBatch]:
        """The rows of an RPC range, by ascending key; no tombstones, one version per key."""
        from tikv_br.formats.merge import rows_at
        from tikv_br.formats.rows import LiveFilter

        del part, context
        runs = [self._stored_rows(location, files, span) for location, files in self.backups]
        if len(runs) > 1:
            yield from rows_at(runs, self.ts, self.now)
            return
        newest = LiveFilter(self.now)
        for batch in runs[0]:
            yield newest.apply(batch)

    def _stored_rows(
        self, location: StorageLocation, files: Sequence[FileEntry], span: KeyRange
    ) -> Iterator[pa.RecordBatch]:
        store = open_store(location)
        for file in files:
            within = intersection(file.key_range, span)
            if not within.is_empty:
                yield from read_rows(store, file, self.codec, within)


@dataclass(frozen=True, slots=True)
class ExportJob:
    """What all tasks of an export share. Picklable."""

    source: ClusterSource | BackupSource
    destination: StorageLocation
    table: TableOptions


@dataclass(frozen=True, slots=True)
class ExportTask:
    """An RPC range, and the name of its file."""

    span: KeyRange
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.span}"


def run_export_task(job: ExportJob, task: ExportTask, context: TaskContext) -> ExportPart:
    """Write one part, with retries. Raises the `TikvBrError` of the last attempt."""
    return try_task(lambda: _write_part(job, task, context))


def _write_part(job: ExportJob, task: ExportTask, context: TaskContext) -> ExportPart:
    """Write one part. After an error nothing of it is visible."""
    from tikv_br.formats.tables import UnfitText, open_table

    part = ExportPart(task.name)
    with open_store(job.destination).open_writer(task.name) as writer:
        table = open_table(writer.write, job.table)
        try:
            for batch in job.source.batches(task.span, part, context):
                table.append(batch)
                size = _data_bytes(batch)
                part.rows += batch.num_rows
                part.data_bytes += size
                context.report(data_bytes=size, keys=batch.num_rows)
            table.finish()
        except BaseException as error:
            table.abort()
            context.report(data_bytes=-part.data_bytes, keys=-part.rows)
            if isinstance(error, UnfitText):
                hint = "Pass --encoding hex or escaped, or --format parquet."
                raise UsageError(f"{error}, so it cannot be written with --encoding raw", hint=hint) from None
            raise
        part.size = writer.close().size
    return part


def _data_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of keys and values."""
    from tikv_br.formats import columns

    offsets = [columns.view(batch[name])[0] for name in ("key", "value")]
    return sum(int(each[-1] - each[0]) for each in offsets)
