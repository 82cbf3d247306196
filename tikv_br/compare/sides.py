"""The sides of a comparison: a cluster, the rows of a file of a backup, or rows in memory.

The checksums that stores may answer for rows of which some expire.

A store counts the rows that are alive by its own clock, at one moment for each region and request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Self

from msgspec import Struct

from tikv_br.backupset.files import Expiry, FileEntry
from tikv_br.backupset.rows import file_errors, read_rows
from tikv_br.cancellation import inherit
from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.compare.report import Meter
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, middle_key
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite
from tikv_br.storage.base import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.cluster.rawkv import RawClient
    from tikv_br.formats.columns import Flags


class RangeSums(NamedTuple):
    """A cluster's checksum of a range, and between which seconds of the stores' clocks it was computed."""

    sums: Checksum
    first: int
    last: int


class RecordedSums(NamedTuple):
    """The checksum of rows that a backup records, and of those among them that expire."""

    everything: Checksum
    expiry: Expiry = Expiry()

    @classmethod
    def of(cls, file: FileEntry) -> Self:
        """The sums of a file."""
        return cls(Checksum(file.crc64xor, file.total_kvs, file.total_bytes), file.expiry)

    def possible(self, first: int, last: int) -> list[Checksum]:
        """The checksums that a cluster with these rows may answer between two seconds since the epoch.

        The checksum of all rows before the first expires, of the lasting rows after the last has expired; none in between.
        """
        everything, expiry = self
        if not expiry.total_kvs or expiry.earliest > last:
            return [everything]
        if expiry.latest > first:
            return []
        lasting = Checksum(
            everything.crc64xor ^ expiry.crc64xor,
            everything.total_kvs - expiry.total_kvs,
            everything.total_bytes - expiry.total_bytes,
        )
        return [lasting]


def live_sums(rows: pa.RecordBatch, prefix: bytes, first: int, last: int) -> list[Checksum]:
    """The checksums that rows of ``SCHEMA`` have from second ``first`` to ``last``, newest first; not empty.

    One row per key, no tombstones. ``prefix`` turns their keys into RPC keys. A row with expiry ``e`` lives at all seconds before ``e``.
    """
    import numpy as np

    from tikv_br.formats import columns

    expire_ts = columns.numbers(rows["expire_ts"])
    alive = _checksum(rows, prefix, (expire_ts == 0) | (expire_ts > last))
    found = [alive]
    for second in np.unique(expire_ts[(expire_ts > max(first, 0)) & (expire_ts <= last)])[::-1]:
        alive += _checksum(rows, prefix, expire_ts == second)
        found.append(alive)
    return found


def _checksum(rows: pa.RecordBatch, prefix: bytes, wanted: Flags) -> Checksum:
    import pyarrow as pa

    chosen = rows if wanted.all() else rows.filter(pa.array(wanted))
    return checksum(chosen["key"], chosen["value"], prefix)


CHUNK_ROWS = 65_536
CHUNK_BYTES = 8 << 20
"""Approximate size of the chunks in memory: a batch of a file."""


class ClusterSide:
    """A keyspace of a cluster."""

    def __init__(self, raw: RawClient, meter: Meter | None = None) -> None:
        self.raw = raw
        self._meter = meter or Meter()

    @property
    def codec(self) -> KeyCodec:
        """Codec of the keys."""
        return self.raw.codec

    def now(self) -> int:
        """Seconds since the epoch, by the clock of the cluster's PD."""
        return self.raw.now()

    def sums(self, span: KeyRange, cuts: Sequence[bytes] = ()) -> RangeSums:
        """The stores' checksum of a range. With ascending keys ``cuts``, by one request for each part, all at once.

        A store computes a checksum on one processor.
        """
        began = self.now()
        parts = [KeyRange(*ends) for ends in itertools.pairwise((span.start, *cuts, span.end))]
        self._meter.checksums += len(parts)
        with ThreadPoolExecutor(len(parts), thread_name_prefix="checksum") as pool:
            sums = sum(pool.map(inherit(self.raw.checksum), parts), start=Checksum())
        return RangeSums(sums, began - CLOCK_SECONDS, self.now() + CLOCK_SECONDS)

    def recorded(self, span: KeyRange) -> None:
        """A cluster records no checksums."""

    def possible(self, span: KeyRange, answer: RangeSums) -> Collection[Checksum]:
        """The checksum that a cluster with the same key format should answer: the one that this cluster's stores compute."""
        del answer
        return [self.sums(span).sums]

    def middle(self, span: KeyRange) -> bytes | None:
        """Half-way between the first and the last key."""
        self._meter.scans += 2
        first, last = self.raw.first_rpc_key(self.codec.rpc_range(span)), self.raw.last_key(span)
        if first is None or last is None:
            return None
        return middle_key(self.codec.user_key(first), last)

    def pages(self, span: KeyRange) -> Iterator[pa.RecordBatch]:
        """The rows of a range, with user keys: batches of ``SCHEMA``."""
        from tikv_br.formats import columns

        for page in self.raw.scan_pages(self.codec.rpc_range(span)):
            self._meter.scans += 1
            self._meter.scanned_bytes += page.keys.nbytes + page.values.nbytes
            yield columns.records(columns.user_keys(page.keys, self.codec), page.values)

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


