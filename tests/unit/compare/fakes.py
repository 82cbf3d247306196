"""A side that is a dictionary, with sums by an independent checksum, and a record of what it was asked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import fastcrc
import pyarrow as pa

from tikv_br.compare.sides import ClusterSide, RangeSums
from tikv_br.formats import columns
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import KeyRange, middle_key


class FakeSide(ClusterSide):
    """Rows of a keyspace, user keys to values."""

    def __init__(self, rows: Mapping[bytes, bytes], page_rows: int = 7) -> None:
        self.rows = dict(rows)
        self.page_rows = page_rows
        self.asked: list[KeyRange] = []
        self.scanned: list[KeyRange] = []

    def keys(self, span: KeyRange) -> list[bytes]:
        """Of a range, ascending."""
        return sorted(key for key in self.rows if key >= span.start and (not span.end or key < span.end))

    def sums(self, span: KeyRange, cuts: Sequence[bytes] = ()) -> RangeSums:
        """What a store answers, said the long way."""
        assert not cuts
        self.asked.append(span)
        crc = size = 0
        keys = self.keys(span)
        for key in keys:
            pair = key + self.rows[key]
            crc ^= fastcrc.crc64.xz(pair)
            size += len(pair)
        return RangeSums(Checksum(crc, len(keys), size), 0, 0)

    def possible(self, span: KeyRange, answer: RangeSums) -> Collection[Checksum]:
        """The one sum."""
        del answer
        return [self.sums(span).sums]

    def middle(self, span: KeyRange) -> bytes | None:
        """As a cluster finds it."""
        keys = self.keys(span)
        return middle_key(keys[0], keys[-1]) if keys else None

    def pages(self, span: KeyRange) -> Iterator[pa.RecordBatch]:
        """In small pages."""
        self.scanned.append(span)
        keys = self.keys(span)
        for first in range(0, len(keys), self.page_rows):
            part = keys[first : first + self.page_rows]
            yield columns.records(columns.from_list(part), columns.from_list([self.rows[key] for key in part]))

    def values(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Those that exist."""
        return {key: self.rows[key] for key in keys if key in self.rows}

    def ttl(self, key: bytes) -> int | None:
        """Never, if it is there."""
        return 0 if key in self.rows else None
