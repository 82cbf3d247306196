"""The status of a feed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

REPORT_SECONDS = 5.0
"""Failures that last longer than this many seconds are reported; a leader transfer takes less."""
STALLED_SECONDS = 10.0
"""Seconds without a new resolved-ts after which a region counts as stalled; stores send one about every second."""


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """The status of a feed."""

    resolved_ts: int = 0
    regions: int = 0
    """Number of subscribed regions."""
    scanning: int = 0
    """Subscribed regions whose incremental scan has not ended; they have no resolved-ts yet."""
    stalled: int = 0
    """Scanned regions without a new resolved-ts for 10 s."""
    holes: int = 0
    """Gaps: parts of the range without a subscription. While there is one, resolved-ts does not advance."""
    stores: int = 0
    """Stores with an open stream."""
    rows: int = 0
    """Rows yielded so far."""
    late_rows: int = 0
    """Rows at or below a resolved-ts already yielded: a new leader's timestamps were older than the hold-back covers."""
    queued_bytes: int = 0
    """Size of received messages that have not been processed."""
    errors: dict[str, int] = field(default_factory=dict)
    """Number of errors by kind; each was retried."""
    failing_seconds: float = 0.0
    """Seconds for which some part of the range has failed continuously; 0 if none fails."""
    last_error: str = ""
    """The last error of any part."""
    waits_for: str = ""
    """The unfinished ingests that resolved-ts waits for, or why announcements of ingests cannot be read."""

    @property
    def gaps(self) -> Iterator[str]:
        """Yield why resolved-ts does not advance: unsubscribed, scanning and stalled parts, one line each."""
        if self.holes:
            yield f"parts of the range without a subscription: {self.holes}"
        if self.scanning:
            yield f"regions whose incremental scan has not ended: {self.scanning}"
        if self.stalled:
            yield f"regions without a new resolved-ts for {STALLED_SECONDS:.0f} s: {self.stalled}"
        if self.waits_for:
            yield f"waits for {self.waits_for}"

    @property
    def problem(self) -> str:
        """Failures that have lasted longer than `REPORT_SECONDS`, in one line; empty if there are none."""
        if self.failing_seconds < REPORT_SECONDS:
            return ""
        return f"part of the source has had no subscription for {self.failing_seconds:.0f} s: {self.last_error}"
