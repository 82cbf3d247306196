"""How a store of each API version lays RawKV data down in RocksDB, and reads what is live of it.

Written for the playground alone, so that tests of ``formats`` against it compare two implementations.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, Protocol

from formats.api_version import ApiVersion
from formats.keys import DATA_PREFIX
from tikv_br.playground.engine import Engine

_MAX_TS: Final = (1 << 64) - 1
_NEWEST_END: Final = b"\xff" * 8
_PADDING: Final = [bytes(8 - rest) for rest in range(8)]
_LAST_MARKER: Final = [bytes([0xFF - 8 + rest]) for rest in range(8)]
_NEVER: Final = bytes(8)
_TOMBSTONE: Final = b"\x02"
_EXPIRES: Final = 1
_DELETED: Final = 2

Row = tuple[bytes, bytes]


class DeadlyData(Exception):
    """Bytes in RocksDB that a real store dies of when it reads them."""


class Stored(NamedTuple):
    """The newest version of a key as stored; ``expire`` in unix seconds, 0 = never."""

    value: bytes
    expire: int
    deleted: bool

    def is_live(self, now: int) -> bool:
        """Whether a read at ``now`` sees it; an expiry equal to ``now`` is over."""
        return not self.deleted and not 0 < self.expire <= now


class Version(NamedTuple):
    """One version of a V2 key: the RPC key, its timestamp, and what is stored."""

    key: bytes
    ts: int
    stored: Stored


class Encoding(Protocol):
    """One API version. Keys are RPC keys unless said otherwise; bounds are physical, as regions have them."""

    api_version: ApiVersion

    def bound(self, key: bytes) -> bytes:
        """The physical form of a key, by which regions are told apart; b"" stays b""."""
        ...

    def data_key(self, key: bytes, ts: int) -> bytes:
        """The key in RocksDB."""
        ...

    def put(self, key: bytes, value: bytes, expire: int, ts: int) -> Row:
        """The row that a put writes."""
        ...

    def delete(self, key: bytes, ts: int) -> tuple[list[Row], list[bytes]]:
        """Rows to write and keys to remove for a delete."""
        ...

    def newest(self, engine: Engine, key: bytes) -> Stored | None:
        """What is stored for a key, live or not."""
        ...

    def live(self, engine: Engine, start: bytes, end: bytes, *, now: int, reverse: bool = False) -> Iterator[Row]:
        """Live (key, user value) within physical bounds; ``end`` b"" is unbounded."""
        ...

    def split_key(self, data_key: bytes) -> bytes:
        """The physical key at which a region may be cut in front of a row."""
        ...


def encoding_of(api_version: ApiVersion) -> Encoding:
    """The encoding of an API version."""
    encodings: dict[ApiVersion, Encoding] = {ApiVersion.V1: V1(), ApiVersion.V1TTL: V1Ttl(), ApiVersion.V2: V2()}
    return encodings[api_version]


def memcomparable(key: bytes) -> bytes:
    """A key in groups of eight bytes, each with its marker: the hot path of V2 writes."""
    rest = len(key) % 8
    groups = _splitter(len(key) // 8 + 1)(key + _PADDING[rest])
    return b"\xff".join(groups) + _LAST_MARKER[rest]


def from_memcomparable(encoded: bytes) -> bytes | None:
    """The key that `memcomparable` made the bytes from, whatever follows it; None for bytes that it never makes."""
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
    """Physical bounds as data keys for `Engine.iterate`."""
    return DATA_PREFIX + start, DATA_PREFIX + end if end else b""


class V1:
    """Keys and values as the user gave them."""

    api_version = ApiVersion.V1

    def bound(self, key: bytes) -> bytes:
        """The key itself."""
        return key

    def data_key(self, key: bytes, ts: int) -> bytes:  # noqa: ARG002
        """``z`` + key."""
        return DATA_PREFIX + key

    def put(self, key: bytes, value: bytes, expire: int, ts: int) -> Row:  # noqa: ARG002
        """The value as it is."""
        return DATA_PREFIX + key, value

    def delete(self, key: bytes, ts: int) -> tuple[list[Row], list[bytes]]:  # noqa: ARG002
        """Remove the row."""
        return [], [DATA_PREFIX + key]

    def newest(self, engine: Engine, key: bytes) -> Stored | None:
        """The row if it is there."""
        stored = engine.get(DATA_PREFIX + key)
        return None if stored is None else self._decode(stored)

    def live(self, engine: Engine, start: bytes, end: bytes, *, now: int, reverse: bool = False) -> Iterator[Row]:
        """All rows, for none can expire."""
        del now
        for key, value in engine.iterate(*data_range(start, end), reverse=reverse):
            yield key[1:], value

    def split_key(self, data_key: bytes) -> bytes:
        """The user's key."""
        return data_key[1:]

    def _decode(self, stored: bytes) -> Stored:
        return Stored(stored, 0, deleted=False)


