"""Rows of one size as RawScan returns them, already serialized: any page is a slice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa

from tikv_br.formats import columns
from tikv_br.formats.columns import Bytes
from tikv_br.formats.loadgen import KEY_DIGITS, KEY_PREFIX, generate
from tikv_br.formats.sst.coding import encode_varint

KEY_SIZE = len(KEY_PREFIX) + KEY_DIGITS
_CITIES = (b"Berlin", b"Lagos", b"Lima", b"Osaka", b"Pune", b"Quito", b"Riga", b"Tunis")
_LINE = 80
"""Bytes of a line of text, at least."""
_BATCH_ROWS = 1 << 15
_TAG_PAIR, _TAG_KEY, _TAG_VALUE = 0x12, 0x12, 0x1A  # RawScanResponse.kvs, KvPair.key, KvPair.value


Data = Literal["half", "text", "noise"]
"""Of values: half noise and half one text repeated, as `tikv_br.formats.loadgen` makes them; lines of JSON-like text; noise alone."""
KINDS: tuple[Data, ...] = ("half", "text", "noise")


@dataclass(frozen=True, slots=True)
class Dataset:
    """The first `rows` rows of `tikv_br.formats.loadgen`, keys of 16 bytes; or the same keys with other values."""

    rows: int
    value_size: int
    data: Data = "half"

    @property
    def user_bytes(self) -> int:
        """Bytes of keys and values: what every rate of the benches counts."""
        return self.rows * (KEY_SIZE + self.value_size)

    def records(self) -> pa.RecordBatch:
        """All rows in one batch of `SCHEMA`."""
        return pa.Table.from_batches(self.batches(1 << 14)).combine_chunks().to_batches()[0]

    def batches(self, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The rows, so many at a time."""
        # Of values twice as long the first half is noise.
        made = 2 * self.value_size if self.data == "noise" else self.value_size
        for batch in generate(self.rows, made, batch_rows=batch_rows):
            yield batch if self.data == "half" else columns.records(batch["key"], self._values(batch))

    def _values(self, batch: pa.RecordBatch) -> pa.LargeBinaryArray:
        if self.data == "noise":
            return _column(_table(batch["value"])[:, : self.value_size])
        return columns.from_list([_text(key, self.value_size) for key in batch["key"].to_pylist()])

    def key(self, row: int) -> bytes:
        """The key of a row."""
        return KEY_PREFIX + b"%0*d" % (KEY_DIGITS, row)

    def row_of(self, key: bytes) -> int:
        """The first row at or after a key that is some row's, with or without a zero byte behind it; ``b""`` is the start."""
        return int(key[len(KEY_PREFIX) : KEY_SIZE]) + (len(key) > KEY_SIZE) if key else 0


@dataclass(frozen=True, slots=True)
class Pages:
    """The serialized pairs of a dataset, one after the other."""

    dataset: Dataset
    _pairs: memoryview = field(init=False)
    _pair_size: int = field(init=False)

    def __post_init__(self) -> None:
        parts = [_pairs(batch) for batch in self.dataset.batches(_BATCH_ROWS)]
        object.__setattr__(self, "_pair_size", parts[0].shape[1])
        object.__setattr__(self, "_pairs", np.concatenate(parts).reshape(-1).data)

    def page(self, first: int, stop: int) -> bytes:
        """A serialized ``kvrpcpb.RawScanResponse`` of the rows [first, stop)."""
        return bytes(self._pairs[first * self._pair_size : stop * self._pair_size])


def _pairs(batch: pa.RecordBatch) -> Bytes:
    """Each row as a field of the response, shape (rows, bytes of a pair): all rows have the same sizes."""
    keys, values = (_table(batch[name]) for name in ("key", "value"))
    key_head = bytes([_TAG_KEY]) + encode_varint(keys.shape[1])
    value_head = bytes([_TAG_VALUE]) + encode_varint(values.shape[1])
    size = len(key_head) + keys.shape[1] + len(value_head) + values.shape[1]
    heads = (bytes([_TAG_PAIR]) + encode_varint(size) + key_head, value_head)
    first, second = (np.broadcast_to(columns.from_bytes(head), (batch.num_rows, len(head))) for head in heads)
    return np.concatenate([first, keys, second, values], axis=1)


def _table(column: pa.LargeBinaryArray) -> Bytes:
    """A column of rows of one size, shape (rows, size)."""
    offsets, data = columns.view(column)
    return data[offsets[0] : offsets[-1]].reshape(len(column), -1)


def _column(table: Bytes) -> pa.LargeBinaryArray:
    """The rows of a table, shape (rows, size), as a column."""
    rows, size = table.shape
    return columns.build(np.arange(rows + 1, dtype=np.int64) * size, table.reshape(-1))


def _text(key: bytes, size: int) -> bytes:
    """Rows of an application, as JSON: names that repeat, numbers that do not."""
    first = int(key[len(KEY_PREFIX) :]) * (size // _LINE + 1)
    return b"".join(_line(first + number) for number in range(size // _LINE + 1))[:size]


def _line(number: int) -> bytes:
    user, cents = number * 2_654_435_761 % 10**9, number * 40_503 % 100_000
    return b'{"id":%012d,"user":"u%09d","city":"%-6s","paid":%03d.%02d,"open":%-5s},' % (
        number,
        user,
        _CITIES[user % len(_CITIES)],
        *divmod(cents, 100),
        b"true" if user % 3 else b"false",
    )
