"""Checks every row of a table: what only reading all of it can show."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import Bytes, Offsets
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.addresses import Int, address, common_prefix
from tikv_br.formats.kernels.memory import get_u64
from tikv_br.formats.kernels.rows import GOOD, check_v2_value, check_versioned_key
from tikv_br.formats.keys.codec import PREFIX_SIZE, TS_SIZE, KeyCodec
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.sst.check import check_key
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.values import EXPIRE_SIZE, decode_value

_Z = ord("z")
_RAW_MODE = ord("r")
_V1TTL = int(ApiVersion.V1TTL)
_V2 = int(ApiVersion.V2)


def check_rows(reader: SstReader, api_version: ApiVersion) -> None:
    """Read every row and check it.

    Keys ascend strictly, start with ``z`` and, in V2, end with a timestamp; values have the expiry and flags that their
    version asks for; the number of rows is what the properties say.
    Raises `DamagedBytes` that names the first wrong row, `UnsupportedFormat` for what the reader does not handle.
    """
    count, last_key = 0, b""
    for batch in reader.batches():
        keys, values = columns.view(batch["key"]), columns.view(batch["value"])
        wrong = _first_wrong_row(*keys, *values, np.frombuffer(last_key, np.uint8), int(api_version))
        if wrong >= 0:
            _explain(batch, int(wrong), last_key, api_version)
        last_key = batch["key"][-1].as_py()
        count += batch.num_rows
    if count != reader.table.entries:
        raise DamagedBytes(f"{count} rows, but the properties say {reader.table.entries}")


def _explain(batch: pa.RecordBatch, row: int, last_key: bytes, api_version: ApiVersion) -> None:
    """Raise what is wrong with a row that the kernel rejected."""
    key, value = batch["key"][row].as_py(), batch["value"][row].as_py()
    before = batch["key"][row - 1].as_py() if row else last_key
    if key <= before:
        raise DamagedBytes(f"key {show_key(key)} does not sort after {show_key(before)}")
    check_key(key, KeyCodec(api_version))
    decode_value(api_version, value)
    raise DamagedBytes(f"row with key {show_key(key)} is not a valid row of API {api_version.label}")


@njit(forceinline=True)
def _is_storage_key(keys: Bytes, start: int, stop: int) -> bool:
    """Return whether a key is ``z``, a memcomparable raw key with a keyspace, and a timestamp other than 0."""
    own_prefix = keys[start + 1 : stop]
    reason, _size = check_versioned_key(keys, start, stop, own_prefix, PREFIX_SIZE)
    return reason == GOOD and own_prefix[0] == _RAW_MODE and ~get_u64(keys, stop - TS_SIZE) != 0


@njit(forceinline=True)
def _is_stored_value(values: Bytes, start: int, stop: int, version: int) -> bool:
    """Return whether a value has the expiry and flags of its API version."""
    if version == _V1TTL:
        return stop - start >= EXPIRE_SIZE
    return version != _V2 or check_v2_value(values, start, stop)[0] == GOOD


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
        if (
            not _ascends(before, key)
            or key[0] != _Z
            or (version == _V2 and not _is_storage_key(keys, key_offsets[row], key_offsets[row + 1]))
        ):
            return row
        if not _is_stored_value(values, value_offsets[row], value_offsets[row + 1], version):
            return row
        before = key
    return -1
