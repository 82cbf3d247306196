"""Compares one range of both sides, from its checksum down to the keys that differ. A difference is narrowed by checksums of halves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.compare.report import Counts, DifferenceKind, DifferentRange, KeyDifference, Report
from tikv_br.compare.sides import ClusterSide, RangeSums, Reference, Side, sides_of
from tikv_br.formats.keys.ranges import KeyRange

if TYPE_CHECKING:
    from tikv_br.compare.rows import RowDifferences


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


RECHECKED_KEYS = 512
"""Maximum number of different keys of a small range that are read again; more are not due to concurrent writes."""


def compare_range(
    a: Reference, b: ClusterSide, span: KeyRange, *, keys: int = 0, exact: bool = False, cuts: Sequence[bytes] = ()
) -> Report:
    """Compare a range of user keys. The report lists at most ``keys`` keys.

    A is not read if its recorded checksums are B's, which is requested in parts that ``cuts`` divide. With ``exact`` all rows are
    compared, whatever the checksums are. Raises as reading A does, `ClusterError`.
    """
    report = Report()
    recorded = None if exact else a.recorded(span)
    whole = b.sums(span, cuts) if recorded else None
    if recorded and whole and whole.sums in recorded.possible(whole.first, whole.last):
        report.sums = whole.sums
        return report
    for side, part in sides_of(a, b, span):
        answer = whole if whole and part == span else b.sums(part)
        report.sums += answer.sums
        for leaf in [part] if exact else different_ranges(side, b, part, answer):
            report.add(compare_leaf(side, b, leaf, keys))
            del report.keys[keys:]
    return report


def compare_leaf(a: Side, b: ClusterSide, span: KeyRange, keys: int) -> Report:
    """Compare a range row by row, and list the first keys that differ.

    A few are read again on both sides: keys that are just changing, or about to expire, are no differences.
    """
    from tikv_br.compare.rows import compare_rows

    most = max(keys, RECHECKED_KEYS)
    counts = Counts()
    found: list[KeyDifference] = []
    for part in compare_rows(a.pages(span), b.pages(span), b.now):
        counts += Counts(len(part.only_a), len(part.only_b), len(part.value), part.expiring)
        if len(found) <= most:
            found += _first_keys(part, most + 1 - len(found))
    if counts.total <= RECHECKED_KEYS:
        found, expiring = recheck_keys(found, a, b)
        kinds = Counter(difference.kind.value for difference in found)
        counts = Counts(**kinds, expiring=counts.expiring + expiring)
    return Report(counts, [DifferentRange(span, counts)] if counts.total else [], found[:keys])


def recheck_keys(found: Sequence[KeyDifference], a: Side, b: Side) -> tuple[list[KeyDifference], int]:
    """The keys that still differ, with the seconds until they expire, and how many have expired or are about to."""
    if not found:
        return [], 0
    keys = [difference.key for difference in found]
    in_a, in_b = a.values(keys), b.values(keys)
    confirmed: list[KeyDifference] = []
    expiring = 0
    for key in keys:
        here, there = in_a.get(key), in_b.get(key)
        if here is not None and there is not None:
            confirmed += [KeyDifference(DifferenceKind.VALUE, key)] if here != there else []
            continue
        ttl = None if here is there else (a if there is None else b).ttl(key)
        if ttl is None or 0 < ttl <= CLOCK_SECONDS:
            expiring += 1
        else:
            kind = DifferenceKind.ONLY_A if there is None else DifferenceKind.ONLY_B
            confirmed.append(KeyDifference(kind, key, ttl))
    return confirmed, expiring


def _first_keys(part: RowDifferences, most: int) -> list[KeyDifference]:
    """The first keys as objects, for those that are listed or read again."""
    columns = (
        (DifferenceKind.ONLY_A, part.only_a["key"]),
        (DifferenceKind.VALUE, part.value["key"]),
        (DifferenceKind.ONLY_B, part.only_b),
    )
    found = [KeyDifference(kind, key) for kind, column in columns for key in column[:most].to_pylist()]
    return sorted(found, key=lambda difference: difference.key)[:most]
