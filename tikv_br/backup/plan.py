"""The planner: from regions and their sizes to contiguous key intervals of about equal work. Pure.

An interval is cut only where a region starts, and consists of cut points alone: the intervals of a plan therefore cover
the range exactly, whatever the list of regions looks like. 100,000 regions cost one pass and one tuple an interval.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from formats.errors import DamagedBytes
from formats.keys import KeyCodec

MIB = 1 << 20
SMALLEST_TASK = 16 * MIB
LARGEST_TASK = 1024 * MIB
TASKS_PER_SLOT = 4
"""More tasks than slots, so that a slow or retried one does not hold up the end."""
REGION_OVERHEAD = 1 * MIB
"""What a region weighs at least: a request goes to each, however empty."""


class RegionSize(NamedTuple):
    """Where a region starts (physical key, ``b""`` = the very first) and its approximate bytes."""

    start: bytes
    size: int


class Interval(NamedTuple):
    """One task's part of the range: RPC keys ``[start, end)``, ``end`` ``b""`` = unbounded."""

    start: bytes
    end: bytes
    size: int
    """Approximate bytes, each region counted with at least `REGION_OVERHEAD`."""
    regions: int


def task_bytes(total_bytes: int, concurrency: int) -> int:
    """The bytes that a task should have so that ``concurrency`` slots stay busy to the end."""
    return min(max(total_bytes // (concurrency * TASKS_PER_SLOT), SMALLEST_TASK), LARGEST_TASK)


def plan_intervals(
    regions: Iterable[RegionSize], codec: KeyCodec, start: bytes, end: bytes, wanted_bytes: int
) -> list[Interval]:
    """Cut RPC range ``[start, end)`` at region starts into intervals of about ``wanted_bytes``.

    ``regions`` ascend and are those that overlap the range. A region larger than ``wanted_bytes`` stays whole. A region
    start that is no encoded key (PD can be made to split anywhere) is no place to cut, and no error.
    """
    intervals: list[Interval] = []
    opened, size, count = start, 0, 0
    for region in regions:
        weight = max(region.size, REGION_OVERHEAD)
        if count and size + weight // 2 > wanted_bytes:
            cut = cut_at(region.start, codec)
            if cut > opened and (not end or cut < end):
                intervals.append(Interval(opened, cut, size, count))
                opened, size, count = cut, 0, 0
        size += weight
        count += 1
    intervals.append(Interval(opened, end, size, count))
    return intervals


def overlapping(regions: Sequence[RegionSize], start: bytes, end: bytes) -> Sequence[RegionSize]:
    """Those of adjoining regions, in order, that overlap physical range ``[start, end)``; ``end`` ``b""`` = unbounded."""
    first = max(bisect_right(regions, start, key=lambda region: region.start) - 1, 0)
    last = bisect_left(regions, end, key=lambda region: region.start) if end else len(regions)
    return regions[first:last]


def cut_at(bound: bytes, codec: KeyCodec) -> bytes:
    """The RPC key at a region bound; ``b""``, which is above no key, where none can be told."""
    try:
        return codec.from_bound(bound)
    except DamagedBytes:
        return b""
