"""The unit of data: one Arrow schema that every reader yields and every writer takes."""

from __future__ import annotations

import pyarrow as pa

SCHEMA = pa.schema(
    [
        pa.field("key", pa.large_binary(), nullable=False),  # user key, no prefix
        pa.field("value", pa.large_binary(), nullable=False),  # user value
        pa.field("expire_ts", pa.uint64(), nullable=False),  # seconds since the epoch, 0 = never
        pa.field("ts", pa.uint64(), nullable=False),  # TSO, 0 = the source has none
        pa.field("deleted", pa.bool_(), nullable=False),  # a tombstone of API V2
    ]
)
"""User records, sorted by key."""

STORAGE_SCHEMA = pa.schema(
    [
        pa.field("key", pa.large_binary(), nullable=False),  # as in RocksDB: 'z' + storage key (V2: MCE + ~ts)
        pa.field("value", pa.large_binary(), nullable=False),  # as in RocksDB: with expiry and flags
    ]
)
"""Rows as a store's RocksDB holds them, sorted by key: what SSTs contain."""
