"""The forms of a key: user key, RPC key, PD bound and RocksDB key, with the memcomparable encoding (MCE)."""

from __future__ import annotations

import enum

from msgspec import Struct

from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.keys.text import show_key

GROUP = 8
"""Data bytes in a group."""
ENCODED_GROUP = GROUP + 1
"""Bytes of an encoded group: data and marker."""
FULL = 0xFF
"""The marker after a full group that is not the last."""


def encode(data: bytes) -> bytes:
    """Encode `data`, in one group more than it fills."""
    full, rest = divmod(len(data), GROUP)
    padding = GROUP - rest
    groups = [data[at * GROUP : at * GROUP + GROUP] + b"\xff" for at in range(full)]
    groups.append(data[full * GROUP :] + bytes(padding) + bytes([FULL - padding]))
    return b"".join(groups)


def decode(data: bytes) -> tuple[bytes, int]:
    """Decode the encoded string that `data` begins with: the string, and the bytes that it took.

    Raises `DamagedBytes` when `data` ends too soon, a marker is impossible, or the padding is not zero.
    """
    decoded = bytearray()
    for start in range(0, len(data), ENCODED_GROUP):
        group = data[start : start + ENCODED_GROUP]
        if len(group) < ENCODED_GROUP:
            break
        padding = FULL - group[GROUP]
        if padding > GROUP:
            raise DamagedBytes(f"memcomparable bytes: marker {group[GROUP]:#04x} at {start + GROUP}")
        decoded += group[: GROUP - padding]
        if padding:
            if any(group[GROUP - padding : GROUP]):
                raise DamagedBytes(f"memcomparable bytes: padding that is not zero before {start + GROUP}")
            return bytes(decoded), start + ENCODED_GROUP
    raise DamagedBytes(f"memcomparable bytes: no last group within {len(data)} bytes")


DATA_PREFIX = b"z"
"""Prefix of every data key in RocksDB, and so in SSTs."""
RAW_MODE = b"r"
"""The first byte of every RawKV key of API V2."""
RAW_MODE_END = b"s"
"""The end of all RawKV keys of API V2; the only form of it that servers accept."""
TXN_MODE, TXN_MODE_END = b"x", b"y"
"""The same of transactional keys. Stores refuse this end in KvScan and KvDeleteRange: they compare it in its memcomparable form."""
MAX_KEY_SIZE = 8192
"""Bytes of a key up to which stores accept writes by default (``storage.max-key-size``): of RPC keys, or encoded transactional keys."""


class KeyMode(enum.StrEnum):
    """The API that clients write keys with; it decides the form of keys in stores."""

    RAW = "raw"
    TXN = "txn"

    @property
    def label(self) -> str:
        """Name for messages."""
        return "RawKV" if self is KeyMode.RAW else "TxnKV"

    @property
    def keys(self) -> KeyRange:
        """All RPC keys of this mode in API V2."""
        return KeyRange(RAW_MODE, RAW_MODE_END) if self is KeyMode.RAW else KeyRange(TXN_MODE, TXN_MODE_END)


MAX_KEYSPACE = 0xFF_FFFF
"""The largest keyspace id."""
PREFIX_SIZE = 4
"""Bytes that API V2 puts before a user key: mode and keyspace."""
TS_SIZE = 8
"""Bytes of the timestamp at the end of a storage key of API V2."""
MAX_TS = (1 << 64) - 1
"""The largest timestamp; storage keys hold a ts as its difference from this."""


