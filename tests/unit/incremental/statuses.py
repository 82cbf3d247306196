"""Statuses of syncs that never ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tikv_br.incremental.feed.events import FeedStatus
from tikv_br.incremental.status import SyncStatus

SAMPLE = SyncStatus(
    checkpoint_ts=470_623_261_766_451_301,
    resolved_ts=470_623_262_028_595_301,
    checkpoint_lag=3.0,
    resolved_lag=2.0,
    write_lag=0.7,
    events=4000,
    written=3000,
    events_per_second=2000.0,
    sorter_memory_bytes=1 << 20,
    sorter_disk_bytes=2 << 20,
    late_rows=0,
    sink_failures=2,
    sink_failing_seconds=0.0,
    sink_rate_limit=0,
    sink_limited_share=0.0,
    last_error="store 4 went away",
    pd_silent_seconds=0.0,
    feed=FeedStatus(
        regions=50, scanning=2, holes=1, stores=3, rows=4000, queued_bytes=10, errors={"not_leader": 3, "stalled": 1}
    ),
)


WHOLE = replace(SAMPLE.feed, scanning=0, holes=0)
"""Status of a feed without gaps."""


def status(**changes: Any) -> SyncStatus:  # noqa: ANN401 - the fields' own types
    """A sync that does well, but for what is said."""
    return replace(SAMPLE, **changes)
