"""Options of a feed."""

from __future__ import annotations

from dataclasses import dataclass

from tikv_br.cluster.cluster import Cluster
from tikv_br.errors import UsageError


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """All times are in seconds."""

    hold_back: float | None = None
    """Argument of `hold_back_for`."""
    queue_bytes: int = 64 << 20
    """Size of the queue of received messages. When it is full, streams are not read, and stores wait."""
    patience: float = 600.0
    """Seconds for which a region may fail continuously before the feed fails."""
    stall: float = 300.0
    """Resubscribe a region whose resolved-ts has not advanced for this long."""
    scan_stall: float = 1800.0
    """Resubscribe a region whose incremental scan has not ended if its store has ended no scan for this long: stores run
    scans one after the other."""


HOLD_BACK_SECONDS = 3.0
"""The least default of the hold-back."""


def hold_back_for(cluster: Cluster, wanted: float | None) -> float:
    """Seconds to subtract from every resolved-ts; None = as many as the settings of the stores need.

    The first changes after a leader transfer may be older than the previous leader's resolved-ts, by as much as stores use
    timestamps that they have cached. 0 loses changes when leaders move. Raises `UsageError` for other values below that age.
    """
    age = cluster.timestamp_age if wanted != 0 else 0.0
    if wanted is None:
        return max(HOLD_BACK_SECONDS, age)
    if wanted < age:
        raise UsageError(
            f"a hold-back of {wanted:g} s is too short: stores use timestamps up to {age:g} s old "
            "(causal-ts.alloc-ahead-buffer), so a new leader's changes may be that late, and would be lost",
            hint=f"Leave out --hold-back, or pass {age:g}s or more; `changefeed update` changes it for a changefeed. "
            "0s turns it off, which loses changes when leaders move.",
        )
    return wanted
