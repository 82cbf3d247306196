"""Converts rows from one API version to another, and computes the checksums of both.

NumPy and Arrow are imported within the functions, because the driver only passes a `Converter` on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import Expiry
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum, FoldedRows, checksum, checksums
from tikv_br.formats.errors import UnsupportedFormat
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import RawPage, ScanPage

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.formats.columns import Numbers

CONVERTED_TS = 1
"""The ts of converted rows without a ts of their own; stores use the same."""


class BatchStats(Struct, frozen=True, kw_only=True):
    """Checksums, expiry and timestamp bounds of a non-empty batch of rows."""

    target: Checksum
    """Checksum as a cluster of the target's API version computes it."""
    source: Checksum
    """Checksum as the source cluster computes it."""
    expiry: Expiry = field(default_factory=Expiry)
    """Sums of the rows with an expiry, in the target's encoding."""
    timestamps: tuple[int, int]
    """Smallest and largest ts; 0 if the target has none."""
    dropped_ttls: int = 0
    """Rows whose expiry was lost."""


class ConvertedRows(BatchStats, frozen=True, kw_only=True):
    """Converted rows, with their sums."""

    records: pa.RecordBatch
    """Rows of `SCHEMA`, at least one."""
    first_key: bytes
    """RPC key of the target."""


class Converter(Struct, frozen=True):
    """Converts between two codecs. Picklable."""

    source: KeyCodec
    target: KeyCodec
    ts: int
    """The ts of rows without one, if the target is API V2; else 0."""
    drop_ttl: bool = False
    """Drop expiries if the target has none."""

    def target_range(self, interval: KeyRange) -> KeyRange:
        """The target's RPC range of an RPC range of the source."""
        return self.target.rpc_range(self.source.user_range(interval))

    def first_key(self, page: RawPage) -> bytes:
        """The target's RPC key of a page's first row. Raises `DamagedBytes` for a key outside the source's keyspace."""
        return self.target.rpc_key(self.source.user_key(page.first_key))

    def page_sums(self, folded: FoldedRows) -> BatchStats:
        """The sums of a page that an `SstWriter` has converted."""
        ts = self.ts if self.target.is_v2 else 0
        return BatchStats(
            target=folded.checksum(self.target.prefix),
            source=folded.checksum(self.source.prefix),
            timestamps=(ts, ts),
        )

    def convert_page(self, page: ScanPage, expire_ts: Numbers | None = None) -> ConvertedRows:
        """Convert a page of at least one row; ``expire_ts`` is the expiry of each, in seconds since the epoch, 0 = never.

        Raises `DamagedBytes` for a key outside the source's keyspace, and what `convert` raises.
        """
        from tikv_br.formats import columns

        return self.convert(
            columns.records(columns.user_keys(page.keys, self.source), page.values, expire_ts=expire_ts)
        )

    def convert(self, records: pa.RecordBatch) -> ConvertedRows:
        """Convert at least one record (`SCHEMA`); a ts of 0 becomes `ts`. Tombstones do not count in the sums.

        Raises `UnsupportedFormat` for an expiry that the target cannot store, unless `drop_ttl`.
        """
        import numpy as np
        import pyarrow as pa

        from tikv_br.formats import columns

        keys, values, expire_ts = records["key"], records["value"], columns.numbers(records["expire_ts"])
        dropped = 0 if self.target.api_version.has_ttl else int((expire_ts != 0).sum())
        if dropped and not self.drop_ttl:
            raise UnsupportedFormat(f"API {self.target.api_version.label} has no TTLs, but {dropped} rows have one")
        if dropped:
            expire_ts = np.zeros_like(expire_ts)
        ts = self._timestamps(columns.numbers(records["ts"]))
        first_key, deleted = self.target.rpc_key(keys[0].as_py()), columns.flags(records["deleted"])
        converted = columns.records(keys, values, expire_ts=expire_ts, ts=ts, deleted=deleted)
        if deleted.any():
            live = pa.array(~deleted)
            keys, values, expire_ts = keys.filter(live), values.filter(live), expire_ts[~deleted]
        target, source = checksums(keys, values, (self.target.prefix, self.source.prefix))
        return ConvertedRows(
            records=converted,
            first_key=first_key,
            target=target,
            source=source,
            expiry=expiry_of(keys, values, expire_ts, self.target.prefix),
            timestamps=(int(ts.min()), int(ts.max())),
            dropped_ttls=dropped,
        )

    def _timestamps(self, given: Numbers) -> Numbers:
        import numpy as np

        if not self.target.is_v2:
            return np.zeros_like(given)
        return np.where(given == 0, np.uint64(self.ts), given)


class Conversion(Struct, frozen=True):
    """A conversion between two API versions, in any keyspace. Picklable."""

    source: ApiVersion
    target: ApiVersion
    ts: int = 0
    """Value of `Converter.ts`."""
    drop_ttl: bool = False
    mode: KeyMode = KeyMode.RAW

    def of(self, interval: KeyRange) -> Converter:
        """The converter for RPC keys of the source in one keyspace, which V2 keeps."""
        source = codec_of(self.source, interval, self.mode)
        keyspace = source.keyspace_id if self.target is ApiVersion.V2 else 0
        return Converter(source, KeyCodec(self.target, keyspace, self.mode), self.ts, self.drop_ttl)

    def target_range(self, interval: KeyRange) -> KeyRange:
        """The target's RPC range of an RPC range of the source within one keyspace."""
        return self.of(interval).target_range(interval)

    @property
    def unchanged(self) -> Conversion:
        """The conversion that keeps the source's API version."""
        return Conversion(self.source, self.source, mode=self.mode)


def expiry_of(keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray, expire_ts: Numbers, prefix: bytes) -> Expiry:
    """Sums of the rows with an expiry. ``keys`` are user keys, which ``prefix`` makes RPC keys; an ``expire_ts`` of 0 is never."""
    expiring = expire_ts != 0
    if not expiring.any():
        return Expiry()
    import pyarrow as pa

    mask = pa.array(expiring)
    sums = checksum(keys.filter(mask), values.filter(mask), prefix)
    times = expire_ts[expiring]
    return Expiry(sums.total_kvs, sums.total_bytes, sums.crc64xor, int(times.min()), int(times.max()))


def join_expiry(one: Expiry, other: Expiry) -> Expiry:
    """The sums of both."""
    if not one.total_kvs or not other.total_kvs:
        return one if one.total_kvs else other
    return Expiry(
        one.total_kvs + other.total_kvs,
        one.total_bytes + other.total_bytes,
        one.crc64xor ^ other.crc64xor,
        min(one.earliest, other.earliest),
        max(one.latest, other.latest),
    )
