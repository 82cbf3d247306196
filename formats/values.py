"""The stored form of one value, with its expiry and flags.

===== ==================================================================
V1    value
V1TTL value ‖ u64be(expiry), 0 = never
V2    value ‖ [u64be(expiry) if flag 1] ‖ flags; flag 2 = deleted
===== ==================================================================

An expiry is absolute, in seconds since the epoch. Whole columns of values: `tikv_br.formats.rows`.
"""

from __future__ import annotations

from typing import NamedTuple

from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes

EXPIRE_SIZE = 8
"""Bytes of an expiry."""
FLAG_EXPIRE = 1
"""The V2 flag for an expiry before the flags."""
FLAG_DELETED = 2
"""The flag of V2 that makes a tombstone."""
SHORT_VALUE = 255
"""Bytes of the largest value of a transaction that its write record holds itself."""


class StoredValue(NamedTuple):
    """A value with what the store knows of it."""

    value: bytes
    expire_ts: int = 0
    deleted: bool = False

    def is_live(self, now: int) -> bool:
        """Return whether a reader sees the value at `now` (seconds since the epoch), at which an equal expiry is over."""
        return not self.deleted and (self.expire_ts == 0 or self.expire_ts > now)


def decode_value(api_version: ApiVersion, data: bytes) -> StoredValue:
    """The value in the bytes from RocksDB. Raises `DamagedBytes`."""
    if api_version is ApiVersion.V1:
        return StoredValue(data)
    if api_version is ApiVersion.V1TTL:
        return StoredValue(*_split_expiry(data))
    if not data:
        raise DamagedBytes("stored value: no flags")
    flags = data[-1]
    if flags & ~(FLAG_EXPIRE | FLAG_DELETED):
        raise DamagedBytes(f"stored value: unknown flags {flags:#04x}")
    value, expire_ts = _split_expiry(data[:-1]) if flags & FLAG_EXPIRE else (data[:-1], 0)
    if flags & FLAG_EXPIRE and not expire_ts:
        raise DamagedBytes("stored value: an expiry of 0")
    return StoredValue(value, expire_ts, bool(flags & FLAG_DELETED))


def _split_expiry(data: bytes) -> tuple[bytes, int]:
    if len(data) < EXPIRE_SIZE:
        raise DamagedBytes(f"stored value: {len(data)} bytes are too few for an expiry of {EXPIRE_SIZE}")
    return data[:-EXPIRE_SIZE], int.from_bytes(data[-EXPIRE_SIZE:], "big")
