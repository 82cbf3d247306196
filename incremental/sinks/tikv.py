"""A sink that writes to a TiKV cluster of any API version through RawKV requests; the target assigns new timestamps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tikv_br.cluster.router import BATCH_ITEMS
from tikv_br.errors import ConversionUnsupported
from tikv_br.formats import columns, order
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.sinks.base import Sink

if TYPE_CHECKING:
    from tikv_br.cluster.rawkv import RawClient

CONCURRENCY = 4
"""Parts of a batch that are written concurrently."""
PART_ROWS = 512
"""Minimum size of a part: a request with few rows costs as much as one with many."""


class TikvSink(Sink):
    """Writes rows to one keyspace.

    A put has the TTL that remains when it is sent; a row that has expired by then becomes a delete. A batch has each key
    once, so its parts are written concurrently; the next batch starts when all of them are written.
    """

    def __init__(
        self,
        raw: RawClient,
        *,
        drop_ttls: bool = False,
        concurrency: int = CONCURRENCY,
        batch_rows: int = BATCH_ITEMS,
    ) -> None:
        """With `drop_ttls`, a cluster without TTLs stores rows with a TTL permanently; without it, they are an error.

        A request has at most `batch_rows` rows.
        """
        self._raw = raw
        self.keyspace_id = raw.codec.keyspace_id if raw.codec.is_v2 else None
        """None = the cluster has no keyspaces."""
        self.cluster_id = raw.cluster_id
        self.place = f"keyspace {raw.codec.keyspace_id} of cluster {raw.cluster_id}"
        self._drop_ttls = drop_ttls
        self._writer = raw.column_writer(batch_rows)
        self.now = raw.now
        """The time of the target's PD, by which rows expire there, in whole seconds since the epoch."""
        self._concurrency = concurrency
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="sink")
        self.puts = 0
        self.deletes = 0
        self.dropped_ttls = 0
        """Rows written without their TTL."""

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`. Raises `ConversionUnsupported` for a row with a TTL if the cluster has no TTLs."""
        rows = order.by_key(batch)
        expire_ts = columns.numbers(rows["expire_ts"])
        gone = columns.flags(rows["deleted"]) | ((expire_ts > 0) & (expire_ts <= self.now()))
        puts, deletes = rows, rows.slice(rows.num_rows)
        if gone.any():
            puts, deletes = rows.filter(pa.array(~gone)), rows.filter(pa.array(gone))
        self._check_ttls(puts)
        writes = [self._pool.submit(self._put, part) for part in self._parts(puts)]
        writes += [self._pool.submit(self._delete, part) for part in self._parts(deletes)]
        errors = [error for write in writes if (error := write.exception()) is not None]
        if errors:
            raise errors[0]
        self.puts += puts.num_rows
        self.deletes += deletes.num_rows

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of these user keys the sink has."""
        return len(self._raw.batch_get(keys))

    def is_empty(self, span: KeyRange) -> bool:
        """Whether the sink has no row in a range of user keys."""
        return self._raw.first_rpc_key(self._raw.codec.rpc_range(span)) is None

    def close(self) -> None:
        """See `Sink.close`. Writes in flight after a second signal end when the connections close."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_ttls(self, puts: pa.RecordBatch) -> None:
        """Refuse to lose a TTL unless allowed, before anything of the batch is written."""
        if self._raw.codec.api_version.has_ttl:
            return
        expiring = int(np.count_nonzero(columns.numbers(puts["expire_ts"])))
        if expiring and not self._drop_ttls:
            raise ConversionUnsupported(
                f"{expiring} of the changes have a TTL, but the target does not support TTLs (API V1 without storage.enable-ttl)",
                hint="Use a target with API V1TTL or V2, or pass --allow-loss ttl to store such rows without a TTL.",
            )
        self.dropped_ttls += expiring

    def _parts(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Parts of adjacent keys, so that each part touches few regions."""
        return columns.slices(rows, max(PART_ROWS, -(-rows.num_rows // self._concurrency)))

    def _put(self, rows: pa.RecordBatch) -> None:
        expire_ts = columns.numbers(rows["expire_ts"]) if self._raw.codec.api_version.has_ttl else None
        expired = self._writer.put(rows["key"], rows["value"], expire_ts)
        if expired.any():  # they expired before they were sent; older rows of these keys must be deleted
            self._delete(rows.filter(pa.array(expired)))

    def _delete(self, rows: pa.RecordBatch) -> None:
        self._writer.delete(rows["key"])
