"""The forms of one key: the user's, the RPCs', PD's bounds and the stores'.

======== ============ ====================== ==========================
API      RPC          PD and region bounds   storage (RocksDB adds z)
======== ============ ====================== ==========================
V1       user key     user key               user key
V1TTL    user key     user key               user key
V2       r‖ks‖user    MCE(r‖ks‖user)         MCE(r‖ks‖user)‖u64be(~ts)
======== ============ ====================== ==========================

``ks`` is the keyspace id in three bytes, big endian. Whole columns of keys: `formats.rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

from formats import mce
from formats.api_version import ApiVersion
from formats.errors import DamagedBytes, UnsupportedFormat

DATA_PREFIX = b"z"
"""What a store puts before every key of data in RocksDB, and so in SSTs."""
RAW_MODE = b"r"
"""The first byte of every RawKV key of API V2."""
RAW_MODE_END = b"s"
"""The end of all RawKV keys of API V2; the only form of it that servers accept."""
MAX_KEYSPACE = 0xFF_FFFF
"""The largest keyspace id."""
PREFIX_SIZE = 4
"""Bytes that API V2 puts before a user key: mode and keyspace."""
TS_SIZE = 8
"""Bytes of the timestamp at the end of a storage key of API V2."""
MAX_TS = (1 << 64) - 1
"""The largest timestamp; storage keys hold a ts as its difference from this."""


@dataclass(frozen=True, slots=True)
class KeyCodec:
    """Converts keys of one API version and keyspace. Raises `UnsupportedFormat` for a keyspace that cannot be."""

    api_version: ApiVersion
    keyspace_id: int = 0
    below: bytes = b""
    """What is put before every user key: all keys of the codec then have this prefix, and no user sees it."""

    def __post_init__(self) -> None:
        if not 0 <= self.keyspace_id <= MAX_KEYSPACE:
            raise UnsupportedFormat(f"keyspace id {self.keyspace_id} is not in 0..{MAX_KEYSPACE}")
        if self.keyspace_id and not self.is_v2:
            raise UnsupportedFormat(f"keyspace {self.keyspace_id}: API {self.api_version.label} has no keyspaces")

    @property
    def is_v2(self) -> bool:
        """Whether keys carry a prefix and, in storage, a timestamp."""
        return self.api_version is ApiVersion.V2

    @property
    def prefix(self) -> bytes:
        """What comes before the user key in an RPC: 4 bytes in V2, none before, and `below`."""
        own = RAW_MODE + self.keyspace_id.to_bytes(PREFIX_SIZE - 1, "big") if self.is_v2 else b""
        return own + self.below

    def rpc_key(self, user: bytes) -> bytes:
        """The key as requests and responses carry it."""
        return self.prefix + user

    def user_key(self, rpc: bytes) -> bytes:
        """The user's key of an RPC key. Raises `DamagedBytes` when it is of another keyspace or mode."""
        prefix = self.prefix
        if not rpc.startswith(prefix):
            raise DamagedBytes(f"key {rpc.hex()} lacks the prefix {prefix.hex()} of keyspace {self.keyspace_id}")
        return rpc[len(prefix) :]

    def rpc_range(self, start: bytes, end: bytes) -> tuple[bytes, bytes]:
        """The RPC range of the user range [start, end), where an empty end means no end.

        In V2 both ends of the result lie within the keyspace's bounds and are never empty.
        """
        prefix = self.prefix
        if end:
            return prefix + start, prefix + end
        if self.below:
            return prefix + start, successor(prefix)
        return prefix + start, self._keyspace_end() if self.is_v2 else b""

    def bound(self, rpc: bytes) -> bytes:
        """An RPC key as PD and region bounds hold it; empty (no bound) stays empty."""
        return mce.encode(rpc) if self.is_v2 and rpc else rpc

    def from_bound(self, bound: bytes) -> bytes:
        """The RPC key of a bound, without a timestamp that may follow; empty stays empty. Raises `DamagedBytes`."""
        return mce.decode(bound)[0] if self.is_v2 and bound else bound

    def storage_key(self, rpc: bytes, ts: int) -> bytes:
        """The key in a store's RocksDB, without its leading ``z``. `ts` counts in V2 only."""
        if not self.is_v2:
            return rpc
        return mce.encode(rpc) + (MAX_TS - ts).to_bytes(TS_SIZE, "big")

    def parse_storage_key(self, key: bytes) -> tuple[bytes, int]:
        """The RPC key and the ts (0 before V2) of a storage key without ``z``. Raises `DamagedBytes`."""
        if not self.is_v2:
            return key, 0
        rpc, consumed = mce.decode(key)
        if len(key) - consumed != TS_SIZE:
            raise DamagedBytes(f"storage key {key.hex()}: {len(key) - consumed} bytes of ts instead of {TS_SIZE}")
        return rpc, MAX_TS - int.from_bytes(key[consumed:], "big")

    def _keyspace_end(self) -> bytes:
        if self.keyspace_id == MAX_KEYSPACE:
            return RAW_MODE_END
        return RAW_MODE + (self.keyspace_id + 1).to_bytes(PREFIX_SIZE - 1, "big")


def successor(prefix: bytes) -> bytes:
    """The smallest key above all that begin with ``prefix``; ``b""`` when there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b""
