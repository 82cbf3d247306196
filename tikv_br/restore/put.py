"""One task of a restore by puts: rows are read here and written as any client writes them.

The cluster gives them fresh timestamps (API V2), change feeds see them, and no SST is handed to a store. It costs a Raft
entry a batch: many times the time of an ingest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.shared import shared_cluster
from tikv_br.proof.ranges import codec_of
from tikv_br.proof.stored_rows import naming, records
from tikv_br.restore.plan import Brought, FilePart
from tikv_br.restore.record import RestoreRecord
from tikv_br.spark.task import TaskContext
from tikv_br.storage.base import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 16_384
"""Rows that are told from expired ones at one moment, and reported as progress."""


@dataclass(frozen=True, slots=True)
class PutJob:
    """What all tasks of a restore share. Pickles."""

    cluster: ClusterConfig
    api_version: ApiVersion
    store: ObjectStore
    record: RestoreRecord | None = None
    """Where each part is written down when it is in."""


def put_part(job: PutJob, part: FilePart, context: TaskContext) -> Brought:
    """Put the rows of one part that have not expired, with what is left of their TTL.

    Raises `BackupDamaged` and `BackupUnsupported` naming the file, `StorageError`, `ClusterError`.
    """
    from formats import columns
    from formats.rows import unexpired

    codec = codec_of(job.api_version, part.target)
    raw = shared_cluster(job.cluster).raw(codec.keyspace_id)
    put = expired = 0
    for chunk in _chunks(job, part, codec):
        alive = unexpired(chunk, int(time.time()))
        raw.put_columns(alive["key"], alive["value"], columns.numbers(alive["expire_ts"]))
        put += alive.num_rows
        expired += chunk.num_rows - alive.num_rows
        context.report(data_bytes=chunk.nbytes, keys=alive.num_rows)
    if job.record is not None:
        job.record.add(part.span)
    return Brought(put=put, expired=expired)


def _chunks(job: PutJob, part: FilePart, codec: KeyCodec) -> Iterator[pa.RecordBatch]:
    """The newest row of each key of the part, expired or not, under the name that it gets."""
    from formats.rows import LiveFilter

    newest = LiveFilter(now=0)
    source = codec_of(job.api_version, part.file.key_range)
    with naming(part.file):
        for batch in records(job.store, part.file, source, part.span):
            rows = part.rewrite.apply(newest.apply(batch), source, codec)
            for first in range(0, rows.num_rows, CHUNK_ROWS):
                yield rows.slice(first, CHUNK_ROWS)