class V1Ttl(V1):
    """As V1, with eight bytes of expiry after each value."""

    api_version = ApiVersion.V1TTL

    def put(self, key: bytes, value: bytes, expire: int, ts: int) -> Row:  # noqa: ARG002
        """The value and its expiry."""
        return DATA_PREFIX + key, value + expire.to_bytes(8, "big")

    def live(self, engine: Engine, start: bytes, end: bytes, *, now: int, reverse: bool = False) -> Iterator[Row]:
        """Rows that have not expired."""
        for key, stored in engine.iterate(*data_range(start, end), reverse=reverse):
            if stored[-8:] == _NEVER or self._decode(stored).expire > now:
                yield key[1:], stored[:-8]

    def _decode(self, stored: bytes) -> Stored:
        if len(stored) < 8:
            raise DeadlyData(f"stored value {stored.hex()} is too short for its expiry")
        return Stored(stored[:-8], int.from_bytes(stored[-8:], "big"), deleted=False)


class V2:
    """Memcomparable keys with a descending timestamp, values with flags; the newest version hides the others."""

    api_version = ApiVersion.V2

    def bound(self, key: bytes) -> bytes:
        """The memcomparable key."""
        return memcomparable(key) if key else b""

    def data_key(self, key: bytes, ts: int) -> bytes:
        """``z`` + memcomparable key + inverted timestamp."""
        return DATA_PREFIX + memcomparable(key) + (_MAX_TS - ts).to_bytes(8, "big")

    def put(self, key: bytes, value: bytes, expire: int, ts: int) -> Row:
        """A new version."""
        stored = value + expire.to_bytes(8, "big") + b"\x01" if expire else value + b"\x00"
        return self.data_key(key, ts), stored

    def delete(self, key: bytes, ts: int) -> tuple[list[Row], list[bytes]]:
        """A tombstone as new version."""
        return [(self.data_key(key, ts), _TOMBSTONE)], []

    def newest(self, engine: Engine, key: bytes) -> Stored | None:
        """The version with the largest timestamp; one of timestamp 0 is invisible."""
        prefix = DATA_PREFIX + memcomparable(key)
        for _, stored in engine.iterate(prefix, prefix + _NEWEST_END):
            return _decode_v2(stored)
        return None

    def live(self, engine: Engine, start: bytes, end: bytes, *, now: int, reverse: bool = False) -> Iterator[Row]:
        """The newest version of each key, unless it is deleted or expired."""
        rows = engine.iterate(*data_range(start, end), reverse=reverse)
        last = b""
        for data_key, stored in _newest_of_reversed(rows) if reverse else rows:
            versionless = data_key[:-8]
            if versionless == last:
                continue
            last = versionless
            if stored[-1:] == b"\x00":
                value = stored[:-1]
            else:
                value, expire, deleted = _decode_v2(stored)
                if deleted or 0 < expire <= now:
                    continue
            key = bytearray(versionless[1:])
            padding = 0xFF - key[-1]
            del key[8::9]
            del key[len(key) - padding :]
            yield bytes(key), value

    def split_key(self, data_key: bytes) -> bytes:
        """The memcomparable key without the timestamp."""
        return data_key[1:-8]


def v2_version(data_key: bytes, stored: bytes) -> Version:
    """A row of a V2 store. Raises `DeadlyData` for one that no V2 store writes."""
    key = from_memcomparable(data_key[1:-8])
    if key is None:
        raise DeadlyData(f"stored key {data_key.hex()} is not memcomparable")
    return Version(key, v2_ts(data_key), _decode_v2(stored))


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


def _newest_of_reversed(rows: Iterable[Row]) -> Iterator[Row]:
    """Of rows in descending order, the last of each run of versions: the newest."""
    held: Row | None = None
    for row in rows:
        if held is not None and held[0][:-8] != row[0][:-8]:
            yield held
        held = row
    if held is not None:
        yield held