class FileRows(Struct, frozen=True):
    """Rows of a file of a backup, by their keys in a cluster. Without a file there are none."""

    store: ObjectStore
    file: FileEntry | None
    codec: KeyCodec
    """Codec of the file's keyspace and API version."""
    target: KeyCodec
    """Codec of the cluster."""
    rewrite: Rewrite = UNCHANGED
    values: FileEntry | None = None
    """The file with the long values of transactional data."""

    def recorded(self, span: KeyRange) -> RecordedSums | None:
        """The recorded checksums of a range, if it is all of the file and the stores' checksums cover the same keys."""
        if self.file is None:
            return RecordedSums(Checksum())
        same_keys = not self.rewrite.changes and self.codec.prefix == self.target.prefix
        return RecordedSums.of(self.file) if same_keys and self._stored_range(span) == self.file.key_range else None

    def pages(self, span: KeyRange) -> Iterator[pa.RecordBatch]:
        """The rows of a range: one per key, no tombstones, including expired ones. No batch is empty. Raises as `read_rows`."""
        from tikv_br.formats.rows import LiveFilter

        if self.file is None:
            return
        undeleted = LiveFilter()
        with file_errors(self.file):
            for batch in read_rows(self.store, self.file, self.codec, self._stored_range(span), self.values):
                rows = self.rewrite.apply(undeleted.apply(batch), self.codec, self.target)
                if rows.num_rows:
                    yield rows

    def _stored_range(self, span: KeyRange) -> KeyRange:
        if self.rewrite.changes:
            return self.rewrite.reversed.range(self.target.rpc_range(span))
        return self.codec.rpc_range(span)


class RowsSide:
    """Rows in memory as a side: of ``SCHEMA``, one per key, no tombstones, by ascending key."""

    def __init__(
        self, rows: pa.RecordBatch, prefix: bytes, now: Callable[[], int], origin: ClusterSide | None = None
    ) -> None:
        """``prefix`` is in front of B's RPC keys; ``now`` is B's time; ``origin`` the cluster that the rows come from."""
        self._rows = rows
        self._prefix = prefix
        self._now = now
        self._origin = origin

    def possible(self, span: KeyRange, answer: RangeSums) -> Collection[Checksum]:
        """The checksums of the rows at each second in which the stores may have answered."""
        return live_sums(self._within(span), self._prefix, answer.first, answer.last)

    def middle(self, span: KeyRange) -> bytes | None:
        """The key of the row in the middle."""
        rows = self._within(span)
        if rows.num_rows < 2:
            return None
        key: bytes = rows["key"][rows.num_rows // 2].as_py()
        return key

    def pages(self, span: KeyRange) -> Iterator[pa.RecordBatch]:
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

    def _within(self, span: KeyRange) -> pa.RecordBatch:
        from tikv_br.formats.rows import within

        return within(self._rows, span)


Side = ClusterSide | RowsSide
Reference = ClusterSide | FileRows


def sides_of(a: Reference, b: ClusterSide, span: KeyRange) -> Iterator[tuple[Side, KeyRange]]:
    """Side A of a range: a cluster whose checksums cover the same keys as B's; else its rows, in chunks that fit into memory."""
    origin = a if isinstance(a, ClusterSide) else None
    if origin is not None and origin.codec.prefix == b.codec.prefix:
        yield origin, span
        return
    for rows, part in row_chunks(a.pages(span), span):
        yield RowsSide(rows, b.codec.prefix, b.now, origin), part


def row_chunks(batches: Iterable[pa.RecordBatch], span: KeyRange) -> Iterator[tuple[pa.RecordBatch, KeyRange]]:
    """A range's rows in chunks of some MiB, each with its part of the range; together they cover all of it."""
    held: list[pa.RecordBatch] = []
    cursor = span.start
    for batch in batches:
        held.append(batch)
        if sum(part.num_rows for part in held) >= CHUNK_ROWS or sum(part.nbytes for part in held) >= CHUNK_BYTES:
            end = batch["key"][-1].as_py() + b"\0"
            yield _concatenate(held), KeyRange(cursor, end)
            held, cursor = [], end
    if not span.end or cursor < span.end:
        yield _concatenate(held), KeyRange(cursor, span.end)


def _concatenate(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows in one batch, without a copy of a single one."""
    import pyarrow as pa

    from tikv_br.formats.columns import SCHEMA

    if not batches:
        return pa.RecordBatch.from_pylist([], SCHEMA)
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
