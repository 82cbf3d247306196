"""From the rows of one API version to those of another, with the checksums of both sides.

The driver passes a `Converter` on and converts nothing: what converting needs is imported there only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from formats.api_version import ApiVersion
from formats.checksum import Checksum, Folded, checksum, checksums
from formats.errors import DamagedBytes, UnsupportedFormat
from formats.keys import KeyCodec
from formats.rawscan import RawPage, ScanPage
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import Expiry
from tikv_br.proof.ranges import codec_of

if TYPE_CHECKING:
    import pyarrow as pa

    from formats.columns import Numbers
    from formats.sst.page_form import PageForm

CONVERTED_TS = 1
"""The ts of rows that have none at the source: stores stamp the same when they convert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What some rows of a file are, which is at least one."""

    target: Checksum
    """As the target's servers will count it."""
    source: Checksum
    """As the source's servers count it."""
    expiry: Expiry = field(default_factory=Expiry)
    """Of the rows that expire, in the target's form."""
    timestamps: tuple[int, int]
    """Smallest and largest ts; 0 where the target has none."""
    dropped_ttls: int = 0
    """Rows whose expiry the target cannot keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted(Counted):
    """Rows as they go into a file."""

    records: pa.RecordBatch
    """`SCHEMA`; at least one row."""
    first_key: bytes
    """RPC key of the target."""


@dataclass(frozen=True, slots=True)
class Converter:
    """Converts between two codecs. Pickles."""

    source: KeyCodec
    target: KeyCodec
    ts: int
    """Of rows that come without one, where the target is API V2; else 0."""
    drop_ttl: bool = False
    """Whether expiries may be lost where the target has none."""

    def target_range(self, interval: KeyRange) -> KeyRange:
        """The target's RPC range of an RPC range of the source."""
        return KeyRange(*self.target.rpc_range(*user_range(self.source, interval)))

    def first_key(self, page: RawPage) -> bytes:
        """The target's RPC key of a page's first row. Raises `DamagedBytes` when it is not of the source's keyspace."""
        return self.target.rpc_key(self.source.user_key(page.first_key))

    @property
    def page_form(self) -> PageForm:
        """How a table takes a page as it is, of rows without expiry."""
        from formats.sst.page_form import PageForm

        return PageForm(self.source, self.target, self.ts or CONVERTED_TS)

    def counted(self, folded: Folded) -> Counted:
        """What the rows of such a page are."""
        ts = self.ts if self.target.is_v2 else 0
        return Counted(
            target=folded.checksum(self.target.prefix),
            source=folded.checksum(self.source.prefix),
            timestamps=(ts, ts),
        )

    def convert_page(self, page: ScanPage, expire_ts: Numbers | None = None) -> Converted:
        """Convert a page of at least one row; ``expire_ts`` has its rows' expiry in seconds since the epoch, 0 = never.

        Raises `DamagedBytes` when a key is not of the source's keyspace, besides what `convert` raises.
        """
        from formats import columns

        return self.convert(columns.records(self._user_keys(page.keys), page.values, expire_ts=expire_ts))

    def convert(self, records: pa.RecordBatch) -> Converted:
        """Convert at least one live record (`SCHEMA`); a ts of 0 becomes `ts`.

        Raises `UnsupportedFormat` for an expiry that the target cannot hold and that may not be lost.
        """
        import numpy as np

        from formats import columns

        keys, values, expire_ts = records["key"], records["value"], columns.numbers(records["expire_ts"])
        dropped = 0 if self.target.api_version.has_ttl else int((expire_ts != 0).sum())
        if dropped and not self.drop_ttl:
            raise UnsupportedFormat(
                f"API {self.target.api_version.label} stores no expiry, and {dropped} rows have one"
            )
        if dropped:
            expire_ts = np.zeros_like(expire_ts)
        ts = self._timestamps(columns.numbers(records["ts"]))
        target, source = checksums(keys, values, (self.target.prefix, self.source.prefix))
        return Converted(
            records=columns.records(keys, values, expire_ts=expire_ts, ts=ts),
            first_key=self.target.rpc_key(keys[0].as_py()),
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

    def _user_keys(self, keys: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
        import pyarrow.compute as pc

        prefix = self.source.prefix
        if not prefix:
            return keys
        if not pc.all(pc.starts_with(keys, prefix)).as_py():
            raise DamagedBytes(f"the cluster answered with keys outside of keyspace {self.source.keyspace_id}")
        return pc.binary_replace_slice(keys, 0, len(prefix), b"")


@dataclass(frozen=True, slots=True)
class Conversion:
    """From one API version to another, in any keyspace. Pickles."""

    source: ApiVersion
    target: ApiVersion
    ts: int = 0
    """See `Converter.ts`."""
    drop_ttl: bool = False

    def of(self, interval: KeyRange) -> Converter:
        """The converter for RPC keys of the source, which lie in one keyspace; V2 keeps it."""
        source = codec_of(self.source, interval)
        keyspace = source.keyspace_id if self.target is ApiVersion.V2 else 0
        return Converter(source, KeyCodec(self.target, keyspace), self.ts, self.drop_ttl)

    def target_range(self, interval: KeyRange) -> KeyRange:
        """The target's RPC range of an RPC range of the source within one keyspace."""
        return self.of(interval).target_range(interval)

    @property
    def unchanged(self) -> Conversion:
        """That of rows which stay in the source's form."""
        return Conversion(self.source, self.source)


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
