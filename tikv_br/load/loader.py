"""Writes records into a cluster with concurrent RawBatchPut requests."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tikv_br.errors import UsageError
from tikv_br.formats.keys.text import show_key
from tikv_br.progress_events import Reporter, TasksProgress, silent

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.cluster.puts import ColumnWriter
    from tikv_br.load.sources import RowSource


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Pairs put, bytes of user keys and values, pairs omitted because they had expired, seconds, and bytes per second."""

    total_kvs: int
    total_bytes: int
    expired_kvs: int
    seconds: float
    average_speed: int


def load_pairs(
    client: ColumnWriter, source: RowSource, *, ttl: int = 0, concurrency: int = 8, reporter: Reporter = silent
) -> LoadSummary:
    """Put every record of ``source``, in order of its batches: of equal keys the last wins.

    Records without expiry get ``ttl``. Parts of one batch are put in parallel, and a batch is done before the next
    begins. Raises what the client raises; then some pairs are written and others not. Raises `UsageError` for
    tombstones, which cannot be put.
    """
    import pyarrow as pa

    from tikv_br.formats import columns
    from tikv_br.formats.order import by_key

    def put(rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that were left out."""
        left_out = client.put_rows(rows, ttl)
        return rows.filter(pa.array(left_out)) if left_out.any() else rows.slice(0, 0)

    begin = time.monotonic()
    kvs = size = expired = 0
    with ThreadPoolExecutor(concurrency, thread_name_prefix="put") as pool:
        for batch in source.batches:
            live = _live(batch, client.now())
            rows = by_key(live)
            parts = columns.slices(rows, max(1, -(-rows.num_rows // concurrency)))
            left_out = list(pool.map(put, parts))  # raises what one of them raises
            left_out_kvs = sum(part.num_rows for part in left_out)
            kvs += rows.num_rows - left_out_kvs
            size += int(columns.row_sizes(rows).sum()) - sum(int(columns.row_sizes(part).sum()) for part in left_out)
            expired += batch.num_rows - live.num_rows + left_out_kvs
            seconds = time.monotonic() - begin
            fraction = min(kvs / source.expected_rows, 1.0) if source.expected_rows else 0.0
            reporter(TasksProgress(0, 0, size, kvs, fraction, seconds))
    seconds = time.monotonic() - begin
    return LoadSummary(kvs, size, expired, round(seconds, 3), round(size / seconds) if seconds else 0)


def _live(batch: pa.RecordBatch, now: int) -> pa.RecordBatch:
    """The rows that have not expired. Raises `UsageError` for a tombstone."""
    from tikv_br.formats import columns
    from tikv_br.formats.rows import unexpired

    deleted = columns.flags(batch["deleted"])
    if deleted.any():
        key = batch["key"][int(deleted.argmax())].as_py()
        raise UsageError(f"cannot load key {show_key(key)}: it is a tombstone, not a pair")
    return unexpired(batch, now)
