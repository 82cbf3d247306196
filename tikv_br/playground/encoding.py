"""Encodings of RawKV data in RocksDB, by API version, with the rules for live rows.

Written for the playground alone, so that tests of ``formats`` against it compare two implementations.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import DATA_PREFIX
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.settings import RECORDED, ServerVersion

_MAX_TS: Final = (1 << 64) - 1
_NEWEST_END: Final = b"\xff" * 8
_PADDING: Final = [bytes(8 - rest) for rest in range(8)]
_LAST_MARKER: Final = [bytes([0xFF - 8 + rest]) for rest in range(8)]
_TOMBSTONE: Final = b"\x02"
_EXPIRES: Final = 1
_DELETED: Final = 2

Row = tuple[bytes, bytes]
"""A data key (with ``z``) and the stored value; or an RPC key and the user value."""
LiveRow = tuple[bytes, bytes, int, Row]
"""RPC key, user value, expiry in unix seconds (0 = never), and the stored row."""


class DeadlyData(Exception):
    """Bytes in RocksDB that crash a real store when it reads them."""


class Stored(NamedTuple):
    """The newest version of a key as stored; ``expire`` in unix seconds, 0 = never."""

    value: bytes
    expire: int
    deleted: bool

    def is_live(self, now: int) -> bool:
        """Whether a read at ``now`` sees it; an expiry equal to ``now`` is over."""
        return not self.deleted and not 0 < self.expire <= now


class KeyVersion(NamedTuple):
    """One version of a V2 key: the RPC key, its timestamp, and what is stored."""

    key: bytes
    ts: int
    stored: Stored


def memcomparable(key: bytes) -> bytes:
    """A key in groups of eight bytes, each with its marker: the hot path of V2 writes."""
    rest = len(key) % 8
    groups = _splitter(len(key) // 8 + 1)(key + _PADDING[rest])
    return b"\xff".join(groups) + _LAST_MARKER[rest]


def from_memcomparable(encoded: bytes) -> bytes | None:
    """The key that `memcomparable` made the bytes from, ignoring what follows it; None for bytes that it never makes."""
    key = bytearray()
    for start in range(0, len(encoded) - 8, 9):
        group, padding = encoded[start : start + 8], 0xFF - encoded[start + 8]
        if padding > 8 or any(group[8 - padding :]):
            return None
        key += group[: 8 - padding]
        if padding:
            return bytes(key)
    return None


@functools.cache
def _splitter(groups: int) -> Callable[[bytes], tuple[bytes, ...]]:
    return struct.Struct("8s" * groups).unpack


def data_range(start: bytes, end: bytes) -> tuple[bytes, bytes]:
    """Physical bounds as data keys for `RocksEngine.iterate`."""
    return DATA_PREFIX + start, DATA_PREFIX + end if end else b""


class Encoding:
    """The encoding of V1, which stores keys and values as they are. The other API versions override what differs.

    Keys are RPC keys, bounds are physical, as regions have them.
    """

    api_version = ApiVersion.V1

    def bound(self, key: bytes) -> bytes:
        """The physical form of a key; b"" stays b""."""
        return key

    def data_key(self, key: bytes, ts: int) -> bytes:  # noqa: ARG002
        return DATA_PREFIX + key

    def put(self, key: bytes, value: bytes, expire: int, ts: int) -> Row:  # noqa: ARG002
        return DATA_PREFIX + key, value

    def delete(self, key: bytes, ts: int) -> tuple[list[Row], list[bytes]]:  # noqa: ARG002
        """Rows to write and keys to remove for a delete."""
        return [], [DATA_PREFIX + key]

    def newest(self, engine: RocksEngine, key: bytes) -> Stored | None:
        """Return the stored value of a key, live or not."""
        stored = engine.get(DATA_PREFIX + key)
        return None if stored is None else self._decode(stored)

    def live(self, engine: RocksEngine, start: bytes, end: bytes, *, now: int, reverse: bool = False) -> Iterator[Row]:
        """Live (RPC key, user value) within physical bounds; ``end`` b"" is unbounded."""
        rows = engine.iterate(*data_range(start, end), reverse=reverse)
        if reverse:
            rows = self._newest_of_reversed(rows)
        return ((key, value) for key, value, _, _ in self.live_rows(rows, now))

    def live_rows(self, rows: Iterable[Row], now: int) -> Iterator[LiveRow]:  # noqa: ARG002
        return ((row[0][1:], row[1], 0, row) for row in rows)

    def split_key(self, data_key: bytes) -> bytes:
        """The bound at which a region may be split in front of a row; a transaction's row loses its timestamp."""
        key = data_key[1:]
        user_key = from_memcomparable(key[:-8])
        return key[:-8] if user_key is not None and memcomparable(user_key) == key[:-8] else key

    def _newest_of_reversed(self, rows: Iterator[Row]) -> Iterator[Row]:
        return rows

    def _decode(self, stored: bytes) -> Stored:
        return Stored(stored, 0, deleted=False)


