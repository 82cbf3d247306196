"""The resolved-ts of a range of keys, computed from subscriptions and gaps. No I/O.

The range is always divided into adjacent spans that do not overlap. Each span is either the subscription of one region or a
gap, and has a resolved-ts: all changes of its keys up to it have been delivered. A region has one subscription for all of
its keys in the range, which starts from the lowest resolved-ts of these keys. The resolved-ts of the range is the minimum
over all spans, including gaps. So it never covers a change that was not delivered. It moves back only for a new scan (`rewind`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from tikv_br.formats.keys.text import show_key

GAP = 0
"""The request id of a span without a subscription."""


@dataclass(slots=True, eq=False)
class RegionSpan:
    """A part of the range: encoded keys [start, end), as in region bounds and in requests."""

    start: bytes
    end: bytes
    resolved_ts: int
    region_id: int = 0
    version: int = 0
    """Version of the region's epoch; a split or merge raises it in all resulting regions."""
    request_id: int = GAP
    tries: int = 0
    """Number of consecutive failures."""
    retry_at: float = 0.0
    """Time to locate the region of a gap again, on the monotonic clock; infinite while a search is running."""
    failing_since: float | None = None
    """Start of the failures, on the monotonic clock; None while there are none."""

    @property
    def is_gap(self) -> bool:
        return self.request_id == GAP


@dataclass(frozen=True, slots=True)
class Claim:
    """The span of a new subscription, and the subscriptions that it replaces."""

    span: RegionSpan
    replaced: tuple[tuple[int, int], ...]
    """(region id, request id) of each."""


class ResolvedFrontier:
    """The spans of one range. Not thread-safe."""

    def __init__(self, start: bytes, end: bytes, start_ts: int) -> None:
        """Start with one gap [start, end), resolved up to `start_ts`. The range must have an end and must not be empty."""
        if not start < end:
            raise ValueError(f"the range [{show_key(start)}, {show_key(end)}) is empty")
        self._spans = [RegionSpan(start, end, start_ts)]

    def __iter__(self) -> Iterator[RegionSpan]:
        return iter(tuple(self._spans))

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def start(self) -> bytes:
        return self._spans[0].start

    @property
    def end(self) -> bytes:
        return self._spans[-1].end

    @property
    def resolved_ts(self) -> int:
        """All changes of the range up to this have been delivered."""
        return min(span.resolved_ts for span in self._spans)

    @property
    def gaps(self) -> list[RegionSpan]:
        return [span for span in self._spans if span.is_gap]

    def claim(self, start: bytes, end: bytes, *, region_id: int, version: int, request_id: int) -> Claim | None:
        """Make the keys [start, end) of a region one subscribed span; an empty end is unbounded.

        Returns None and changes nothing if the region overlaps no gap, or overlaps the subscription of a region with a
        newer version: then the region is out of date. Subscriptions of older regions that it overlaps are replaced, and
        their keys outside of it become gaps.
        """
        start, end = max(start, self.start), min(end or self.end, self.end)
        if not start < end:
            return None
        first = bisect.bisect_right(self._spans, start, key=lambda span: span.start) - 1
        stop = bisect.bisect_left(self._spans, end, key=lambda span: span.start)
        old = self._spans[first:stop]
        if not any(span.is_gap for span in old) or any(span.version > version for span in old if not span.is_gap):
            return None
        replaced = tuple((span.region_id, span.request_id) for span in old if not span.is_gap)
        since = [span.failing_since for span in old if span.failing_since is not None]
        new = RegionSpan(
            start,
            end,
            min(span.resolved_ts for span in old),
            region_id,
            version,
            request_id,
            tries=max(span.tries for span in old),
            failing_since=min(since, default=None),
        )
        self._spans[first:stop] = [
            *_remainder(old[0], old[0].start, start),
            new,
            *_remainder(old[-1], end, old[-1].end),
        ]
        return Claim(new, replaced)

    def advance(self, span: RegionSpan, ts: int) -> None:
        """Set the resolved-ts of a span; an older `ts` has no effect."""
        span.resolved_ts = max(span.resolved_ts, ts)

    def rewind(self, start: bytes, end: bytes, ts: int) -> list[RegionSpan]:
        """Set the resolved-ts of all spans that overlap [start, end) back to `ts`, if it is newer; returns them. An empty end is unbounded."""
        found = [span for span in self._spans if span.end > start and (not end or span.start < end)]
        for span in found:
            span.resolved_ts = min(span.resolved_ts, ts)
        return found

    def mark_gap(self, span: RegionSpan) -> None:
        """Turn a span whose subscription has ended into a gap, which keeps its resolved-ts."""
        span.request_id = GAP


def _remainder(span: RegionSpan, start: bytes, end: bytes) -> list[RegionSpan]:
    """The part [start, end) of a span as a gap; no span if it is empty."""
    if start >= end:
        return []
    return [RegionSpan(start, end, span.resolved_ts, tries=span.tries, failing_since=span.failing_since)]
