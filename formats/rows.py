"""Batches between user records and what a store's RocksDB holds, for every API version.

`tikv_br.formats.keys.codec` and `tikv_br.formats.values` say the same about one row at a time.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import Flags, Numbers
from tikv_br.formats.errors import DamagedBytes, FormatError, UnsortedKeys, UnsupportedFormat
from tikv_br.formats.kernels import rows as kernels
from tikv_br.formats.kernels.order import Signs, compare_neighbours
from tikv_br.formats.keys.codec import MAX_TS, KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import show_key

REASONS = {
    kernels.NO_DATA_PREFIX: "the key does not begin with z",
    kernels.BAD_LENGTH: "the key does not have the length of a memcomparable key with a timestamp",
    kernels.BAD_MARKER: "the key has an impossible group marker",
    kernels.BAD_PADDING: "the key is padded with bytes that are not zero",
    kernels.OTHER_KEYSPACE: "the key is not of keyspace {keyspace}",
    kernels.BAD_TS: "the timestamp is 0",
    kernels.NO_FLAGS: "the value has no flags",
    kernels.BAD_FLAGS: "the value has unknown flags",
    kernels.NO_EXPIRY: "the value is too short for its expiry",
    kernels.ZERO_EXPIRY: "the value has an expiry of 0",
}


def to_storage(records: pa.RecordBatch, codec: KeyCodec, default_ts: int = 1) -> pa.RecordBatch:
    """Records as a store holds them: `SCHEMA` to `STORAGE_SCHEMA`, same rows in the same order.

    In V2 a ts of 0 becomes `default_ts` (1 is what stores write when they convert V1 to V2); before V2 the ts is dropped.
    Raises `UnsupportedFormat` when a row has an expiry or is a tombstone and the version cannot hold it.
    """
    if not 0 < default_ts <= MAX_TS:
        raise FormatError(f"timestamp {default_ts} is not in 1..2^64-1")
    expire_ts, deleted = columns.numbers(records["expire_ts"]), columns.flags(records["deleted"])
    _check_fit(codec.api_version, expire_ts, deleted)
    keys = columns.view(records["key"])
    if codec.is_v2:
        ts = columns.numbers(records["ts"])
        encoded = kernels.encode_v2_keys(*keys, columns.from_bytes(codec.prefix), ts, np.uint64(default_ts))
    else:
        encoded = kernels.add_data_prefix(*keys)
    values = _encode_values(records["value"], codec.api_version, expire_ts, deleted)
    return columns.storage_rows(columns.build(*encoded), values)


def from_storage(rows: pa.RecordBatch, codec: KeyCodec) -> pa.RecordBatch:
    """The records in rows of a store: `STORAGE_SCHEMA` to `SCHEMA`, same rows in the same order.

    All versions and tombstones stay; `live` drops them. Raises `DamagedBytes`, which names the first wrong row, for keys
    and values that no store writes in this API version and keyspace.
    """
    ts: Numbers | None = None
    if codec.is_v2:
        row, reason, offsets, data, ts = kernels.decode_v2_keys(
            *columns.view(rows["key"]), columns.from_bytes(codec.prefix)
        )
    else:
        row, reason, offsets, data = kernels.strip_data_prefix(*columns.view(rows["key"]))
    _check_decoded(row, reason, rows, codec)
    keys = columns.build(offsets, data)
    if codec.api_version is ApiVersion.V1:
        return columns.records(keys, rows["value"])
    values, expire_ts, deleted = _decode_values(rows, codec)
    return columns.records(keys, values, expire_ts=expire_ts, ts=ts, deleted=deleted)


class RowOrder:
    """Holds the batches of one run to their order: ascending keys, and of one key the newest version first."""

    def __init__(self) -> None:
        self._last: tuple[bytes, int] | None = None

    def signs(self, records: pa.RecordBatch) -> Signs:
        """Compare each key of the next batch with the one before: 1 = it follows, 0 = an older version of it.

        Raises `UnsortedKeys`.
        """
        signs = compare_neighbours(*columns.view(records["key"]))
        if not records.num_rows:
            return signs
        ts = columns.numbers(records["ts"])
        older = np.concatenate(([False], ts[1:] < ts[:-1]))
        if self._last:
            first = (records["key"][0].as_py(), int(ts[0]))
            signs[0] = (first[0] > self._last[0]) - (first[0] < self._last[0])
            older[0] = first[1] < self._last[1]
        self._last = (records["key"][-1].as_py(), int(ts[-1]))
        _check_order(signs, older, records)
        return signs


class LiveFilter:
    """Keeps what a reader at `now` (seconds since the epoch) would see, over the batches of one sorted run.

    Of a key's versions only the newest counts, also when they lie in different batches; it is dropped when it is a
    tombstone or has expired (an expiry equal to `now` is over). Rows must come by ascending key, newest version first.
    """

    def __init__(self, now: int = 0) -> None:
        """0 = keep expired rows as well."""
        self._now = np.uint64(now)
        self._order = RowOrder()

    def apply(self, records: pa.RecordBatch) -> pa.RecordBatch:
        """The live rows of the next batch. Raises `UnsortedKeys`."""
        if not records.num_rows:
            return records
        signs = self._order.signs(records)
        expire_ts = columns.numbers(records["expire_ts"])
        keep = (signs > 0) & ~columns.flags(records["deleted"]) & ((expire_ts == 0) | (expire_ts > self._now))
        return records if keep.all() else records.filter(pa.array(keep))


def live(records: pa.RecordBatch, now: int) -> pa.RecordBatch:
    """`LiveFilter` for a run of one batch."""
    return LiveFilter(now).apply(records)


def unexpired(records: pa.RecordBatch, now: int) -> pa.RecordBatch:
    """The records whose time is not over at ``now`` (seconds since the epoch; an expiry equal to it is over)."""
    expire_ts = columns.numbers(records["expire_ts"])
    keep = (expire_ts == 0) | (expire_ts > np.uint64(now))
    return records if keep.all() else records.filter(pa.array(keep))


def within(records: pa.RecordBatch, span: KeyRange) -> pa.RecordBatch:
    """The records whose user key lies in ``span``; rows come by ascending key."""
    if not records.num_rows:
        return records
    keys, start, end = records["key"], span.start, span.end
    if keys[0].as_py() >= start and (not end or keys[-1].as_py() < end):
        return records
    import pyarrow.compute as pc  # takes as long to import as Arrow itself

    keep = pc.greater_equal(keys, pa.scalar(start, pa.large_binary()))
    if end:
        keep = pc.and_(keep, pc.less(keys, pa.scalar(end, pa.large_binary())))
    return records.filter(keep)


def _check_fit(api_version: ApiVersion, expire_ts: Numbers, deleted: Flags) -> None:
    if api_version is not ApiVersion.V2 and deleted.any():
        raise UnsupportedFormat(f"row {int(deleted.argmax())}: API {api_version.label} stores no tombstones")
    if not api_version.has_ttl and expire_ts.any():
        raise UnsupportedFormat(f"row {int((expire_ts != 0).argmax())}: API {api_version.label} stores no expiry")


def _encode_values(
    values: pa.LargeBinaryArray, api_version: ApiVersion, expire_ts: Numbers, deleted: Flags
) -> pa.LargeBinaryArray:
    if api_version is ApiVersion.V1:
        return values
    if api_version is ApiVersion.V1TTL:
        return columns.build(*kernels.encode_v1ttl_values(*columns.view(values), expire_ts))
    return columns.build(*kernels.encode_v2_values(*columns.view(values), expire_ts, deleted))


def _decode_values(rows: pa.RecordBatch, codec: KeyCodec) -> tuple[pa.LargeBinaryArray, Numbers, Flags | None]:
    deleted: Flags | None = None
    if codec.is_v2:
        row, reason, offsets, data, expire_ts, deleted = kernels.decode_v2_values(*columns.view(rows["value"]))
    else:
        row, reason, offsets, data, expire_ts = kernels.decode_v1ttl_values(*columns.view(rows["value"]))
    _check_decoded(row, reason, rows, codec)
    return columns.build(offsets, data), expire_ts, deleted


def _check_decoded(row: int, reason: int, rows: pa.RecordBatch, codec: KeyCodec) -> None:
    if reason != kernels.GOOD:
        what = REASONS[reason].format(keyspace=codec.keyspace_id)
        raise DamagedBytes(f"row {row}, key {show_key(rows['key'][row].as_py())}: {what}")


def _check_order(signs: Signs, older: Flags, records: pa.RecordBatch) -> None:
    wrong = (signs < 0) | ((signs == 0) & ~older)
    if wrong.any():
        row = int(wrong.argmax())
        raise UnsortedKeys(f"row {row}, key {show_key(records['key'][row].as_py())} does not follow the row before it")
