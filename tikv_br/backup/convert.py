"""From scanned pages to the rows of an SST of another API version, with the checksums of both sides.

The driver passes a `Converter` on and converts nothing: what converting needs is imported there only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.checksum import Checksum, checksum
from formats.errors import DamagedBytes
from formats.keys import KeyCodec
from formats.rawscan import ScanPage
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import Expiry

if TYPE_CHECKING:
    import pyarrow as pa

    from formats.columns import Numbers

CONVERTED_TS = 1
"""The ts of rows that have none at the source: stores stamp the same when they convert."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A page as it goes into a file."""

    rows: pa.RecordBatch
    """`STORAGE_SCHEMA`, in the target's encoding."""
    first_key: bytes
    """RPC key of the target."""
    target: Checksum
    """As the target's servers will count it."""
    source: Checksum
    """As the source's servers count it."""
    expiry: Expiry
    """Of the rows that expire, in the target's form."""


@dataclass(frozen=True, slots=True)
class Converter:
    """Converts between two codecs. Pickles."""

    source: KeyCodec
    target: KeyCodec
    ts: int
    """Of all rows, where the target is API V2; else 0."""

    def target_range(self, interval: KeyRange) -> KeyRange:
        """The target's RPC range of an RPC range of the source."""
        return KeyRange(*self.target.rpc_range(*user_range(self.source, interval)))

    def convert(self, page: ScanPage, expire_ts: Numbers | None = None) -> Converted:
        """Convert a page of at least one row; ``expire_ts`` has its rows' expiry in seconds since the epoch, 0 = never.

        Raises `DamagedBytes` when a key is not of the source's keyspace, `UnsupportedFormat` for an expiry that the
        target cannot hold.
        """
        from formats import columns
        from formats.rows import to_storage

        keys = self._user_keys(page.keys)
        target = checksum(keys, page.values, self.target.prefix)
        return Converted(
            rows=to_storage(columns.records(keys, page.values, expire_ts=expire_ts), self.target, self.ts or 1),
            first_key=self.target.rpc_key(keys[0].as_py()),
            target=target,
            source=target if self.source.prefix == self.target.prefix else checksum(page.keys, page.values),
            expiry=Expiry() if expire_ts is None else expiry_of(keys, page.values, expire_ts, self.target.prefix),
        )

    def _user_keys(self, keys: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
        import pyarrow.compute as pc

        prefix = self.source.prefix
        if not prefix:
            return keys
        if not pc.all(pc.starts_with(keys, prefix)).as_py():
            raise DamagedBytes(f"the cluster answered with keys outside of keyspace {self.source.keyspace_id}")
        return pc.binary_replace_slice(keys, 0, len(prefix), b"")


def user_range(codec: KeyCodec, interval: KeyRange) -> tuple[bytes, bytes]:
    """The user keys [start, end) of an RPC range within the codec's keyspace; an empty end is no end."""
    whole_end = codec.rpc_range(b"", b"")[1]
    return codec.user_key(interval.start), b"" if interval.end == whole_end else codec.user_key(interval.end)


def expiry_of(keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray, expire_ts: Numbers, prefix: bytes) -> Expiry:
    """What of these rows (user keys, which ``prefix`` makes RPC keys) expires; an ``expire_ts`` of 0 is never."""
    expiring = expire_ts != 0
    if not expiring.any():
        return Expiry()
    import pyarrow as pa

    mask = pa.array(expiring)
    sums = checksum(keys.filter(mask), values.filter(mask), prefix)
    times = expire_ts[expiring]
    return Expiry(sums.total_kvs, sums.total_bytes, sums.crc64xor, int(times.min()), int(times.max()))


def join_expiry(one: Expiry, other: Expiry) -> Expiry:
    """Both together."""
    if not one.total_kvs or not other.total_kvs:
        return one if one.total_kvs else other
    return Expiry(
        one.total_kvs + other.total_kvs,
        one.total_bytes + other.total_bytes,
        one.crc64xor ^ other.crc64xor,
        min(one.earliest, other.earliest),
        max(one.latest, other.latest),
    )
