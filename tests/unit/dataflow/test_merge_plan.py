"""Division of keys by a merge: by the amount to read, wherever the log's files begin."""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import given

from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.plan import Engine, plan_by_sizes, spread_sizes
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.point_in_time import PointOptions, merge_output
from tikv_br.restore.options import RestoreOptions
from tikv_br.storage.url import parse
from tikv_br.tasks.executor import ExecutorOptions

keys = st.binary(max_size=2)
Part = tuple[bytes, bytes, int]


def key(number: int) -> bytes:
    """A key; numbers are in its order."""
    return b"%06d" % number


@given(st.lists(st.tuples(keys, keys, st.integers(0, 10_000))), st.sets(keys))
def test_no_byte_is_lost(parts: list[Part], cuts: set[bytes]) -> None:
    """Wherever parts begin and end, but for what the division leaves."""
    parts = [(start, last, size) for start, last, size in parts if not last or start <= last]
    sizes = spread_sizes(parts, cuts)
    assert [start for start, _ in sizes] == sorted({b"", *cuts})
    total = sum(size for _, _, size in parts)
    assert total - len(parts) * len(sizes) <= sum(size for _, size in sizes) <= total


def test_a_log_that_changes_all_keys_all_the_time_is_divided_evenly() -> None:
    """Each file of the log begins with about the first key; the intervals hold about as many bytes all the same."""
    base = [(key(first), key(first + 1000), 10_000) for first in range(0, 10_000, 1000)]
    log = [(key(number), key(9_999 - number), 10_000) for number in range(30)]
    sizes = spread_sizes(base + log, [start for start, _, _ in base])
    intervals = plan_by_sizes(KeyRange(b"", b""), sizes, 100_000)
    assert [interval.size for interval in intervals] == [80_000 + 40_000] * 3 + [40_000]
    assert [interval.span.start for interval in intervals] == [b"", key(3000), key(6000), key(9000)]


def test_a_log_without_a_base_is_divided_by_its_row_groups() -> None:
    """The base has one file."""
    groups = [(key(first), key(first + 99), 1000) for first in range(0, 10_000, 100)]
    sizes = spread_sizes([(b"", b"", 1000), *groups], [start for start, _, _ in groups[1:]])
    intervals = plan_by_sizes(KeyRange(b"", b""), sizes, 10_000)
    assert 9 <= len(intervals) <= 11
    assert all(8_000 < interval.size < 12_000 for interval in intervals[:-1])


def test_a_restore_of_many_files_at_once_merges_few_intervals_at_once() -> None:
    """Intervals are merged in memory, by this machine's processors."""
    executor = ExecutorOptions(executor="driver", concurrency=16)
    wanted = RestoreOptions(ClusterConfig(pd=("pd:2379",)), parse("/backup"), executor=executor)
    output = merge_output(PointOptions(wanted, None, 0), parse("/work"))
    assert Engine.of_tasks("merge", "", output).slots == os.cpu_count()
