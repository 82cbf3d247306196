"""What a user may set of a feed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """All times are in seconds."""

    hold_back: float = 3.0
    """How far every resolved-ts is taken back: a new leader's first changes may be that much older than what the leader
    before it has called resolved (three seconds with a store's defaults). 0 loses changes when leaders move."""
    queue_bytes: int = 64 << 20
    """Messages that wait for the consumer; beyond it nothing is read, and the stores wait."""
    patience: float = 600.0
    """How long a region may fail in a row before the feed gives up."""
    stall: float = 300.0
    """A region whose resolved-ts stands still for so long is subscribed to anew."""
    scan_stall: float = 1800.0
    """A region whose incremental scan has not ended is subscribed to anew when its store has ended no scan at all for so
    long; in a queue of scans each waits for those before it."""
