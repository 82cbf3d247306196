"""Checks every row of a table: what only reading all of it can show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import Bytes, Offsets
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.addresses import Int, address, common_prefix
from tikv_br.formats.keys.codec import ENCODED_GROUP, FULL, GROUP, PREFIX_SIZE, TS_SIZE
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.sst.check import check_key
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.values import EXPIRE_SIZE, FLAG_DELETED, FLAG_EXPIRE, decode_value

_Z = ord("z")
_RAW_MODE = ord("r")
_V1TTL = int(ApiVersion.V1TTL)
_V2 = int(ApiVersion.V2)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Facts about all rows together."""

    entries: int
    first_key: bytes
    """First key as in the file."""
    last_key: bytes


def check_rows(reader: SstReader, api_version: ApiVersion) -> RowFacts:
    """Read every row and check it.

    Keys ascend strictly, start with ``z`` and, in V2, end with a timestamp; values have the expiry and flags that their
    version asks for; the number of rows is what the properties say.
    Raises `DamagedBytes` that names the first wrong row, `UnsupportedFormat` for what the reader does not handle.
    """
    count, first_key, last_key = 0, b"", b""
    for batch in reader.batches():
        keys, values = columns.view(batch["key"]), columns.view(batch["value"])
        wrong = _first_wrong_row(*keys, *values, np.frombuffer(last_key, np.uint8), int(api_version))
        if wrong >= 0:
            _explain(batch, int(wrong), last_key, api_version)
        first_key = first_key or batch["key"][0].as_py()
        last_key = batch["key"][-1].as_py()
        count += batch.num_rows
    if count != reader.table.entries:
        raise DamagedBytes(f"{count} rows, but the properties say {reader.table.entries}")
    return RowFacts(count, first_key, last_key)


def _explain(batch: pa.RecordBatch, row: int, last_key: bytes, api_version: ApiVersion) -> None:
    """Raise what is wrong with a row that the kernel rejected."""
    key, value = batch["key"][row].as_py(), batch["value"][row].as_py()
    before = batch["key"][row - 1].as_py() if row else last_key
    if key <= before:
        raise DamagedBytes(f"key {show_key(key)} does not sort after {show_key(before)}")
    check_key(key, api_version)
    decode_value(api_version, value)
    raise DamagedBytes(f"row with key {show_key(key)} is not a valid row of API {api_version.label}")


@njit(forceinline=True)
def _is_storage_key(key: Bytes) -> bool:
    """Return whether a key is ``z``, a memcomparable raw key with a keyspace, and a timestamp other than 0."""
    at = 1
    while at + ENCODED_GROUP <= key.size:
        padding = FULL - key[at + GROUP]
        at += ENCODED_GROUP
        if padding > GROUP:
            return False
        for byte in range(padding):
            if key[at - 2 - byte]:
                return False
        if padding:
            break
    else:
        return False
    if at + TS_SIZE != key.size or key[1] != _RAW_MODE or (at == 1 + ENCODED_GROUP and GROUP - padding < PREFIX_SIZE):
        return False
    inverted = 0
    for byte in range(TS_SIZE):
        inverted += key[at + byte] == FULL
    return inverted < TS_SIZE


@njit(forceinline=True)
def _is_stored_value(value: Bytes, version: int) -> bool:
    """Return whether a value has the expiry and flags of its API version."""
    if version == _V1TTL:
        return value.size >= EXPIRE_SIZE
    if version != _V2:
        return True
    if value.size == 0 or value[-1] & ~(FLAG_EXPIRE | FLAG_DELETED):
        return False
    if not value[-1] & FLAG_EXPIRE:
        return True
    return value.size > EXPIRE_SIZE and bool(value[-1 - EXPIRE_SIZE : -1].any())


@njit(forceinline=True)
def _ascends(left: Bytes, right: Bytes) -> bool:
    shorter = min(left.size, right.size)
    shared = common_prefix(address(left), address(right), shorter)
    return left.size < right.size if shared == shorter else left[shared] < right[shared]


@njit
def _first_wrong_row(
    key_offsets: Offsets, keys: Bytes, value_offsets: Offsets, values: Bytes, last_key: Bytes, version: int
) -> Int:
    """The first row that does not follow the one before or is not of this version; -1 when all are right."""
    before = last_key
    for row in range(key_offsets.size - 1):
        key = keys[key_offsets[row] : key_offsets[row + 1]]
        if not _ascends(before, key) or key[0] != _Z or (version == _V2 and not _is_storage_key(key)):
            return row
        if not _is_stored_value(values[value_offsets[row] : value_offsets[row + 1]], version):
            return row
        before = key
    return -1
