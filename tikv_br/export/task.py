"""Source of an export, and the task that writes one part of it.

A task writes one object, which becomes visible as a whole and replaces the object of an earlier attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.ttl import TtlFetcher
from tikv_br.dataflow.read import StoredRows, scan_rows
from tikv_br.dataflow.write import try_task
from tikv_br.errors import UsageError
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
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
    """Bytes of user keys and values."""
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
    """True if the TTL of each key is requested."""
    rate_limit: RateLimit = field(default_factory=RateLimit)

    def batches(self, span: KeyRange, part: ExportPart, context: TaskContext) -> Iterator[pa.RecordBatch]:
        """The rows of an RPC range, page by page, one page ahead; counts in ``part`` what requests for TTLs show."""
        cluster = context.shared(ClusterPool).get(self.config)
        raw = cluster.raw_of(self.codec)
        ttls = TtlFetcher(cluster, raw) if self.with_ttl else None
        for rows in scan_rows(raw, span, ttls, self.rate_limit):
            if ttls is not None:
                part.vanished, part.expiry_error_seconds = ttls.vanished, ttls.error_seconds
            yield rows


@dataclass(frozen=True, slots=True)
class BackupSource:
    """A keyspace of a full backup, and of the increments on it. Picklable."""

    rows: StoredRows
    codec: KeyCodec

    def batches(self, span: KeyRange, part: ExportPart, context: TaskContext) -> Iterator[pa.RecordBatch]:
        """The rows of an RPC range, by ascending key; no tombstones, one version per key."""
        del part, context
        return self.rows.batches(span, self.codec)


@dataclass(frozen=True, slots=True)
class ExportJob:
    """Parameters that all tasks of an export share. Picklable."""

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
    return try_task(context, lambda: _write_part(job, task, context))


def _write_part(job: ExportJob, task: ExportTask, context: TaskContext) -> ExportPart:
    """Write one part. After an error nothing of it is visible."""
    from tikv_br.formats import columns
    from tikv_br.formats.tables import UnfitText, open_table

    part = ExportPart(task.name)
    with open_store(job.destination).open_writer(task.name) as writer:
        table = open_table(writer.write, job.table)
        try:
            for batch in job.source.batches(task.span, part, context):
                table.append(batch)
                size = int(columns.row_sizes(batch).sum())
                part.rows += batch.num_rows
                part.data_bytes += size
                context.report(data_bytes=size, keys=batch.num_rows)
            table.finish()
        except BaseException as error:
            table.abort()
            if isinstance(error, UnfitText):
                hint = "Pass --encoding hex or escaped, or --format parquet."
                raise UsageError(f"{error}, so it cannot be written with --encoding raw", hint=hint) from None
            raise
        part.size = writer.close().size
    return part
