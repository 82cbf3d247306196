"""Narrows a difference by checksums of halves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.compare.sums import RangeSums
from tikv_br.formats.keys.ranges import KeyRange

if TYPE_CHECKING:
    from tikv_br.compare.sides import ClusterSide, Side

LEAF_ROWS = 4096
LEAF_BYTES = 4 << 20
"""A range up to this size is scanned: more checksums would take longer."""
MAX_FRUITLESS_SPLITS = 3
"""Number of successive splits whose halves both differ after which the range is scanned as a whole."""


class _ComparedRange(NamedTuple):
    span: KeyRange
    equal: bool
    a_rows: int
    b_rows: int
    size: int
    """The larger of both sides, in bytes."""

    @property
    def small(self) -> bool:
        return max(self.a_rows, self.b_rows) <= LEAF_ROWS and self.size <= LEAF_BYTES


def different_ranges(a: Side, b: ClusterSide, span: KeyRange, answer: RangeSums) -> Iterator[KeyRange]:
    """The ranges in which something differs, by ascending key: small ones, or larger ones full of differences.

    ``answer`` is B's for the whole range. Ranges where both sides change to the same rows in between are not found.
    """
    compared = _compare_sums(a, span, answer)
    if not compared.equal:
        yield from _narrow(a, b, compared, 0)


def _narrow(a: Side, b: ClusterSide, compared: _ComparedRange, streak: int) -> Iterator[KeyRange]:
    span = compared.span
    larger: Side = a if compared.a_rows >= compared.b_rows else b
    middle = None if compared.small or streak >= MAX_FRUITLESS_SPLITS else larger.middle(span)
    if middle is None:
        yield span
        return
    spans = KeyRange(span.start, middle), KeyRange(middle, span.end)
    halves = [_compare_sums(a, half, b.sums(half)) for half in spans]
    differ = [half for half in halves if not half.equal]
    for half in differ:
        yield from _narrow(a, b, half, streak + 1 if len(differ) == len(halves) else 0)


def _compare_sums(a: Side, span: KeyRange, answer: RangeSums) -> _ComparedRange:
    possible, there = a.possible(span, answer), answer.sums
    most = max(possible, key=lambda sums: sums.total_kvs)
    size = max(most.total_bytes, there.total_bytes)
    return _ComparedRange(span, there in possible, most.total_kvs, there.total_kvs, size)
