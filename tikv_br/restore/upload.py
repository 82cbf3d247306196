"""How a part of a file gets to the replicas of a region where stores cannot reach the storage: it is read and sent here.

A store looks at nothing but the checksum of what is uploaded, and dies of a damaged block at ingest. So files are not passed on:
their rows are read, which verifies every block, and written anew into a file that holds what the region is to get.
"""

from __future__ import annotations

import os
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING

from formats.keys import DATA_PREFIX
from tikv_br.backupset.coverage import KeyRange
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.cluster.throttle import shared_throttle
from tikv_br.proof.ranges import codec_of, user_range
from tikv_br.proof.stored_rows import naming, records
from tikv_br.restore.job import IngestJob
from tikv_br.restore.plan import FilePart

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_SIZE = 1 << 20


class _Walk:
    """Goes once through batches of ascending user keys, range by range."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None
        self._end: bytes | None = b""

    def stands_before(self, start: bytes) -> bool:
        """Whether no row at or above ``start`` was left behind."""
        return self._end is not None and start >= self._end

    def within(self, start: bytes, end: bytes) -> Iterator[pa.RecordBatch]:
        """The rows of ``[start, end)``, ``end`` ``b""`` = unbounded; those before it are left out for good."""
        from formats.rows import within

        self._end = end or None
        while True:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                return
            self._rest = batch if end and batch["key"][-1].as_py() >= end else None
            rows = within(batch, start, end)
            if rows.num_rows:
                yield rows
            if self._rest is not None:
                return


class Upload:
    """Sends one part to stores."""

    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart) -> None:
        self._cluster = cluster
        self._job = job
        self._part = part
        self._codec = codec_of(job.api_version, part.target)
        self._walk = _Walk(self._all_rows())

    def bring(self, region: Region, meta: import_sstpb_pb2.SSTMeta, span: KeyRange) -> bool:
        """Have all replicas' stores keep the rows in ``span``; False when the part has none there.

        Completes ``meta``, with a new uuid: stores refuse one of which they have a part. Raises `BackupDamaged` and
        `BackupUnsupported` naming the file, `StorageError`, `ClusterError`.
        """
        meta.uuid, meta.crc32 = uuid.uuid4().bytes, 0
        with tempfile.TemporaryFile(prefix="tikv-br-") as file:
            if not self._write(file, meta, span):
                return False
            with ThreadPoolExecutor(len(region.peers)) as pool:
                list(pool.map(lambda peer: self._send(peer.store_id, meta, file.fileno()), region.peers))
        return True

    def _send(self, store_id: int, meta: import_sstpb_pb2.SSTMeta, descriptor: int) -> None:
        chunks = self._chunks(store_id, descriptor, meta.length)
        store = self._cluster.store(store_id)
        store.upload(meta, chunks, verified=True, extra_seconds=self._job.slow_seconds)

    def _chunks(self, store_id: int, descriptor: int, size: int) -> Iterator[bytes]:
        """The bytes of a file, no faster than the limit."""
        limit = self._job.upload_limit
        throttle = shared_throttle(self._job.cluster, limit) if limit else None
        for offset in range(0, size, CHUNK_SIZE):
            yield (chunk := os.pread(descriptor, CHUNK_SIZE, offset))
            if throttle is not None:
                throttle.spend(store_id, len(chunk))

    def _write(self, file: IO[bytes], meta: import_sstpb_pb2.SSTMeta, span: KeyRange) -> bool:
        """Write the rows in ``span`` as a store holds them; False when there are none."""
        from formats.rows import to_storage
        from formats.sst import SstWriter

        def sink(data: bytes) -> None:
            meta.crc32 = zlib.crc32(data, meta.crc32)
            file.write(data)

        writer = SstWriter(sink)
        empty = True
        for rows in self._rows(span):
            writer.append(to_storage(rows, self._codec))
            empty = False
        if empty:
            return False
        written = writer.finish()
        file.flush()
        start, end = (key[len(DATA_PREFIX) :] for key in (written.first_key, written.last_key))
        meta.range.CopyFrom(import_sstpb_pb2.Range(start=start, end=end))
        meta.length = written.size
        return True

    def _rows(self, span: KeyRange) -> Iterator[pa.RecordBatch]:
        """The rows in ``span``: the file is read once for all regions, unless one has to be gone back to."""
        start, end = user_range(self._codec, span)
        if not self._walk.stands_before(start):
            self._walk = _Walk(self._all_rows())
        with naming(self._part.file):
            yield from self._walk.within(start, end)

    def _all_rows(self) -> Iterator[pa.RecordBatch]:
        """The newest row of each key of the part, under the name and with the timestamp that it gets."""
        from formats.rows import LiveFilter

        newest, part = LiveFilter(now=0), self._part
        source = codec_of(self._job.api_version, part.file.key_range)
        for batch in records(self._job.store, part.file, source, part.span):
            rows = part.rewrite.apply(newest.apply(batch), source, self._codec)
            if rows.num_rows:
                yield self._stamped(rows)

    def _stamped(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        import numpy as np
        import pyarrow as pa

        if not self._job.new_timestamp:
            return rows
        stamps = pa.array(np.full(rows.num_rows, self._job.new_timestamp, np.uint64))
        return rows.set_column(rows.schema.get_field_index("ts"), rows.schema.field("ts"), stamps)
