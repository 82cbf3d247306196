"""The planner: exact cover, cuts at region starts only, balance, and size of the job."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Sequence
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.support.raw_calls import starts_of
from tikv_br.cluster.regions import RegionColumns
from tikv_br.dataflow.plan import (
    LARGEST_TASK,
    MIB,
    REGION_OVERHEAD,
    SMALLEST_TASK,
    Interval,
    plan_intervals,
    task_bytes,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, encode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange


class SizedRegion(NamedTuple):
    """A region's start as PD encodes it, and its size."""

    start: bytes
    size: int


def columns(regions: Sequence[SizedRegion]) -> RegionColumns:
    """These regions, as two pages of PD."""
    pages = (regions[: len(regions) // 2], regions[len(regions) // 2 :])
    return RegionColumns.of(([each.start for each in page], [each.size for each in page]) for page in pages)


CODECS = [KeyCodec(ApiVersion.V1), KeyCodec(ApiVersion.V1TTL), KeyCodec(ApiVersion.V2, 7)]
WANTED = 64 * MIB


def region_list(codec: KeyCodec, starts: list[bytes], sizes: list[int]) -> list[SizedRegion]:
    """The regions that PD would list: the first from the beginning of all keys, then at each RPC key."""
    bounds = [b"", *(codec.bound(codec.rpc_key(start)) for start in starts)]
    return [SizedRegion(bound, size) for bound, size in zip(bounds, sizes, strict=False)]


@st.composite
def tables(draw: st.DrawFn) -> tuple[KeyCodec, list[SizedRegion], KeyRange]:
    """A codec, its regions, and the RPC range to plan, whose ends need not be region bounds."""
    codec = draw(st.sampled_from(CODECS))
    keys = st.binary(min_size=1, max_size=20)
    starts = sorted(draw(st.sets(keys, max_size=40)))
    sizes = draw(st.lists(st.integers(0, 200 * MIB), min_size=len(starts) + 1, max_size=len(starts) + 1))
    start, end = sorted([draw(st.just(b"") | keys), draw(keys)])
    span = codec.rpc_range(KeyRange(start, draw(st.sampled_from([end, b""]))))
    return codec, region_list(codec, starts, sizes), span


@given(tables())
def test_intervals_cover_the_range_and_weigh_about_the_same(
    table: tuple[KeyCodec, list[SizedRegion], KeyRange],
) -> None:
    """They join up from start to end, and no region is cut, which would cost a second request to it.

    Only a single region can be much above the wanted size, and only where none could be added is one below it.
    """
    codec, regions, span = table
    intervals = plan_intervals(columns(regions), codec, span, WANTED)
    assert intervals[0].span.start == span.start
    assert intervals[-1].span.end == span.end
    assert all(left.span.end == right.span.start for left, right in itertools.pairwise(intervals))
    assert all(interval.span.start < interval.span.end for interval in intervals[:-1])
    assert {interval.span.start for interval in intervals[1:]} <= {codec.from_bound(region.start) for region in regions}
    largest = max(*(region.size for region in regions), REGION_OVERHEAD)
    inside = [region for region in regions if codec.from_bound(region.start) > span.start]
    if len(inside) == len(regions) - 1 and (not span.end or all(codec.from_bound(r.start) < span.end for r in regions)):
        assert all(interval.size <= WANTED + largest // 2 or interval.regions == 1 for interval in intervals)
        assert all(interval.size + largest // 2 + 1 >= WANTED or interval.regions == 1 for interval in intervals[:-1])
        assert sum(interval.regions for interval in intervals) == len(regions)


def test_a_huge_region_stays_one_task() -> None:
    """A region larger than the wanted size is neither cut nor joined with its neighbours."""
    codec = KeyCodec(ApiVersion.V1)
    regions = region_list(codec, [b"g", b"p"], [60 * MIB, 5000 * MIB, 60 * MIB])
    intervals = plan_intervals(columns(regions), codec, EVERY_KEY, WANTED)
    assert intervals == [
        Interval(KeyRange(b"", b"g"), 60 * MIB, 1),
        Interval(KeyRange(b"g", b"p"), 5000 * MIB, 1),
        Interval(KeyRange(b"p", b""), 60 * MIB, 1),
    ]


def test_a_broken_region_bound_is_no_place_to_cut() -> None:
    """PD splits at any bytes; a bound that is no encoded key is passed over, and the cover stays exact."""
    codec = KeyCodec(ApiVersion.V2)
    span = codec.rpc_range()
    regions = [
        SizedRegion(encode(span.start), 96 * MIB),
        SizedRegion(b"r\0\0\0half", 96 * MIB),
        SizedRegion(encode(b"r\0\0\0m"), 96 * MIB),
        SizedRegion(encode(b"r\0\0\0m") + bytes(8), 96 * MIB),
    ]
    cuts = [interval.span for interval in plan_intervals(columns(regions), codec, span, WANTED)]
    assert cuts == [KeyRange(span.start, b"r\0\0\0m"), KeyRange(b"r\0\0\0m", span.end)]


def test_empty_regions_share_a_task_but_not_all_of_them() -> None:
    """A region without data still costs a request, so ten thousand of them are not one task."""
    codec = KeyCodec(ApiVersion.V1)
    starts = [index.to_bytes(4, "big") for index in range(1, 10_000)]
    intervals = plan_intervals(columns(region_list(codec, starts, [0] * 10_000)), codec, EVERY_KEY, WANTED)
    assert 100 < len(intervals) < 200


@pytest.mark.parametrize(
    ("total", "concurrency", "wanted"),
    [
        (0, 2, SMALLEST_TASK),
        (8 * 100 * MIB, 2, 100 * MIB),
        (10 << 40, 64, LARGEST_TASK),
    ],
)
def test_task_size_follows_total_and_concurrency(total: int, concurrency: int, wanted: int) -> None:
    """Small backups make few tasks, large ones several a slot, and no task is too long to repeat."""
    assert task_bytes(total, concurrency) == wanted


def test_a_hundred_thousand_regions_plan_quickly_in_little_memory() -> None:
    """100,000 regions of 96 MiB take seconds and megabytes, not many minutes and gigabytes."""
    codec = KeyCodec(ApiVersion.V2, 1)
    span = codec.rpc_range()
    regions = [SizedRegion(codec.bound(span.start + index.to_bytes(4, "big")), 96 * MIB) for index in range(1, 100_001)]
    began = time.perf_counter()
    tracemalloc.start()
    intervals = plan_intervals(columns(regions), codec, span, task_bytes(100_000 * 96 * MIB, 64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.perf_counter() - began < 60
    assert peak < 64 * MIB
    assert 9_000 < len(intervals) < 11_000
    assert intervals[0].span.start == span.start
    assert intervals[-1].span.end == span.end


@given(tables(), st.binary(max_size=3), st.binary(max_size=3))
def test_regions_of_a_hole_are_those_that_overlap_it(
    table: tuple[KeyCodec, list[SizedRegion], KeyRange], one: bytes, other: bytes
) -> None:
    """As a look at each region would find; the first and the last may reach beyond it."""
    codec, regions, _span = table
    low, high = (codec.bound(codec.rpc_key(key)) for key in sorted([one, other + b"x"]))
    ends = [*(region.start for region in regions[1:]), b""]
    for end in (high, b""):
        expected = [
            region
            for region, bound in zip(regions, ends, strict=True)
            if (not bound or bound > low) and (not end or region.start < end)
        ]
        found = columns(regions).overlapping(low, end)
        assert list(zip(starts_of(found), found.sizes, strict=True)) == expected
