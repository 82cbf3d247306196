from __future__ import annotations

from dataclasses import replace

import pytest

from tikv_br.cluster.timestamps import physical_ms
from tikv_br.errors import ClusterUnreachable
from tikv_br.incremental.diff_mode import Pass
from tikv_br.incremental.watch.status import PassTracker

FIRST = Pass(
    number=1,
    exact=False,
    began_ms=100_000,
    seconds=4.0,
    ranges=8,
    changed_ranges=8,
    puts=30,
    deletes=10,
    remaining=0,
    checksum_requests=16,
    scanned_bytes=4000,
)
SECOND = replace(FIRST, number=2, began_ms=130_000, seconds=1.0, ranges=9, puts=5, deletes=0)


def test_a_pass_moves_the_checkpoint_to_its_start() -> None:
    """Before the first pass there are no figures; then lag counts from the start of the last pass, and rows add up."""
    now = 100.0
    passes = PassTracker("v1", clock=lambda: now)
    assert passes()[0].problem(300.0) == "the first pass has not finished yet"
    passes.record(FIRST)
    passes.record(SECOND)
    now += 30.0
    each = passes()[0]
    assert each.status is not None
    assert (each.name, physical_ms(each.status.checkpoint_ts), each.status.written) == ("v1", 130_000, 45)
    assert each.status.checkpoint_lag == each.status.resolved_lag == pytest.approx(31.0)
    assert (each.status.feed.regions, each.status.events_per_second) == (9, 5.0)
    assert each.problem(30.0) == "31 s behind, which is more than 30 s"


def test_failed_passes_are_reported() -> None:
    """The status has the duration and cause of failing passes, before and after the first finished one; a success clears it."""
    now = 100.0
    passes = PassTracker("v1", clock=lambda: now)
    passes.record_failure(ClusterUnreachable("store 1 is silent"))
    now = 107.0
    assert passes()[0].problem(300.0) == "the first pass has not finished yet, failing for 7 s: store 1 is silent"
    passes.record(FIRST)
    assert passes()[0].problem(300.0) == ""
    passes.record_failure(ClusterUnreachable("store 2 is silent"))
    now = 110.0
    assert passes()[0].problem(300.0) == "the sink has accepted no writes for 3 s: store 2 is silent"
