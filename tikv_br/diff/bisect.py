"""From a range whose sums differ to the small ranges that make the difference. Pure: it only asks the sides."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

from formats.checksum import Checksum
from tikv_br.diff.values import Span

LEAF_ROWS = 4096
LEAF_BYTES = 4 << 20
"""A range of no more than this is scanned: finding out more by checksums would take longer."""
HOPELESS = 3
"""After so many cuts in a row whose halves both differ, differences are everywhere: the range is scanned as a whole."""


class Answer(NamedTuple):
    """What a cluster said of a range, and between which seconds by the stores' clocks."""

    sums: Checksum
    first: int
    last: int


class Reference(Protocol):
    """A: what should be."""

    def possible(self, span: Span, answer: Answer) -> Collection[Checksum]:
        """What B may answer if it holds the same: one sum, or one for each second in which rows expire."""

    def middle(self, span: Span) -> bytes | None:
        """A key that cuts the rows of a range into two parts, neither empty; None when it has fewer than two."""


class Target(Protocol):
    """B: what is compared."""

    def sums(self, span: Span) -> Answer:
        """What the stores say."""

    def middle(self, span: Span) -> bytes | None:
        """As of `Reference`."""


class _Seen(NamedTuple):
    span: Span
    equal: bool
    a_rows: int
    b_rows: int
    size: int
    """The larger of both sides, in bytes."""

    @property
    def small(self) -> bool:
        return max(self.a_rows, self.b_rows) <= LEAF_ROWS and self.size <= LEAF_BYTES


def differing(a: Reference, b: Target, span: Span, answer: Answer | None = None) -> Iterator[Span]:
    """The ranges in which something differs, by ascending key: small ones, or larger ones full of differences.

    ``answer`` is B's for the whole range, if it was asked already. Nothing is found where both change to the same
    while this looks.
    """
    seen = _look(a, b, span, answer)
    if not seen.equal:
        yield from _narrow(a, b, seen, 0)


def _narrow(a: Reference, b: Target, seen: _Seen, streak: int) -> Iterator[Span]:
    span = seen.span
    larger: Reference | Target = a if seen.a_rows >= seen.b_rows else b
    middle = None if seen.small or streak >= HOPELESS else larger.middle(span)
    if middle is None:
        yield span
        return
    halves = (_look(a, b, Span(span.start, middle)), _look(a, b, Span(middle, span.end)))
    differ = [half for half in halves if not half.equal]
    for half in differ:
        yield from _narrow(a, b, half, streak + 1 if len(differ) == len(halves) else 0)


def _look(a: Reference, b: Target, span: Span, known: Answer | None = None) -> _Seen:
    answer = known or b.sums(span)
    possible = a.possible(span, answer)
    there = answer.sums
    most = max(possible, key=lambda sums: sums.total_kvs)
    size = max(most.total_bytes, there.total_bytes)
    return _Seen(span, there in possible, most.total_kvs, there.total_kvs, size)
