"""Checks by ranged reads whether a store can ingest a table: a store crashes on one that it cannot.

What a real store does with each defect is tabled in docs/formats-sst.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.keys.codec import DATA_PREFIX, PREFIX_SIZE, RAW_MODE, KeyCodec
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.sst import table as names
from tikv_br.formats.sst.table import EndKeys, Table
from tikv_br.formats.values import decode_value

_EXTERNAL_VERSION = 2
_GLOBAL_SEQNO_SIZE = 8


def check_structure(table: Table, api_version: ApiVersion, start: bytes = b"", end: bytes = b"") -> EndKeys:
    """Check all that can be checked without reading every row: footer, properties, index, first and last data block.

    `start` and `end` are physical bounds as regions have them (`KeyCodec.bound`), without ``z``; empty = unbounded. All
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
    found = _check_ends(table, api_version)
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


def _check_ends(table: Table, api_version: ApiVersion) -> EndKeys:
    """Check the rows of the first and the last block against each other and the index; the first and the last key."""
    separators, handles = table.index.separators, table.index.handles
    first_block = list(_keys(table, 0, api_version))
    last_block = list(_keys(table, len(handles) - 1, api_version))
    if not first_block or not last_block:
        raise DamagedBytes("data block without rows")
    if first_block[-1] > separators[0] or last_block[-1] > separators[-1]:
        raise DamagedBytes("index key before the last key of its block")
    if len(handles) > 1 and last_block[0] <= separators[-2]:
        raise DamagedBytes("index key at or after the first key of the next block")
    return EndKeys(first_block[0], last_block[-1])


def _keys(table: Table, number: int, api_version: ApiVersion) -> Iterator[bytes]:
    last = b""
    for key, value in table.rows(table.index.handles[number]):
        if key <= last:
            raise DamagedBytes(f"key {show_key(key)} does not sort after {show_key(last)}")
        check_key(key, api_version)
        decode_value(api_version, value)
        yield key
        last = key


def check_key(key: bytes, api_version: ApiVersion) -> None:
    """Raise `DamagedBytes` for a key that a store of this API version does not hold in its engine."""
    if not key.startswith(DATA_PREFIX):
        raise DamagedBytes(f"key {show_key(key)} does not start with z")
    rpc_key, ts = KeyCodec(api_version).parse_storage_key(key[len(DATA_PREFIX) :])
    if api_version is ApiVersion.V2 and (len(rpc_key) < PREFIX_SIZE or not rpc_key.startswith(RAW_MODE) or not ts):
        raise DamagedBytes(f"key {show_key(key)}: not a keyspace of raw mode, or a timestamp of 0")
