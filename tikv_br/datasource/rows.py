"""Selection of keys by options and filters, and the form of rows in Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructField, StructType

from tikv_br.errors import UsageError
from tikv_br.formats import columns
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.load.loader import to_records

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

KEY = ("key",)
"""The column of keys, as filters name it."""
MAX_POINTS = 100
"""Keys of an ``IN`` that are read one by one; a longer list is left to Spark."""
MAX_BATCH_BYTES = 256 << 20
"""A column of Spark's Arrow batches cannot have 2 GiB."""
_MAX_LONG = np.uint64(2**63 - 1)

TYPES: dict[str, DataType] = {
    "op": StringType(),
    "key": BinaryType(),
    "value": BinaryType(),
    "expire_ts": LongType(),
    "ts": LongType(),
}
"""All columns that a source can have. ``op`` is the operation of a change; ``expire_ts`` is in seconds since the epoch, 0 = never; ``ts`` a TSO."""
CHANGES = StructType(
    [StructField(name, TYPES[name], name == "value") for name in ("op", "key", "value", "expire_ts", "ts")]
)
"""Columns of a change stream."""
PUT, DELETE = "put", "delete"
_ARROW_TYPES = {"op": pa.string(), "key": pa.binary(), "value": pa.binary(), "expire_ts": pa.int64(), "ts": pa.int64()}


def spark_schema(*extra: str) -> StructType:
    """``key``, ``value`` and further columns of `TYPES`; none has nulls."""
    return StructType([StructField(name, TYPES[name], nullable=False) for name in ("key", "value", *extra)])


def check_schema(given: StructType, own: StructType) -> None:
    """Raise `UsageError` for a schema of the user's that is not the source's; nulls may be allowed or not."""
    if [(field.name, field.dataType) for field in given] != [(field.name, field.dataType) for field in own]:
        raise UsageError(
            f"the schema must be {own.simpleString()}, not {given.simpleString()}",
            hint="Leave .schema(…) out, and select columns afterwards.",
        )


def spark_batches(rows: pa.RecordBatch, schema: StructType) -> Iterator[pa.RecordBatch]:
    """The columns of ``schema`` of a batch of `tikv_br.formats.columns.SCHEMA`, in Spark's types; nothing for no rows."""
    if rows.num_rows > 1 and rows.nbytes > MAX_BATCH_BYTES:
        half = rows.num_rows // 2
        yield from spark_batches(rows.slice(0, half), schema)
        yield from spark_batches(rows.slice(half), schema)
    elif rows.num_rows:
        fields = [pa.field(field.name, _ARROW_TYPES[field.name], field.nullable) for field in schema]
        yield pa.RecordBatch.from_arrays(
            [_column(rows, field.name, schema) for field in fields], schema=pa.schema(fields)
        )


def _column(rows: pa.RecordBatch, name: str, schema: StructType) -> pa.Array:
    if name == "op":
        return pc.if_else(rows["deleted"], DELETE, PUT)
    array = _spark_array(rows[name])
    if name == "value" and "op" in schema.names:
        return pc.if_else(rows["deleted"], pa.scalar(None, array.type), array)
    return array


def _spark_array(array: pa.Array) -> pa.Array:
    if array.type == pa.uint64():
        return pa.array(np.minimum(columns.numbers(array), _MAX_LONG).astype(np.int64))
    offsets, data = columns.view(array)
    begin, end = int(offsets[0]), int(offsets[-1])
    buffers = [None, pa.py_buffer((offsets - begin).astype(np.int32)), pa.py_buffer(data[begin:end])]
    return pa.Array.from_buffers(pa.binary(), len(array), buffers, null_count=0)


def push_filters(filters: Iterable[Filter], ranges: Sequence[KeyRange]) -> tuple[tuple[KeyRange, ...], list[Filter]]:
    """The user keys of ``ranges`` for which the filters hold, ascending, and the filters that are left to Spark."""
    kept = tuple(ranges)
    left: list[Filter] = []
    for each in filters:
        wanted = filter_ranges(each)
        if wanted is None:
            left.append(each)
        else:
            kept = intersections(kept, wanted)
    return kept, left


class FilterPushdown:
    """Makes a reader read only keys for which Spark's filters hold. Needs ``spark.sql.python.filterPushdown.enabled``."""

    ranges: tuple[KeyRange, ...]

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802 - Spark's name
        """Narrow the ranges; returns the filters that are left to Spark."""
        self.ranges, left = push_filters(filters, self.ranges)
        return left


def intersections(some: Iterable[KeyRange], others: Sequence[KeyRange]) -> tuple[KeyRange, ...]:
    """Return the intersection of two lists of ranges; the ranges of each list ascend and do not overlap."""
    common = (intersection(one, other) for one in some for other in others)
    return tuple(part for part in common if not part.is_empty)


def filter_ranges(wanted: Filter) -> list[KeyRange] | None:
    """The user keys for which a filter holds; None for one that is not about the key, or not about ranges of it."""
    from pyspark.sql import datasource as api  # PySpark 4.0 has no filters: it never gets here

    if getattr(wanted, "attribute", None) != KEY:
        return None
    found: list[KeyRange] | None = None
    match wanted:
        case api.IsNotNull():
            found = [KeyRange(b"", b"")]
        case api.In() if 0 < len(wanted.value) <= MAX_POINTS and all(map(_is_key, wanted.value)):
            found = [_point(key) for key in sorted({bytes(key) for key in wanted.value})]
        case api.EqualTo() | api.EqualNullSafe() if _is_key(wanted.value):
            found = [_point(bytes(wanted.value))]
        case api.GreaterThan() if _is_key(wanted.value):
            found = [KeyRange(bytes(wanted.value) + b"\0", b"")]
        case api.GreaterThanOrEqual() if _is_key(wanted.value):
            found = [KeyRange(bytes(wanted.value), b"")]
        case api.LessThan() if _is_key(wanted.value):
            found = [KeyRange(b"", bytes(wanted.value))] if wanted.value else []
        case api.LessThanOrEqual() if _is_key(wanted.value):
            found = [KeyRange(b"", bytes(wanted.value) + b"\0")]
    return found


def _is_key(value: object) -> bool:
    return isinstance(value, (bytes, bytearray))


def _point(key: bytes) -> KeyRange:
    return KeyRange(key, key + b"\0")


def written_rows(batches: Iterator[pa.RecordBatch], now: Callable[[], int]) -> Iterator[pa.RecordBatch]:
    """Convert Spark's rows to `tikv_br.formats.columns.SCHEMA`.

    TTLs count from ``now``. Raises `UsageError` for nulls and negative TTLs.
    """
    for batch in batches:
        try:
            yield to_records(batch, now)
        except (pa.ArrowException, FormatError) as error:
            raise UsageError(
                f"cannot write these rows: {error}", hint="Keys and values must not be null, and TTLs not negative."
            ) from None
