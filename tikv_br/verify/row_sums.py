"""Sums of the rows of a file, counted while they are checked. Loads Arrow and the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from tikv_br.backupset.files import Expiry, FileEntry, FilePair
from tikv_br.backupset.rows import value_check
from tikv_br.dataflow.convert import expiry_of, join_expiry
from tikv_br.formats import columns
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.errors import DamagedBytes, FormatError
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.mvcc import join
from tikv_br.formats.rows import LiveFilter, from_storage, to_storage, within
from tikv_br.formats.sst.check import check_structure
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import RandomAccess


@dataclass
class RowSums:
    """Sums of a file's rows, as in `FileEntry`."""

    rows: int = 0
    """All rows. In an intact full backup each was live when it was written."""
    live: Checksum = field(default_factory=Checksum)
    """Newest version of each key, except tombstones; expired or not."""
    expiry: Expiry = field(default_factory=Expiry)
    """Live rows with an expiry."""
    timestamps: list[int] = field(default_factory=list)
    """Smallest and largest timestamp of each batch."""

    def add(self, records: pa.RecordBatch, alive: pa.RecordBatch, prefix: bytes) -> None:
        """Count ``records`` of ``SCHEMA``; ``alive`` are those that are neither tombstones nor older versions."""
        self.rows += records.num_rows
        self.live += checksum(alive["key"], alive["value"], prefix)
        ts = columns.numbers(records["ts"])
        self.timestamps += int(ts.min()), int(ts.max())
        expiry = expiry_of(alive["key"], alive["value"], columns.numbers(alive["expire_ts"]), prefix)
        self.expiry = join_expiry(self.expiry, expiry)

    def against(
        self, file: FileEntry, *, with_ts: bool, with_expiry: bool, is_increment: bool
    ) -> Iterator[tuple[str, object, object]]:
        """Triples of name, counted and recorded value."""
        if not is_increment:  # which has tombstones
            yield "rows:", self.rows, file.total_kvs
        yield "live rows:", self.live.total_kvs, file.total_kvs
        yield "bytes of keys and values:", self.live.total_bytes, file.total_bytes
        yield "checksum", f"{self.live.crc64xor:016x}", f"{file.crc64xor:016x}"
        if file.max_ts and with_ts:
            yield "timestamps", (min(self.timestamps), max(self.timestamps)), (file.min_ts, file.max_ts)
        if with_expiry:
            yield "rows that expire:", self.expiry, file.expiry


def sum_records(batches: Iterable[pa.RecordBatch], file: FileEntry, codec: KeyCodec) -> RowSums:
    """The sums of records (`SCHEMA`), after checking each row.

    Raises `FormatError` for rows out of order, outside the file's range, or invalid in the API version.
    """
    sums, undeleted = RowSums(), LiveFilter()
    whole = codec.user_range(file.key_range)
    for records in batches:
        alive = undeleted.apply(records)
        to_storage(records, codec)  # raises for rows that are invalid in this API version
        if within(records, whole).num_rows < records.num_rows:
            raise DamagedBytes("rows outside the file's range")
        sums.add(records, alive, codec.prefix)
    return sums


def sum_txn(part: FilePair, data: Mapping[FileEntry, RandomAccess], codec: KeyCodec, backup_ts: int) -> RowSums:
    """The sums of transactional rows, after checking every block and row of both files, and each record for its value.

    Raises `FormatError` that names the file if the damage is in the file of values; also for deletes and later commits than backup-ts.
    """
    sums = RowSums()
    values = () if part.values is None else _checked_rows(part.values, data[part.values], codec)
    for records in join(_checked_rows(part.file, data[part.file], codec), values, codec.prefix):
        sums.add(records, records, codec.prefix)
        if columns.flags(records["deleted"]).any() or max(sums.timestamps) > backup_ts:
            raise DamagedBytes("a delete, or a row that was committed after backup-ts")
    return sums


def _checked_rows(file: FileEntry, data: RandomAccess, codec: KeyCodec) -> Iterator[pa.RecordBatch]:
    reader, count = SstReader(data), 0
    try:
        check_structure(
            reader.table, codec, codec.bound(file.start_key), codec.bound(file.end_key), value_check(codec, file)
        )
        for rows in reader.batches():
            yield rows
            count += rows.num_rows
        if count != reader.table.entries:
            raise DamagedBytes(f"{count} rows, but the properties say {reader.table.entries}")
    except FormatError as error:
        raise error if file.cf == "write" else type(error)(f"{file.name}: {error}") from None


class SummingReader(SstReader):
    """Counts each batch when its consumer, which has checked it by then, requests the next."""

    def __init__(self, source: RandomAccess, codec: KeyCodec) -> None:
        super().__init__(source)
        self.sums = RowSums()
        self._codec = codec
        self._undeleted = LiveFilter()

    def batches(self, max_rows: int = 65_536, start: bytes = b"", end: bytes = b"") -> Iterator[pa.RecordBatch]:
        """Yield rows as `SstReader.batches`; raises `FormatError` also for keys of another keyspace."""
        for rows in super().batches(max_rows, start, end):
            yield rows
            records = from_storage(rows, self._codec)
            self.sums.add(records, self._undeleted.apply(records), self._codec.prefix)
