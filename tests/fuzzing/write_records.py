"""Hostile rows of the column family ``write``: a byte with the size of the key, the key, and the record.

What the kernels take must be what the codecs of single keys and records read. Both get their bytes as messages do, before a page
of memory that nothing may read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from tests.fuzzing.messages import Guarded, damaged
from tests.fuzzing.target import Target
from tikv_br.formats import columns, mvcc
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.mvcc import DELETE, PUT, WriteRecord
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource

CODEC = KeyCodec(ApiVersion.V2, 1, KeyMode.TXN)
LARGEST = 4 << 10
LONG = bytes(range(256))
_keys, _records = Guarded(LARGEST), Guarded(LARGEST)


def read_row(data: bytes) -> str:
    """Join the row, with a value if its record has none, and compare it with what the codecs say."""
    size = data[0] if data else 0
    key, record = data[1 : 1 + size], data[1 + size :]
    if len(record) > LARGEST:
        return "too large"
    try:
        expected = row_of(key, record)
    except FormatError:
        expected = None
    write = columns.storage_rows(_column(_keys.hold(key)), _column(_records.hold(record)))
    default = [] if expected is None or expected[1] is not LONG else [_value_of(key, record)]
    try:
        (found,) = mvcc.join([write], default, CODEC.prefix)
    except FormatError as error:
        if expected is None:
            return type(error).__name__
        raise
    row = found.to_pylist()[0]
    if expected != (row["key"], row["value"], row["ts"], row["deleted"]):
        raise AssertionError(f"the kernels read another row than the codecs: {row} instead of {expected}")
    return "read"


def row_of(key: bytes, stored: bytes) -> tuple[bytes, bytes, int, bool]:
    """User key, value, commit ts and whether it is a delete. Raises `FormatError`."""
    rpc_key, commit_ts = CODEC.parse_storage_key(key[1:])
    user_key, record = CODEC.user_key(rpc_key), WriteRecord.decode(stored)
    is_delete, is_long = record.kind == DELETE, record.kind == PUT and record.value is None
    if key[:1] != b"z" or not commit_ts or record.kind not in {PUT, DELETE}:
        raise FormatError("no row of a backup")
    if (is_delete and record.value) or (is_long and not record.start_ts):
        raise FormatError("a delete with a value, or a value without a timestamp")
    return user_key, LONG if is_long else record.value or b"", commit_ts, is_delete


def _value_of(key: bytes, record: bytes) -> pa.RecordBatch:
    rpc_key, _ = CODEC.parse_storage_key(key[1:])
    place = b"z" + CODEC.storage_key(rpc_key, WriteRecord.decode(record).start_ts)
    return columns.storage_rows(columns.from_list([place]), columns.from_list([LONG]))


def _column(held: bytes) -> pa.LargeBinaryArray:
    return columns.build(np.array([0, len(held)], np.int64), np.frombuffer(held, np.uint8))


def _framed(key: bytes, record: bytes) -> bytes:
    return bytes([len(key)]) + key + record


def _sound(_: Path) -> list[bytes]:
    keys = [b"z" + CODEC.storage_key(CODEC.rpc_key(b"k" * size), 1 << 60) for size in (0, 3, 4, 5, 40)]
    records = [
        WriteRecord(PUT, 1 << 59, b"short"),
        WriteRecord(PUT, 1 << 59, bytes(255)),
        WriteRecord(PUT, 1 << 59),
        WriteRecord(DELETE, 7),
        WriteRecord(PUT, 1 << 59, b"", True, 1 << 60, (5, 300), 1 << 40, b"?later"),
    ]
    return [_framed(key, record.encode()) for key in keys for record in records]


def _recorded(golden: Path) -> list[bytes]:
    found = []
    for path in sorted(golden.glob("txn/v2/*/files/*/*_write.sst")):
        for batch in SstReader(MemorySource(path.read_bytes())).batches():
            rows = zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
            found += [_framed(key, value) for key, value in rows if len(key) < 256]
    return found


RECORDS = Target(_sound, _recorded, damaged, read_row)