class V1Ttl(Encoding):
    """Encoding of V1 with eight bytes of expiry after each value."""

    api_version = ApiVersion.V1TTL

    def put(self, key: bytes, value: bytes, expire: int, ts: int) -> Row:  # noqa: ARG002
        return DATA_PREFIX + key, value + expire.to_bytes(8, "big")

    def live_rows(self, rows: Iterable[Row], now: int) -> Iterator[LiveRow]:
        for row in rows:
            value, expire, _ = self._decode(row[1])
            if not 0 < expire <= now:
                yield row[0][1:], value, expire, row

    def _decode(self, stored: bytes) -> Stored:
        if len(stored) < 8:
            raise DeadlyData(f"stored value {stored.hex()} is too short for its expiry")
        return Stored(stored[:-8], int.from_bytes(stored[-8:], "big"), deleted=False)


class V2(Encoding):
    """Memcomparable keys with a descending timestamp, values with flags; the newest version hides the others."""

    api_version = ApiVersion.V2

    def bound(self, key: bytes) -> bytes:
        return memcomparable(key) if key else b""

    def data_key(self, key: bytes, ts: int) -> bytes:
        return DATA_PREFIX + memcomparable(key) + (_MAX_TS - ts).to_bytes(8, "big")

    def put(self, key: bytes, value: bytes, expire: int, ts: int) -> Row:
        stored = value + expire.to_bytes(8, "big") + b"\x01" if expire else value + b"\x00"
        return self.data_key(key, ts), stored

    def delete(self, key: bytes, ts: int) -> tuple[list[Row], list[bytes]]:
        return [(self.data_key(key, ts), _TOMBSTONE)], []

    def newest(self, engine: RocksEngine, key: bytes) -> Stored | None:
        """The version with the largest timestamp; one of timestamp 0 is invisible."""
        prefix = DATA_PREFIX + memcomparable(key)
        for _, stored in engine.iterate(prefix, prefix + _NEWEST_END):
            return _decode_v2(stored)
        return None

    def live_rows(self, rows: Iterable[Row], now: int) -> Iterator[LiveRow]:
        last = b""
        for row in rows:
            data_key, stored = row
            versionless = data_key[:-8]
            if versionless == last:
                continue
            last = versionless
            if stored[-1:] == b"\x00":  # most rows
                value, expire = stored[:-1], 0
            else:
                value, expire, deleted = _decode_v2(stored)
                if deleted or 0 < expire <= now:
                    continue
            key = bytearray(versionless[1:])
            padding = 0xFF - key[-1]
            del key[8::9]
            del key[len(key) - padding :]
            yield bytes(key), value, expire, row

    def split_key(self, data_key: bytes) -> bytes:
        return data_key[1:-8]

    def _newest_of_reversed(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the newest version of each key, from rows in descending order: the last of each run of versions."""
        held: Row | None = None
        for row in rows:
            if held is not None and held[0][:-8] != row[0][:-8]:
                yield held
            held = row
        if held is not None:
            yield held


class PlainV2(Encoding):
    """API V2 before 6.1: keys as they come, one version of each, values with flags."""

    api_version = ApiVersion.V2

    def put(self, key: bytes, value: bytes, expire: int, ts: int) -> Row:
        data_key, _ = super().put(key, value, expire, ts)
        return data_key, value + expire.to_bytes(8, "big") + b"\x01" if expire else value + b"\x00"

    def _decode(self, stored: bytes) -> Stored:
        return _decode_v2(stored)


_ENCODINGS: Final[dict[ApiVersion, Encoding]] = {each.api_version: each for each in (Encoding(), V1Ttl(), V2())}


def encoding_of(api_version: ApiVersion, release: ServerVersion = RECORDED) -> Encoding:
    """The encoding of an API version in a version of TiKV."""
    if api_version is ApiVersion.V2 and not release.encodes_v2:
        return PlainV2()
    return _ENCODINGS[api_version]


def v2_version(data_key: bytes, stored: bytes) -> KeyVersion:
    """A row of a V2 store. Raises `DeadlyData` for one that no V2 store writes."""
    key = from_memcomparable(data_key[1:-8])
    if key is None:
        raise DeadlyData(f"stored key {data_key.hex()} is not memcomparable")
    return KeyVersion(key, v2_ts(data_key), _decode_v2(stored))


def v2_ts(data_key: bytes) -> int:
    """The timestamp in a V2 data key."""
    return _MAX_TS - int.from_bytes(data_key[-8:], "big")


def _decode_v2(stored: bytes) -> Stored:
    flags = stored[-1] if stored else 0xFF
    if flags & ~(_EXPIRES | _DELETED):
        raise DeadlyData(f"stored value with flags {flags:#04x}: Codec bad format value(meta)")
    if not flags & _EXPIRES:
        return Stored(stored[:-1], 0, deleted=bool(flags & _DELETED))
    if len(stored) < 9:
        raise DeadlyData(f"stored value {stored.hex()} is too short for its expiry")
    return Stored(stored[:-9], int.from_bytes(stored[-9:-1], "big"), deleted=bool(flags & _DELETED))
