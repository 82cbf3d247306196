"""What the rows of a file come to, at each second of a window in which some of them expire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from formats.checksum import Checksum, checksum
from formats.keys import KeyCodec
from tikv_br.backupset.coverage import KeyRange
from tikv_br.proof.ranges import user_range

if TYPE_CHECKING:
    import pyarrow as pa

    from formats.columns import Flags


@dataclass
class LiveSums:
    """The checksum of the rows of one RPC range; a row with expiry ``e`` lives at all seconds before ``e``."""

    span: KeyRange
    first: int
    """The seconds since the epoch of interest, both ends included."""
    last: int
    lasting: Checksum = field(default_factory=Checksum)
    """Of the rows that outlive the window."""
    expiring: dict[int, Checksum] = field(default_factory=dict)
    """Of the rows that expire inside the window, by second."""
    passing: list[pa.RecordBatch] = field(default_factory=list)
    """Those rows themselves."""

    def at(self, now: int) -> Checksum:
        """The checksum of the rows alive at ``now``, a second of the window."""
        alive = (sums for second, sums in self.expiring.items() if second > now)
        return sum(alive, start=self.lasting)

    def each(self) -> Iterator[Checksum]:
        """The checksum at every second of the window."""
        return (self.at(now) for now in range(self.first, self.last + 1))

    def add(self, records: pa.RecordBatch, codec: KeyCodec) -> None:
        """Count records of ``SCHEMA``: one version a key, no tombstones."""
        from formats import columns
        from formats.rows import within

        records = within(records, *user_range(codec, self.span))
        expire_ts = columns.numbers(records["expire_ts"])
        self.lasting += _checksum(records, codec, (expire_ts == 0) | (expire_ts > self.last))
        passing = (expire_ts > self.first) & (expire_ts <= self.last)
        if not passing.any():
            return
        self.passing.append(_chosen(records, passing))
        for second in range(self.first + 1, self.last + 1):
            if (gone := expire_ts == second).any():
                self.expiring[second] = self.expiring.get(second, Checksum()) + _checksum(records, codec, gone)


def count_live(batches: Iterable[pa.RecordBatch], codec: KeyCodec, sums: Sequence[LiveSums]) -> None:
    """Count the rows of a file (``SCHEMA``, in file order) in each of ``sums``. Raises `FormatError`."""
    from formats.rows import LiveFilter

    newest = LiveFilter(now=0)
    for records in batches:
        alive = newest.apply(records)
        for each in sums:
            each.add(alive, codec)


def _checksum(records: pa.RecordBatch, codec: KeyCodec, wanted: Flags) -> Checksum:
    chosen = _chosen(records, wanted)
    return checksum(chosen["key"], chosen["value"], codec.prefix)


def _chosen(records: pa.RecordBatch, wanted: Flags) -> pa.RecordBatch:
    import pyarrow as pa

    return records if wanted.all() else records.filter(pa.array(wanted))
