"""Which parts of a span are subscribed to and how far each has come, with no I/O: the part that must have no hole.

The span is at all times cut into pieces that touch and do not overlap. A piece is a region's subscription or a hole, and
either has a resolved-ts: all changes of its keys up to there have been delivered. A region has one subscription, for all
of its keys in the span, which starts from the least of what its keys have reached. So the span's resolved-ts, the
minimum over all pieces, holes among them, never claims what was not delivered, and never moves back.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

HOLE = 0
"""The request id of a piece that is not subscribed to."""


@dataclass(slots=True, eq=False)
class Piece:
    """Physical keys [start, end) of the span: MCE coded in API V2, as in region bounds and in requests."""

    start: bytes
    end: bytes
    resolved: int
    region_id: int = 0
    version: int = 0
    """Of the region's epoch; every split and merge raises it in all regions that come out of it."""
    request_id: int = HOLE
    tries: int = 0
    """Failures in a row of all that has been tried for these keys."""
    due: float = 0.0
    """When a hole may be tried again, on the clock of whoever sets it."""
    failing_since: float | None = None
    """When these keys began to fail; None while all is well."""

    @property
    def is_hole(self) -> bool:
        """Whether nobody delivers the changes of these keys."""
        return self.request_id == HOLE


@dataclass(frozen=True, slots=True)
class Claim:
    """A new subscription, and the ones that it replaces."""

    piece: Piece
    replaced: tuple[tuple[int, int], ...]
    """(region id, request id) of subscriptions that are stale now."""


class Coverage:
    """The pieces of one span. For one thread."""

    def __init__(self, start: bytes, end: bytes, start_ts: int) -> None:
        """All of [start, end), which must not be empty and has an end, is one hole that has reached `start_ts`."""
        if not start < end:
            raise ValueError(f"the span [{start.hex()}, {end.hex()}) is empty")
        self._pieces = [Piece(start, end, start_ts)]

    def __iter__(self) -> Iterator[Piece]:
        return iter(tuple(self._pieces))

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def start(self) -> bytes:
        """Where the span begins."""
        return self._pieces[0].start

    @property
    def end(self) -> bytes:
        """Where the span ends."""
        return self._pieces[-1].end

    @property
    def resolved(self) -> int:
        """All changes of the span up to here have been delivered."""
        return min(piece.resolved for piece in self._pieces)

    @property
    def holes(self) -> list[Piece]:
        """The pieces that nobody delivers, in order."""
        return [piece for piece in self._pieces if piece.is_hole]

    def claim(self, start: bytes, end: bytes, *, region_id: int, version: int, request_id: int) -> Claim | None:
        """Make a region that is said to hold the keys [start, end), an empty end being none, one piece of the span.

        Nothing happens (None) when it has no hole to fill, or when a subscription of a newer region speaks against it:
        then what was said is out of date. Subscriptions of older regions that it overlaps are replaced, and what they
        held beyond it becomes a hole.
        """
        start, end = max(start, self.start), min(end or self.end, self.end)
        if not start < end:
            return None
        first = bisect.bisect_right(self._pieces, start, key=lambda piece: piece.start) - 1
        stop = bisect.bisect_left(self._pieces, end, key=lambda piece: piece.start)
        met = self._pieces[first:stop]
        if not any(piece.is_hole for piece in met) or any(
            piece.version > version for piece in met if not piece.is_hole
        ):
            return None
        replaced = tuple((piece.region_id, piece.request_id) for piece in met if not piece.is_hole)
        since = [piece.failing_since for piece in met if piece.failing_since is not None]
        new = Piece(
            start,
            end,
            min(piece.resolved for piece in met),
            region_id,
            version,
            request_id,
            tries=max(piece.tries for piece in met),
            failing_since=min(since, default=None),
        )
        self._pieces[first:stop] = [*_rest(met[0], met[0].start, start), new, *_rest(met[-1], end, met[-1].end)]
        return Claim(new, replaced)

    def advance(self, piece: Piece, ts: int) -> None:
        """All changes of a piece's keys up to `ts` have been delivered; an older ts changes nothing."""
        piece.resolved = max(piece.resolved, ts)

    def lose(self, piece: Piece) -> None:
        """The subscription has ended: its keys are a hole, which goes on from where it was."""
        piece.request_id = HOLE


def _rest(piece: Piece, start: bytes, end: bytes) -> list[Piece]:
    """What is left of a piece that is cut, as a hole; nothing when that is empty."""
    if start >= end:
        return []
    return [Piece(start, end, piece.resolved, tries=piece.tries, failing_since=piece.failing_since)]
