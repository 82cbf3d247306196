"""How a part of a file gets to the replicas of a region where stores cannot reach the storage: it is read and sent here.

A store looks at nothing but the checksum of what is uploaded, and dies of a damaged block at ingest. So files are not passed on:
their rows are read, which verifies every block, and written anew into a file that holds what the region is to get.
"""

from __future__ import annotations

import os
import tempfile
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


class Upload:
    """Sends one part to stores."""

    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart) -> None:
        self._cluster = cluster
        self._job = job
        self._part = part
        self._codec = codec_of(job.api_version, part.target)

    def bring(self, region: Region, meta: import_sstpb_pb2.SSTMeta, span: KeyRange) -> bool:
        """Have all replicas' stores keep the rows in ``span``; False when the part has none there.

        Completes ``meta``. Raises `BackupDamaged` and `BackupUnsupported` naming the file, `StorageError`, `ClusterError`.
        """
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
        """The newest row of each key in ``span``, under the name and with the timestamp that it gets."""
        from formats.rows import LiveFilter, within

        newest = LiveFilter(now=0)
        part, target = self._part, user_range(self._codec, span)
        source = codec_of(self._job.api_version, part.file.key_range)
        with naming(part.file):
            for batch in records(self._job.store, part.file, source, part.span):
                rows = within(part.rewrite.apply(newest.apply(batch), source, self._codec), *target)
                if rows.num_rows:
                    yield self._stamped(rows)

    def _stamped(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        import numpy as np
        import pyarrow as pa

        if not self._job.new_timestamp:
            return rows
        stamps = pa.array(np.full(rows.num_rows, self._job.new_timestamp, np.uint64))
        return rows.set_column(rows.schema.get_field_index("ts"), rows.schema.field("ts"), stamps)
