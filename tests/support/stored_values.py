"""Encodes single values as stores do, independently of the kernels of `tikv_br.formats.rows`."""

from __future__ import annotations

from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import UnsupportedFormat
from tikv_br.formats.values import EXPIRE_SIZE, FLAG_DELETED, FLAG_EXPIRE, StoredValue


def encode_value(api_version: ApiVersion, stored: StoredValue) -> bytes:
    """The bytes in RocksDB. Raises `UnsupportedFormat` for an expiry or tombstone that the version cannot hold."""
    value, expire_ts, deleted = stored
    if api_version is ApiVersion.V2:
        expiry = expire_ts.to_bytes(EXPIRE_SIZE, "big") if expire_ts else b""
        return value + expiry + bytes([FLAG_EXPIRE * bool(expire_ts) | FLAG_DELETED * deleted])
    if deleted:
        raise UnsupportedFormat(f"API {api_version.label} stores no tombstones")
    if api_version is ApiVersion.V1TTL:
        return value + expire_ts.to_bytes(EXPIRE_SIZE, "big")
    if expire_ts:
        raise UnsupportedFormat("API v1 stores no expiry")
    return value
