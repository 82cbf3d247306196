"""Puts records into a cluster through RawBatchPut, several batches at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tikv_br.errors import UsageError
from tikv_br.progress_events import Reporter, TasksProgress, silent

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.load.sources import Source

Put = tuple[bytes, bytes, int]  # user key, value, TTL in seconds (0: never)


class PutClient(Protocol):
    """The part of `RawClient` that loading needs."""

    def batch_put_with_ttls(self, rows: Iterable[Put]) -> None:
        """Write pairs; see `RawClient`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was put: pairs, bytes of user keys and values, pairs left out as expired already, seconds."""

    total_kvs: int
    total_bytes: int
    expired_kvs: int
    seconds: float


def load_pairs(
    client: PutClient, source: Source, *, ttl: int = 0, concurrency: int = 8, reporter: Reporter = silent
) -> Loaded:
    """Put every record of ``source``, in order of its batches: of equal keys the last wins.

    Records without expiry get ``ttl``. Parts of one batch are put in parallel, and a batch is done before the next
    begins. Raises what the client raises; then some pairs are written and others not. Raises `UsageError` for
    tombstones, which cannot be put.
    """
    begin = time.monotonic()
    kvs = size = expired = 0
    with ThreadPoolExecutor(concurrency, thread_name_prefix="put") as pool:
        for batch in source.batches:
            live = list(_live(batch, ttl))
            rows = [(key, value, seconds) for key, (value, seconds) in dict(live).items()]
            list(pool.map(client.batch_put_with_ttls, _parts(rows, concurrency)))  # raises what one of them raises
            kvs += len(rows)
            size += sum(len(key) + len(value) for key, value, _ in rows)
            expired += len(batch) - len(live)
            seconds = time.monotonic() - begin
            fraction = min(kvs / source.expected_rows, 1.0) if source.expected_rows else 0.0
            reporter(TasksProgress(0, 0, size, kvs, fraction, seconds))
    return Loaded(kvs, size, expired, time.monotonic() - begin)


def _live(batch: pa.RecordBatch, ttl: int) -> Iterator[tuple[bytes, tuple[bytes, int]]]:
    """Yield key, value and TTL of the rows that have not expired."""
    now = int(time.time())
    rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
    for key, value, expire_ts, _ts, deleted in rows:
        if deleted:
            raise UsageError(f"key {key.hex()} is a tombstone: only pairs can be put")
        if expire_ts == 0:
            yield key, (value, ttl)
        elif expire_ts > now:
            yield key, (value, expire_ts - now)


def _parts(rows: Sequence[Put], count: int) -> list[Sequence[Put]]:
    """Cut rows into up to ``count`` neighbouring parts of about equal length."""
    size = max(1, -(-len(rows) // count))
    return [rows[first : first + size] for first in range(0, len(rows), size)]
