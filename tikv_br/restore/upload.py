"""Uploads: tikv-br reads a part of a file and sends it to each replica's store."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Self

from tikv_br import cancellation
from tikv_br.backupset.coverage import codec_of
from tikv_br.cancellation import Cancellation, TaskCancelled, inherit
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.compare.files import FilePart
from tikv_br.errors import (
    RequestRefused,
)
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.restore.download import STORE_FULL, IngestJob, disk_full, sst_meta

if TYPE_CHECKING:
    import pyarrow as pa


CHUNK_SIZE = 1 << 20


class _RowCursor:
    """Reads batches of ascending user keys once, range by range."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None
        self._end: bytes | None = b""

    def is_before(self, start: bytes) -> bool:
        """Return whether no row at or above ``start`` was skipped."""
        return self._end is not None and start >= self._end

    def within(self, span: KeyRange) -> Iterator[pa.RecordBatch]:
        """The rows in a range of user keys; rows before it are skipped."""
        from tikv_br.formats.rows import within

        self._end = span.end or None
        while True:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                return
            self._rest = batch if span.end and batch["key"][-1].as_py() >= span.end else None
            rows = within(batch, span)
            if rows.num_rows:
                yield rows
            if self._rest is not None:
                return


class _TemporarySst:
    """An SST in a temporary file, as a context manager."""

    def __init__(self) -> None:
        from tikv_br.formats.sst.writer import SstWriter

        self.file = tempfile.TemporaryFile(prefix="tikv-br-")  # noqa: SIM115 - closed by `__exit__`
        self._writer = SstWriter(self._write)
        self._crc32 = 0
        self._is_empty = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.file.close()

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of ``STORAGE_SCHEMA``."""
        self._writer.append(rows)
        self._is_empty = self._is_empty and not rows.num_rows

    def finish(self, meta: import_sstpb_pb2.SSTMeta) -> bool:
        """Complete the file and its meta; False when there are no rows."""
        if self._is_empty:
            return False
        start, end = (key[len(DATA_PREFIX) :] for key in self._writer.finish())
        self.file.flush()
        meta.range.CopyFrom(import_sstpb_pb2.Range(start=start, end=end))
        meta.length, meta.crc32 = self.file.tell(), self._crc32
        return True

    def _write(self, data: bytes) -> None:
        self._crc32 = zlib.crc32(data, self._crc32)
        self.file.write(data)


class Upload:
    """Sends one part to stores."""

    downloads = 0

    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart) -> None:
        self._cluster = cluster
        self._job = job
        self._part = part
        self._codec = codec_of(job.codec.api_version, part.target, job.codec.mode)
        self._walk = _RowCursor(self._all_rows())

    def transfer(self, region: Region, span: KeyRange) -> list[import_sstpb_pb2.SSTMeta]:
        """Have all replicas' stores keep the rows in ``span``; returns what they have of each column family, if anything.

        Raises `BackupDamaged` and `BackupUnsupported` naming the file, `StorageError`, `ClusterError`.
        """
        metas = []
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(region.peers)) as pool:
            ssts = [stack.enter_context(_TemporarySst()) for _ in self._part.files]
            for rows in self._rows(span):
                for sst, stored in zip(ssts, self._stored(rows), strict=True):
                    sst.append(stored)
            store_ids = [peer.store_id for peer in region.peers]
            for file, sst in zip(self._part.files, ssts, strict=True):
                meta = sst_meta(region, self._job.codec, file)
                if sst.finish(meta):
                    send = partial(self._send, meta=meta, descriptor=sst.file.fileno())
                    list(pool.map(inherit(send), store_ids))
                    metas.append(meta)
        return metas

    def _stored(self, rows: pa.RecordBatch) -> Sequence[pa.RecordBatch]:
        """Rows as a store holds them, for each file of the part."""
        if self._codec.mode is KeyMode.RAW:
            from tikv_br.formats.rows import to_storage

            return [to_storage(rows, self._codec)]
        from tikv_br.formats.mvcc import split

        return split(rows, self._codec.prefix)[-len(self._part.files) :]  # without values there is no file for them

    def _send(self, store_id: int, *, meta: import_sstpb_pb2.SSTMeta, descriptor: int) -> None:
        chunks = self._chunks(store_id, descriptor, meta.length, cancellation.current() or Cancellation())
        store = self._cluster.store(store_id)
        try:
            store.upload(meta, chunks, verified=True, extra_seconds=self._job.slow_seconds)
        except RequestRefused as error:
            if STORE_FULL not in error.message:
                raise
            raise disk_full(STORE_FULL, store_id) from None

    def _chunks(self, store_id: int, descriptor: int, size: int, work: Cancellation) -> Iterator[bytes]:
        """The bytes of a file, no faster than the limit; for a thread of gRPC's, until ``work`` is cancelled."""
        for offset in range(0, size, CHUNK_SIZE):
            yield (chunk := os.pread(descriptor, CHUNK_SIZE, offset))
            with work.active(), contextlib.suppress(TaskCancelled):
                self._job.upload_limit.spend(store_id, len(chunk))
            if work.is_cancelled:
                return

    def _rows(self, span: KeyRange) -> Iterator[pa.RecordBatch]:
        """The rows in ``span``: the file is read once for all regions, unless a region is retried."""
        wanted = self._codec.user_range(span)
        if not self._walk.is_before(wanted.start):
            self._walk = _RowCursor(self._all_rows())
        yield from self._walk.within(wanted)

    def _all_rows(self) -> Iterator[pa.RecordBatch]:
        """The newest row of each key of the part, under the name and with the timestamp that it gets."""
        rows, span = self._part.rows(self._job.store, self._job.api_version, self._job.codec)
        return map(self._stamped, rows.pages(span))

    def _stamped(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        import numpy as np
        import pyarrow as pa

        if not self._job.new_timestamp:
            return rows
        stamps = pa.array(np.full(rows.num_rows, self._job.new_timestamp, np.uint64))
        return rows.set_column(rows.schema.get_field_index("ts"), rows.schema.field("ts"), stamps)
