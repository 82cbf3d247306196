"""What the rows of a file come to, counted while they are checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from formats import columns
from formats.checksum import Checksum, checksum
from formats.errors import DamagedBytes
from formats.keys import KeyCodec
from formats.rows import LiveFilter, from_storage, to_storage, within
from formats.sst import RandomAccess, SstReader
from tikv_br.backupset.files import Expiry, FileEntry
from tikv_br.proof.ranges import user_range


@dataclass
class RowSums:
    """Sums of a file's rows, in the terms of `FileEntry`."""

    rows: int = 0
    """Of any kind. In a sound backup each is live, or was when it was written."""
    live: Checksum = field(default_factory=Checksum)
    """Of the newest version of each key that is no tombstone, expired or not."""
    expiring: Checksum = field(default_factory=Checksum)
    """Of the live rows, those with an expiry."""
    expiries: list[int] = field(default_factory=list)
    """Earliest and latest expiry of each batch."""
    timestamps: list[int] = field(default_factory=list)
    """Smallest and largest timestamp of each batch."""

    def add(self, records: pa.RecordBatch, alive: pa.RecordBatch, prefix: bytes) -> None:
        """Count ``records`` of ``SCHEMA``, of which those ``alive`` are no tombstones or older versions."""
        self.rows += records.num_rows
        self.live += checksum(alive["key"], alive["value"], prefix)
        ts = columns.numbers(records["ts"])
        self.timestamps += int(ts.min()), int(ts.max())
        expire_ts = columns.numbers(alive["expire_ts"])
        if expire_ts.any():
            mask = pa.array(expire_ts != 0)
            self.expiring += checksum(alive["key"].filter(mask), alive["value"].filter(mask), prefix)
            self.expiries += int(expire_ts[expire_ts != 0].min()), int(expire_ts.max())

    @property
    def expiry(self) -> Expiry:
        """As the backup records it."""
        if not self.expiries:
            return Expiry()
        sums = self.expiring
        return Expiry(sums.total_kvs, sums.total_bytes, sums.crc64xor, min(self.expiries), max(self.expiries))

    def against(self, file: FileEntry, *, with_expiry: bool) -> Iterator[tuple[str, object, object]]:
        """What was counted and what is recorded, by name."""
        yield "rows:", self.rows, file.total_kvs
        yield "live rows:", self.live.total_kvs, file.total_kvs
        yield "bytes of keys and values:", self.live.total_bytes, file.total_bytes
        yield "crc64xor", f"{self.live.crc64xor:016x}", f"{file.crc64xor:016x}"
        if file.max_ts:
            yield "timestamps", (min(self.timestamps), max(self.timestamps)), (file.min_ts, file.max_ts)
        if with_expiry:
            yield "rows that expire:", self.expiry, file.expiry


def sum_records(batches: Iterable[pa.RecordBatch], file: FileEntry, codec: KeyCodec) -> RowSums:
    """What records (`SCHEMA`) come to, once they are found to be what ``file`` may hold.

    Raises `FormatError` for rows out of order, outside of the file's range, or that the API version cannot hold.
    """
    sums, newest = RowSums(), LiveFilter(now=0)
    start, end = user_range(codec, file.key_range)
    for records in batches:
        alive = newest.apply(records)
        to_storage(records, codec)  # raises for what a store of this version cannot hold
        if within(records, start, end).num_rows < records.num_rows:
            raise DamagedBytes("rows outside of the file's range")
        sums.add(records, alive, codec.prefix)
    return sums


class SummingReader(SstReader):
    """Counts each batch once its user has asked for the next: by then it was checked."""

    def __init__(self, source: RandomAccess, codec: KeyCodec) -> None:
        super().__init__(source)
        self.sums = RowSums()
        self._codec = codec
        self._newest = LiveFilter(now=0)

    def batches(self, max_rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        """As `SstReader.batches`; raises `FormatError` also for keys of another keyspace."""
        for rows in super().batches(max_rows):
            yield rows
            records = from_storage(rows, self._codec)
            self.sums.add(records, self._newest.apply(records), self._codec.prefix)
