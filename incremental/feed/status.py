"""What a feed tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

WORTH_TELLING = 5.0
"""Seconds after which what goes wrong is no moment's trouble any more, such as a region that moves."""


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """How a feed is doing."""

    resolved_ts: int = 0
    regions: int = 0
    """That are subscribed to."""
    scanning: int = 0
    """Of them, those whose incremental scan has not ended: nothing of theirs is resolved yet."""
    holes: int = 0
    """Parts of the span that wait for a subscription; they hold the resolved-ts back."""
    stores: int = 0
    """With a stream."""
    rows: int = 0
    """Yielded so far."""
    late_rows: int = 0
    """Of them, how many came at or below a resolved-ts already yielded: a new leader's timestamps were older than the
    hold-back allows for."""
    queued_bytes: int = 0
    """Of messages that wait for the consumer."""
    errors: dict[str, int] = field(default_factory=dict)
    """How often each kind of error was met; each was followed by another try."""
    failing_seconds: float = 0.0
    """For how long some part of the span has not been followed, whatever was tried; 0 while all is."""
    last_error: str = ""
    """Why the last try of any part failed."""

    @property
    def trouble(self) -> str:
        """What is wrong for longer than a moment, in one line; empty if nothing is."""
        if self.failing_seconds < WORTH_TELLING:
            return ""
        return f"part of the source has not been followed for {self.failing_seconds:.0f} s: {self.last_error}"
