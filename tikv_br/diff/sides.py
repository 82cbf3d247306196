"""The two kinds of sides: a cluster that is asked, and rows that are at hand."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from formats.checksum import Checksum
from formats.keys import KeyCodec
from tikv_br.backupset.coverage import KeyRange
from tikv_br.diff.bisect import Answer
from tikv_br.diff.middle import between
from tikv_br.diff.values import Meter, Span
from tikv_br.proof.live_sums import LiveSums
from tikv_br.proof.prover import CLOCK_SECONDS

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.cluster.rawkv import RawClient

TTL_THREADS = 8
MAX_EXPIRY = (1 << 64) - 1
CHUNK_ROWS = 65_536
CHUNK_BYTES = 16 << 20
"""Rows are held in pieces of about this size."""


class ClusterSide:
    """A keyspace of a cluster."""

    def __init__(self, raw: RawClient, meter: Meter) -> None:
        self.raw = raw
        self._meter = meter

    @property
    def codec(self) -> KeyCodec:
        """Of its keys."""
        return self.raw.codec

    def sums(self, span: Span) -> Answer:
        """What the stores say of a range."""
        self._meter.checksums += 1
        began = int(time.time())
        sums = self.raw.checksum(*span)
        return Answer(sums, began - CLOCK_SECONDS, int(time.time()) + CLOCK_SECONDS)

    def possible(self, span: Span, answer: Answer) -> Collection[Checksum]:
        """What a cluster with the same form of keys should answer: the stores of this one know."""
        del answer
        return [self.sums(span).sums]

    def middle(self, span: Span) -> bytes | None:
        """Half-way between the first and the last key."""
        self._meter.scans += 2
        first, last = self.raw.first_rpc_key(*self.codec.rpc_range(*span)), self.raw.last_key(*span)
        if first is None or last is None:
            return None
        return between(self.codec.user_key(first), last)

    def pages(self, span: Span) -> Iterator[pa.RecordBatch]:
        """The rows of a range, with user keys: batches of ``SCHEMA``."""
        import pyarrow.compute as pc

        from formats import columns

        prefix = len(self.codec.prefix)
        for page in self.raw.scan_pages(*self.codec.rpc_range(*span)):
            self._meter.scans += 1
            self._meter.scanned_bytes += page.keys.nbytes + page.values.nbytes
            keys = pc.binary_replace_slice(page.keys, 0, prefix, b"") if prefix else page.keys
            yield columns.records(keys, page.values)

    def values(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Read keys again."""
        self._meter.scans += 1
        return self.raw.batch_get(keys)

    def ttl(self, key: bytes) -> int | None:
        """Seconds until a key expires, 0 for never; None when it is gone."""
        if not self.codec.api_version.has_ttl:
            return 0
        self._meter.scans += 1
        return self.raw.get_ttl(key)

    def _expiry(self, key: bytes) -> int | None:
        """When a key expires, in seconds since the epoch, 0 for never; None when it is gone."""
        ttl = self.ttl(key)
        return min(int(time.time()) + ttl, MAX_EXPIRY) if ttl else ttl

    def lasting(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Those of the rows that are there still, with their expiries, which no scan tells: a request each, several at once."""
        if not self.codec.api_version.has_ttl:
            return rows
        import numpy as np
        import pyarrow as pa

        with ThreadPoolExecutor(TTL_THREADS, thread_name_prefix="ttl") as pool:
            expiries = list(pool.map(self._expiry, rows["key"].to_pylist()))
        there = np.array([expiry is not None for expiry in expiries], np.bool_)
        expire_ts = np.array([expiry or 0 for expiry in expiries], np.uint64)
        at = rows.schema.get_field_index("expire_ts")
        return rows.set_column(at, rows.schema.field(at), pa.array(expire_ts)).filter(pa.array(there))


class RowsSide:
    """Rows of a range that are at hand: of ``SCHEMA``, one a key, no tombstones, by ascending key."""

    def __init__(self, rows: pa.RecordBatch, target: KeyCodec, origin: ClusterSide | None = None) -> None:
        """``target`` is the form of keys that sums are wanted in; ``origin`` the cluster that the rows come from."""
        self._rows = rows
        self._target = target
        self._origin = origin

    def possible(self, span: Span, answer: Answer) -> Collection[Checksum]:
        """The sums of the rows at each second in which the stores may have answered."""
        sums = LiveSums(KeyRange(*self._target.rpc_range(*span)), answer.first, answer.last)
        sums.add(self._rows, self._target)
        return list(sums.each())

    def middle(self, span: Span) -> bytes | None:
        """The key of the row in the middle."""
        rows = self._within(span)
        if rows.num_rows < 2:
            return None
        key: bytes = rows["key"][rows.num_rows // 2].as_py()
        return key

    def pages(self, span: Span) -> Iterator[pa.RecordBatch]:
        """The rows of a range."""
        yield self._within(span)

    def values(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Read keys again: in the cluster, or what is at hand."""
        if self._origin is not None:
            return self._origin.values(keys)
        import pyarrow as pa
        import pyarrow.compute as pc

        from formats.rows import live

        found = self._rows.filter(pc.is_in(self._rows["key"], value_set=pa.array(keys, pa.large_binary())))
        found = live(found, int(time.time()))
        return dict(zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True))

    def ttl(self, key: bytes) -> int | None:
        """Seconds until a key expires, 0 for never; None when it is gone."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from formats.rows import unexpired

        if self._origin is not None:
            return self._origin.ttl(key)
        row = self._rows.filter(pc.equal(self._rows["key"], pa.scalar(key, pa.large_binary())))
        now = int(time.time())
        expiries = unexpired(row, now)["expire_ts"].to_pylist()
        return max(expiries[0] - now, 0) if expiries else None

    def lasting(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Those of the rows that are there still, with their expiries."""
        if self._origin is not None:
            return self._origin.lasting(rows)
        from formats.rows import unexpired

        return unexpired(rows, int(time.time()))

    def _within(self, span: Span) -> pa.RecordBatch:
        from formats.rows import within

        return within(self._rows, *span)


Side = ClusterSide | RowsSide


def pieces(batches: Iterable[pa.RecordBatch], span: Span) -> Iterator[tuple[pa.RecordBatch, Span]]:
    """A range's rows in pieces of some MiB, each with its part of the range; together they cover all of it."""
    held: list[pa.RecordBatch] = []
    cursor = span.start
    for batch in batches:
        held.append(batch)
        if sum(part.num_rows for part in held) >= CHUNK_ROWS or sum(part.nbytes for part in held) >= CHUNK_BYTES:
            rows, held = _joined(held), []
            end = rows["key"][-1].as_py() + b"\0"
            yield rows, Span(cursor, end)
            cursor = end
    if not span.end or cursor < span.end:
        yield _joined(held), Span(cursor, span.end)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    import pyarrow as pa

    from tikv_br.diff.rows import empty

    filled = [batch for batch in batches if batch.num_rows]
    return pa.concat_batches(filled) if filled else empty()
