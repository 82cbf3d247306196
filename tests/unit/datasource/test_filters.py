"""Filters that are pushed down, against what they say of each key."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pyarrow as pa
import pytest
from pyspark.sql import datasource as api

from tikv_br.datasource import rows
from tikv_br.datasource.rows import MAX_POINTS, push_filters, spark_batches, spark_schema
from tikv_br.formats import columns
from tikv_br.formats.keys.ranges import KeyRange

KEYS = [b"", b"\0", b"a", b"a\0", b"aa", b"b", b"\xff", b"\xff\xff"]
SOME_KEY = st.sampled_from(KEYS)
COMPARISONS: dict[type[Any], Callable[[bytes, bytes], bool]] = {
    api.EqualTo: operator.eq,
    api.EqualNullSafe: operator.eq,
    api.GreaterThan: operator.gt,
    api.GreaterThanOrEqual: operator.ge,
    api.LessThan: operator.lt,
    api.LessThanOrEqual: operator.le,
}
FILTERS = st.one_of(
    st.builds(lambda kind, key: kind(("key",), key), st.sampled_from(list(COMPARISONS)), SOME_KEY),
    st.builds(lambda keys: api.In(("key",), tuple(keys)), st.lists(SOME_KEY, min_size=1)),
    st.just(api.IsNotNull(("key",))),
)


def holds(wanted: Any, key: bytes) -> bool:  # noqa: ANN401 - any filter
    """Whether a filter holds for a key, by Python's own comparison of bytes."""
    if isinstance(wanted, api.In):
        return key in wanted.value
    return isinstance(wanted, api.IsNotNull) or COMPARISONS[type(wanted)](key, wanted.value)


@hypothesis.given(st.lists(FILTERS, max_size=4))
def test_ranges_are_exact(filters: list[Any]) -> None:
    """Nothing is left to Spark, so that a key is in the ranges if and only if all filters hold; ranges ascend."""
    ranges, left = push_filters(filters, [KeyRange(b"", b"")])
    assert left == []
    assert list(ranges) == sorted(ranges)
    for key in KEYS:
        inside = sum(each.start <= key and (not each.end or key < each.end) for each in ranges)
        assert inside == all(holds(each, key) for each in filters), key


def test_other_filters_are_left_to_spark() -> None:
    """Filters of other columns and kinds, and lists too long for one request per key."""
    filters = [
        api.EqualTo(("value",), b"a"),
        api.Not(api.EqualTo(("key",), b"a")),
        api.StringStartsWith(("key",), "a"),
        api.EqualTo(("key",), "a"),
        api.In(("key",), tuple(b"%d" % number for number in range(MAX_POINTS + 1))),
    ]
    assert push_filters(filters, [KeyRange(b"b", b"c")]) == ((KeyRange(b"b", b"c"),), filters)


def test_batches_have_sparks_types() -> None:
    """Columns of any offset within their memory; an expiry beyond the range of a long is its largest value."""
    records = columns.records(
        columns.from_list([b"a", b"bb", b""]),
        columns.from_list([b"", b"x" * 10, b"y"]),
        expire_ts=columns.numbers(pa.array([0, 5, 2**64 - 1], pa.uint64())),
    )
    (batch,) = spark_batches(records.slice(1), spark_schema("expire_ts"))
    assert batch.schema.types == [pa.binary(), pa.binary(), pa.int64()]
    assert batch.to_pydict() == {"key": [b"bb", b""], "value": [b"x" * 10, b"y"], "expire_ts": [5, 2**63 - 1]}
    assert list(spark_batches(records.slice(0, 0), spark_schema())) == []


def test_large_batches_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch comes near the 2 GiB at which 32-bit offsets end; one row may be larger than the limit."""
    monkeypatch.setattr(rows, "MAX_BATCH_BYTES", 1000)
    values = [b"v" * size for size in (10, 400, 5000, 0, 300, 300)]
    keys = [b"%d" % number for number in range(len(values))]
    batches = list(spark_batches(columns.records(columns.from_list(keys), columns.from_list(values)), spark_schema()))
    assert [row for batch in batches for row in batch["value"].to_pylist()] == values
    assert [row for batch in batches for row in batch["key"].to_pylist()] == keys
    assert all(batch.nbytes <= 1000 or batch.num_rows == 1 for batch in batches)
