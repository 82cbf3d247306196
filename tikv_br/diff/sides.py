"""The two sides of a comparison, a cluster or the rows of a backup, and the bisection that narrows a difference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tikv_br.backupset.compare import LiveSums
from tikv_br.cancellation import inherit
from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.diff.values import Meter, UserRange
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.cluster.rawkv import RawClient


WINDOW = 8
"""Bytes after the common prefix that are used: enough to halve 64 times."""


def middle_key(low: bytes, high: bytes) -> bytes | None:
    """A short key in (low, high], about half-way as bytes count; None when ``low`` is not below ``high``.

    Keys are read as fractions, so only their first bytes that differ matter.
    """
    if low >= high:
        return None
    prefix = next((at for at, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), len(low))
    first, last = (int.from_bytes(key[prefix : prefix + WINDOW].ljust(WINDOW, b"\0"), "big") for key in (low, high))
    middle = low[:prefix] + ((first + last + 1) // 2).to_bytes(WINDOW, "big").rstrip(b"\0")
    return middle if low < middle <= high else high


LEAF_ROWS = 4096
LEAF_BYTES = 4 << 20
"""A range up to this size is scanned: more checksums would take longer."""
MAX_FRUITLESS_SPLITS = 3
"""After this many splits in a row whose halves both differ, the range is scanned as a whole."""


class RangeSums(NamedTuple):
    """A cluster's checksum of a range, and between which seconds of the stores' clocks it was computed."""

    sums: Checksum
    first: int
    last: int


class Reference(Protocol):
    """Side A."""

    def possible(self, span: UserRange, answer: RangeSums) -> Collection[Checksum]:
        """The checksums that B may answer if its rows are the same: one, or one per second in which rows expire."""

    def middle(self, span: UserRange) -> bytes | None:
        """A key that cuts the rows of a range into two parts, neither empty; None when it has fewer than two."""


class Target(Protocol):
    """Side B."""

    def sums(self, span: UserRange) -> RangeSums:
        """The stores' checksum of a range."""

    def middle(self, span: UserRange) -> bytes | None:
        """As of `Reference`."""


class _ComparedRange(NamedTuple):
    span: UserRange
    equal: bool
    a_rows: int
    b_rows: int
    size: int
    """The larger of both sides, in bytes."""

    @property
    def small(self) -> bool:
        return max(self.a_rows, self.b_rows) <= LEAF_ROWS and self.size <= LEAF_BYTES


def different_ranges(a: Reference, b: Target, span: UserRange, answer: RangeSums | None = None) -> Iterator[UserRange]:
    """The ranges in which something differs, by ascending key: small ones, or larger ones full of differences.

    ``answer`` is B's for the whole range, if known. Ranges where both sides change to the same rows in between are not found.
    """
    compared = _compare_sums(a, b, span, answer)
    if not compared.equal:
        yield from _narrow(a, b, compared, 0)


def _narrow(a: Reference, b: Target, compared: _ComparedRange, streak: int) -> Iterator[UserRange]:
    span = compared.span
    larger: Reference | Target = a if compared.a_rows >= compared.b_rows else b
    middle = None if compared.small or streak >= MAX_FRUITLESS_SPLITS else larger.middle(span)
    if middle is None:
        yield span
        return
    halves = (_compare_sums(a, b, UserRange(span.start, middle)), _compare_sums(a, b, UserRange(middle, span.end)))
    differ = [half for half in halves if not half.equal]
    for half in differ:
        yield from _narrow(a, b, half, streak + 1 if len(differ) == len(halves) else 0)


def _compare_sums(a: Reference, b: Target, span: UserRange, known: RangeSums | None = None) -> _ComparedRange:
    answer = known or b.sums(span)
    possible = a.possible(span, answer)
    there = answer.sums
    most = max(possible, key=lambda sums: sums.total_kvs)
    size = max(most.total_bytes, there.total_bytes)
    return _ComparedRange(span, there in possible, most.total_kvs, there.total_kvs, size)


TTL_THREADS = 8
MAX_EXPIRY = (1 << 64) - 1
CHUNK_ROWS = 65_536
CHUNK_BYTES = 16 << 20
"""Approximate size of the chunks in memory."""