class KeyCodec(Struct, frozen=True):
    """Converts keys of one API version, keyspace and mode. Raises `UnsupportedFormat` for a keyspace that cannot be."""

    api_version: ApiVersion
    keyspace_id: int = 0
    mode: KeyMode = KeyMode.RAW

    def __post_init__(self) -> None:
        if not 0 <= self.keyspace_id <= MAX_KEYSPACE:
            raise UnsupportedFormat(f"keyspace id {self.keyspace_id} is not in 0..{MAX_KEYSPACE}")
        if self.keyspace_id and not self.is_v2:
            raise UnsupportedFormat(f"keyspace {self.keyspace_id}: API {self.api_version.label} has no keyspaces")

    @property
    def is_v2(self) -> bool:
        """Return whether keys have a prefix."""
        return self.api_version is ApiVersion.V2

    @property
    def is_encoded(self) -> bool:
        """Return whether bounds and storage keys are memcomparable, and storage keys end with a timestamp."""
        return self.is_v2 or self.mode is KeyMode.TXN

    @property
    def prefix(self) -> bytes:
        """The bytes before the user key in an RPC: 4 in V2 (mode and keyspace), none in V1 and V1TTL."""
        return self.mode.keys.start + self.keyspace_id.to_bytes(PREFIX_SIZE - 1, "big") if self.is_v2 else b""

    def rpc_key(self, user: bytes) -> bytes:
        """The key as requests and responses carry it."""
        return self.prefix + user

    def user_key(self, rpc: bytes) -> bytes:
        """The user's key of an RPC key. Raises `DamagedBytes` when it is of another keyspace or mode."""
        prefix = self.prefix
        if not rpc.startswith(prefix):
            raise DamagedBytes(
                f"key {show_key(rpc)} lacks the prefix {show_key(prefix)} of keyspace {self.keyspace_id}"
            )
        return rpc[len(prefix) :]

    def rpc_range(self, user: KeyRange = EVERY_KEY) -> KeyRange:
        """The RPC range of a range of user keys.

        In V2 both ends of the result lie within the keyspace's bounds and are never empty.
        """
        prefix = self.prefix
        return KeyRange(prefix + user.start, prefix + user.end if user.end else self._keyspace_end())

    def user_range(self, rpc: KeyRange) -> KeyRange:
        """The user keys of an RPC range in the keyspace. Raises `DamagedBytes` for another keyspace or mode."""
        end = b"" if rpc.end == self._keyspace_end() else self.user_key(rpc.end)
        return KeyRange(self.user_key(rpc.start), end)

    def bound(self, rpc: bytes) -> bytes:
        """An RPC key as PD and region bounds hold it; empty (no bound) stays empty."""
        return encode(rpc) if self.is_encoded and rpc else rpc

    def from_bound(self, bound: bytes) -> bytes:
        """The RPC key of a bound, without a timestamp that may follow; empty stays empty. Raises `DamagedBytes`."""
        return decode(bound)[0] if self.is_encoded and bound else bound

    def storage_key(self, rpc: bytes, ts: int) -> bytes:
        """The key in a store's RocksDB, without its leading ``z``. `ts` does not count for raw keys before V2."""
        if not self.is_encoded:
            return rpc
        return encode(rpc) + (MAX_TS - ts).to_bytes(TS_SIZE, "big")

    def parse_storage_key(self, key: bytes) -> tuple[bytes, int]:
        """The RPC key and the ts (0 for raw keys before V2) of a storage key without ``z``. Raises `DamagedBytes`."""
        if not self.is_encoded:
            return key, 0
        rpc, consumed = decode(key)
        if len(key) - consumed != TS_SIZE:
            raise DamagedBytes(f"storage key {show_key(key)}: {len(key) - consumed} bytes of ts instead of {TS_SIZE}")
        return rpc, MAX_TS - int.from_bytes(key[consumed:], "big")

    def _keyspace_end(self) -> bytes:
        if not self.is_v2:
            return b""
        if self.keyspace_id == MAX_KEYSPACE:
            return self.mode.keys.end
        return self.mode.keys.start + (self.keyspace_id + 1).to_bytes(PREFIX_SIZE - 1, "big")


def last_key(prefix: bytes = b"") -> bytes:
    """A key with this prefix, above all others with it that stores accept by default: for ends that must be one."""
    return prefix + b"\xff" * MAX_KEY_SIZE


def successor(prefix: bytes) -> bytes:
    """The smallest key above all that begin with ``prefix``; ``b""`` when there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b""
