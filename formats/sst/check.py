"""Checks by ranged reads whether a store can ingest a table: a store crashes on one that it cannot.

What a real store does with each defect is tabled in docs/formats-sst.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.keys.codec import DATA_PREFIX, PREFIX_SIZE, KeyCodec
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.sst import table as names
from tikv_br.formats.sst.table import EndKeys, Table
from tikv_br.formats.values import decode_value

_EXTERNAL_VERSION = 2
_GLOBAL_SEQNO_SIZE = 8


def check_structure(
    table: Table,
    codec: KeyCodec,
    start: bytes = b"",
    end: bytes = b"",
    check_value: Callable[[bytes], object] | None = None,
) -> EndKeys:
    """Check all that can be checked without reading every row: footer, properties, index, first and last data block.

    The codec's keyspace does not count. `start` and `end` are physical bounds as regions have them (`KeyCodec.bound`), without
    ``z``; empty = unbounded. `check_value` raises for values that no store holds; the default checks RawKV values. All
    checksums of what is read are verified. Not seen here: rows between the first and the last block (`check_rows`).
    Raises `DamagedBytes`, `UnsupportedFormat` with what is wrong.
    """
    table.require_plain_rows()
    _check_properties(table)
    handles = table.index.handles
    if not handles or not table.entries:
        raise DamagedBytes("table without rows")
    if names.number(table.properties, names.NUM_DATA_BLOCKS) not in {0, len(handles)}:
        raise DamagedBytes(f"index of {len(handles)} blocks does not match the properties")
    found = _check_ends(table, codec, check_value or partial(decode_value, codec.api_version))
    if found.first < DATA_PREFIX + start:
        raise DamagedBytes(f"first key {show_key(found.first)} before the start of the range, {show_key(start)}")
    if end and found.last >= DATA_PREFIX + end:
        raise DamagedBytes(f"last key {show_key(found.last)} at or after the end of the range, {show_key(end)}")
    return found


def _check_properties(table: Table) -> None:
    properties = table.properties
    for name in (names.EXTERNAL_VERSION, names.GLOBAL_SEQNO, names.NUM_ENTRIES):
        if name not in properties:
            raise UnsupportedFormat(f"no property {name}: not a table for ingestion")
    version = names.fixed_number(properties, names.EXTERNAL_VERSION)
    if version != _EXTERNAL_VERSION:
        raise UnsupportedFormat(f"{names.EXTERNAL_VERSION} is {version}, not {_EXTERNAL_VERSION}")
    if len(properties[names.GLOBAL_SEQNO]) != _GLOBAL_SEQNO_SIZE:
        raise DamagedBytes(f"{names.GLOBAL_SEQNO} of {len(properties[names.GLOBAL_SEQNO])} bytes")
    for name in (names.DELETED_KEYS, names.MERGE_OPERANDS):
        if names.number(properties, name):
            raise UnsupportedFormat(f"{name} is {names.number(properties, name)}: only puts are ingested")


def _check_ends(table: Table, codec: KeyCodec, check_value: Callable[[bytes], object]) -> EndKeys:
    """Check the rows of the first and the last block against each other and the index; the first and the last key."""
    separators, handles = table.index.separators, table.index.handles
    first_block = list(_keys(table, 0, codec, check_value))
    last_block = list(_keys(table, len(handles) - 1, codec, check_value))
    if not first_block or not last_block:
        raise DamagedBytes("data block without rows")
    if first_block[-1] > separators[0] or last_block[-1] > separators[-1]:
        raise DamagedBytes("index key before the last key of its block")
    if len(handles) > 1 and last_block[0] <= separators[-2]:
        raise DamagedBytes("index key at or after the first key of the next block")
    return EndKeys(first_block[0], last_block[-1])


def _keys(table: Table, number: int, codec: KeyCodec, check_value: Callable[[bytes], object]) -> Iterator[bytes]:
    last = b""
    for key, value in table.rows(table.index.handles[number]):
        if key <= last:
            raise DamagedBytes(f"key {show_key(key)} does not sort after {show_key(last)}")
        check_key(key, codec)
        check_value(value)
        yield key
        last = key


def check_key(key: bytes, codec: KeyCodec) -> None:
    """Raise `DamagedBytes` for a key that a store of this API version and mode does not hold in its engine."""
    if not key.startswith(DATA_PREFIX):
        raise DamagedBytes(f"key {show_key(key)} does not start with z")
    rpc_key, ts = codec.parse_storage_key(key[len(DATA_PREFIX) :])
    if codec.is_v2 and (len(rpc_key) < PREFIX_SIZE or not rpc_key.startswith(codec.mode.keys.start)):
        raise DamagedBytes(f"key {show_key(key)}: not a keyspace of {codec.mode.value} mode")
    if codec.is_encoded and not ts:
        raise DamagedBytes(f"key {show_key(key)}: a timestamp of 0")