class ClusterSide:
    """A keyspace of a cluster."""

    def __init__(self, raw: RawClient, meter: Meter) -> None:
        self.raw = raw
        self._meter = meter

    @property
    def codec(self) -> KeyCodec:
        """Of its keys."""
        return self.raw.codec

    def now(self) -> int:
        """Seconds since the epoch, by the clock of the cluster's PD."""
        return self.raw.now()

    def sums(self, span: UserRange) -> RangeSums:
        """The stores' checksum of a range."""
        self._meter.checksums += 1
        began = self.now()
        sums = self.raw.checksum(*span)
        return RangeSums(sums, began - CLOCK_SECONDS, self.now() + CLOCK_SECONDS)

    def possible(self, span: UserRange, answer: RangeSums) -> Collection[Checksum]:
        """The checksum that a cluster with the same key format should answer: that of this cluster's stores."""
        del answer
        return [self.sums(span).sums]

    def middle(self, span: UserRange) -> bytes | None:
        """Half-way between the first and the last key."""
        self._meter.scans += 2
        first, last = self.raw.first_rpc_key(*self.codec.rpc_range(*span)), self.raw.last_key(*span)
        if first is None or last is None:
            return None
        return middle_key(self.codec.user_key(first), last)

    def pages(self, span: UserRange) -> Iterator[pa.RecordBatch]:
        """The rows of a range, with user keys: batches of ``SCHEMA``."""
        import pyarrow.compute as pc

        from tikv_br.formats import columns

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
        return min(self.now() + ttl, MAX_EXPIRY) if ttl else ttl

    def with_expiries(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that still exist, with their expiries, which scans do not return: one request per row, in parallel."""
        if not self.codec.api_version.has_ttl:
            return rows
        import numpy as np
        import pyarrow as pa

        with ThreadPoolExecutor(TTL_THREADS, thread_name_prefix="ttl") as pool:
            expiries = list(pool.map(inherit(self._expiry), rows["key"].to_pylist()))
        there = np.array([expiry is not None for expiry in expiries], np.bool_)
        expire_ts = np.array([expiry or 0 for expiry in expiries], np.uint64)
        at = rows.schema.get_field_index("expire_ts")
        return rows.set_column(at, rows.schema.field(at), pa.array(expire_ts)).filter(pa.array(there))


class RowsSide:
    """Rows in memory as a side: of ``SCHEMA``, one per key, no tombstones, by ascending key."""

    def __init__(
        self, rows: pa.RecordBatch, target: KeyCodec, now: Callable[[], int], origin: ClusterSide | None = None
    ) -> None:
        """``target`` is the codec of the keys in checksums; ``now`` that of side B; ``origin`` the cluster that the rows come from."""
        self._rows = rows
        self._target = target
        self._now = now
        self._origin = origin

    def possible(self, span: UserRange, answer: RangeSums) -> Collection[Checksum]:
        """The sums of the rows at each second in which the stores may have answered."""
        sums = LiveSums(KeyRange(*self._target.rpc_range(*span)), answer.first, answer.last)
        sums.add(self._rows, self._target)
        return list(sums.each())

    def middle(self, span: UserRange) -> bytes | None:
        """The key of the row in the middle."""
        rows = self._within(span)
        if rows.num_rows < 2:
            return None
        key: bytes = rows["key"][rows.num_rows // 2].as_py()
        return key

    def pages(self, span: UserRange) -> Iterator[pa.RecordBatch]:
        """The rows of a range."""
        yield self._within(span)

    def values(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Read keys again: from the cluster, or from memory."""
        if self._origin is not None:
            return self._origin.values(keys)
        import pyarrow as pa
        import pyarrow.compute as pc

        from tikv_br.formats.rows import live

        found = self._rows.filter(pc.is_in(self._rows["key"], value_set=pa.array(keys, pa.large_binary())))
        found = live(found, self._now())
        return dict(zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True))

    def ttl(self, key: bytes) -> int | None:
        """Seconds until a key expires, 0 for never; None when it is gone."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from tikv_br.formats.rows import unexpired

        if self._origin is not None:
            return self._origin.ttl(key)
        row = self._rows.filter(pc.equal(self._rows["key"], pa.scalar(key, pa.large_binary())))
        now = self._now()
        expiries = unexpired(row, now)["expire_ts"].to_pylist()
        return max(expiries[0] - now, 0) if expiries else None

    def with_expiries(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that still exist, with their expiries."""
        if self._origin is not None:
            return self._origin.with_expiries(rows)
        from tikv_br.formats.rows import unexpired

        return unexpired(rows, self._now())

    def _within(self, span: UserRange) -> pa.RecordBatch:
        from tikv_br.formats.rows import within

        return within(self._rows, *span)


Side = ClusterSide | RowsSide


def row_chunks(batches: Iterable[pa.RecordBatch], span: UserRange) -> Iterator[tuple[pa.RecordBatch, UserRange]]:
    """A range's rows in chunks of some MiB, each with its part of the range; together they cover all of it."""
    held: list[pa.RecordBatch] = []
    cursor = span.start
    for batch in batches:
        held.append(batch)
        if sum(part.num_rows for part in held) >= CHUNK_ROWS or sum(part.nbytes for part in held) >= CHUNK_BYTES:
            rows, held = _concatenate(held), []
            end = rows["key"][-1].as_py() + b"\0"
            yield rows, UserRange(cursor, end)
            cursor = end
    if not span.end or cursor < span.end:
        yield _concatenate(held), UserRange(cursor, span.end)


def _concatenate(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    import pyarrow as pa

    from tikv_br.backupset.row_differences import empty

    filled = [batch for batch in batches if batch.num_rows]
    return pa.concat_batches(filled) if filled else empty()
