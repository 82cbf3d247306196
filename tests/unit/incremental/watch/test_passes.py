from __future__ import annotations

from dataclasses import replace

import pytest

from incremental.diff_mode import Pass
from incremental.watch.passes import Passes
from tikv_br.cluster.timestamp import physical_ms
from tikv_br.errors import ClusterUnreachable

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


def test_a_pass_moves_the_checkpoint_to_its_beginning() -> None:
    """Before the first nothing is known; then lag counts from the beginning of the last pass, and rows add up."""
    now = 100.0
    passes = Passes("v1", clock=lambda: now)
    assert passes()[0].trouble(300.0) == "the first pass has not ended yet"
    passes.note(FIRST)
    passes.note(SECOND)
    now = 161.0
    each = passes()[0]
    assert each.status is not None
    assert (each.name, physical_ms(each.status.checkpoint_ts), each.status.written) == ("v1", 130_000, 45)
    assert each.status.checkpoint_lag == each.status.resolved_lag == pytest.approx(31.0)
    assert (each.status.feed.regions, each.status.events_per_second) == (9, 5.0)
    assert each.trouble(30.0) == "31 s behind, which is more than 30 s"


def test_passes_that_are_broken_off_are_told() -> None:
    """Who looks on sees for how long there has been none, and why, before the first pass and after it; the next one ends that."""
    now = 100.0
    passes = Passes("v1", clock=lambda: now)
    passes.note_failure(ClusterUnreachable("store 1 is silent"))
    now = 107.0
    said = "the first pass has not ended yet, broken off again and again for 7 s: store 1 is silent"
    assert passes()[0].trouble(300.0) == said
    passes.note(FIRST)
    assert passes()[0].trouble(300.0) == ""
    passes.note_failure(ClusterUnreachable("store 2 is silent"))
    now = 110.0
    assert passes()[0].trouble(300.0) == "the sink has taken nothing for 3 s: store 2 is silent"
