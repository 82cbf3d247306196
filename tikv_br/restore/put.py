"""The task of a restore by puts: reads rows and writes them with RawBatchPut, as any client does.

The cluster gives the rows new timestamps (API V2), and change feeds report them. Each batch is a Raft entry, so this is many times
slower than an ingest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.compare.files import FilePart
from tikv_br.formats.api_version import ApiVersion
from tikv_br.restore.plan import IngestResult
from tikv_br.restore.record import RestoreRecord
from tikv_br.storage.base import ObjectStore
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 16_384
"""Rows per progress report."""


@dataclass(frozen=True, slots=True)
class PutJob:
    """Parameters that all tasks of a restore share. Picklable."""

    cluster: ClusterConfig
    api_version: ApiVersion
    store: ObjectStore
    record: RestoreRecord | None = None
    """Record of finished parts."""


def put_part(job: PutJob, part: FilePart, context: TaskContext) -> IngestResult:
    """Put the rows of one part that have not expired yet, with their remaining TTL.

    Raises `BackupDamaged` and `BackupUnsupported` naming the file, `StorageError`, `ClusterError`.
    """
    from tikv_br.formats import columns

    rows, span = part.rows(job.store, job.api_version)
    writer = context.shared(ClusterPool).get(job.cluster).raw(rows.target.keyspace_id).column_writer()
    put = expired = 0
    for chunk in _chunks(rows.pages(span)):
        left_out = writer.put(chunk["key"], chunk["value"], columns.numbers(chunk["expire_ts"]))
        chunk_expired = int(left_out.sum())
        put += chunk.num_rows - chunk_expired
        expired += chunk_expired
        context.report(data_bytes=chunk.nbytes, keys=chunk.num_rows - chunk_expired)
    if job.record is not None:
        job.record.add(part.span)
    return IngestResult(put=put, expired=expired)


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for first in range(0, batch.num_rows, CHUNK_ROWS):
            yield batch.slice(first, CHUNK_ROWS)
