"""A sink that writes to a TiKV cluster of any API version, as any client does: with timestamps of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from formats import columns, order
from incremental.sinks.base import Sink
from tikv_br.cluster.batches import BATCH_ITEMS
from tikv_br.errors import ConversionUnsupported

if TYPE_CHECKING:
    from tikv_br.cluster.rawkv import RawClient

CONCURRENCY = 4
"""Parts of a batch that are written at once."""
PART_ROWS = 512
"""A part is no smaller than this, where the batch is not: a request for a few rows costs as much as one for many."""


class TikvSink(Sink):
    """Writes rows to one keyspace.

    A put goes with what is left of its time, reckoned when it is sent; one whose time is over deletes. Within a batch
    each key is written once, so that parts may go side by side; the next batch begins when all have arrived.
    """

    def __init__(
        self,
        raw: RawClient,
        *,
        drop_ttls: bool = False,
        concurrency: int = CONCURRENCY,
        batch_rows: int = BATCH_ITEMS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """With `drop_ttls` rows that expire are kept for ever where the cluster knows no TTL; else that is refused.

        A request takes `batch_rows` at most.
        """
        self._raw = raw
        below = f" below {raw.codec.below.hex()}" if raw.codec.below else ""
        self.place = f"keyspace {raw.codec.keyspace_id} of cluster {raw.cluster_id}{below}"
        self._drop_ttls = drop_ttls
        self._clock = clock
        self._concurrency, self._batch_rows = concurrency, batch_rows
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="sink")
        self.puts = 0
        self.deletes = 0
        self.dropped_ttls = 0
        """Rows written without the expiry that they had."""

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`. Raises `ConversionUnsupported` for a row that expires where no TTL can be kept."""
        rows = order.by_key(batch)
        expire_ts = columns.numbers(rows["expire_ts"])
        gone = columns.flags(rows["deleted"]) | ((expire_ts > 0) & (expire_ts <= int(self._clock())))
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

    def close(self) -> None:
        """See `Sink.close`. Writes that a second signal has left under way end with the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_ttls(self, puts: pa.RecordBatch) -> None:
        """Refuse to lose an expiry without leave, before anything of the batch is written."""
        if self._raw.codec.api_version.has_ttl:
            return
        expiring = int(np.count_nonzero(columns.numbers(puts["expire_ts"])))
        if expiring and not self._drop_ttls:
            raise ConversionUnsupported(
                f"{expiring} of the changes expire, and the target keeps no TTLs (API V1 without storage.enable-ttl)",
                hint="Take a target of API V1TTL or V2, or say --allow-loss ttl to keep such rows for ever.",
            )
        self.dropped_ttls += expiring

    def _parts(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Neighbouring keys together: most of a part lies in few regions."""
        size = max(PART_ROWS, -(-rows.num_rows // self._concurrency))
        for first in range(0, rows.num_rows, size):
            yield rows.slice(first, size)

    def _put(self, rows: pa.RecordBatch) -> None:
        expire_ts = columns.numbers(rows["expire_ts"]) if self._raw.codec.api_version.has_ttl else None
        self._raw.put_columns(rows["key"], rows["value"], expire_ts, batch_rows=self._batch_rows)

    def _delete(self, rows: pa.RecordBatch) -> None:
        self._raw.delete_columns(rows["key"], batch_rows=self._batch_rows)
