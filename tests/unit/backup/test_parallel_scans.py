"""When a task's interval is scanned in several parts at once, and in which."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.backup.scan import MAX_PARALLEL_SCANS, PROBE_BYTES, ScanProbe, split_range
from tikv_br.cluster.scan import Prefetcher
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import RawPage

keys = st.binary(max_size=2)


@given(keys, keys, st.lists(keys, max_size=12), st.integers(1, 5))
def test_parts_make_up_the_range(start: bytes, end: bytes, starts: list[bytes], lanes: int) -> None:
    """They join up, are cut at region starts inside of the range alone, and are as many as wanted where there are so many."""
    starts = sorted({*starts})
    if end and start >= end:
        return
    parts = split_range(KeyRange(start, end), starts, lanes)
    inside = [key for key in starts if key > start and (not end or key < end)]
    assert len(parts) == min(lanes, len(inside) + 1)
    assert (parts[0].start, parts[-1].end) == (start, end)
    assert all(before.end == after.start and before.end in inside for before, after in pairwise(parts))


@dataclass
class Waits:
    """Time that the consumer of pages has waited for them."""

    seconds_waiting: float = 0.0


@pytest.mark.parametrize(
    ("waiting", "working", "lanes"), [(0.0, 1.0, 1), (0.9, 1.0, 1), (1.1, 1.0, 2), (2.5, 1.0, 3), (60.0, 0.0, 4)]
)
def test_as_many_lanes_as_pages_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, waiting: float, working: float, lanes: int
) -> None:
    """The small pages at the beginning do not count, and before enough of it has been copied nothing is known."""
    now = 100.0
    monkeypatch.setattr("tikv_br.backup.scan.time.perf_counter", lambda: now)
    pages = Waits()
    trial = ScanProbe(cast("Prefetcher[RawPage]", pages))
    for copied in (1000, PROBE_BYTES // 4 - 1):
        now, pages.seconds_waiting = now + 50, pages.seconds_waiting + 50
        assert trial.parallel_scans(copied) == 0
    now, pages.seconds_waiting = now + waiting + working, pages.seconds_waiting + waiting
    assert trial.parallel_scans(PROBE_BYTES - 1) == 0
    assert trial.parallel_scans(PROBE_BYTES) == lanes <= MAX_PARALLEL_SCANS
