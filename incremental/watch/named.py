"""The statuses of all syncs of a process, and when one of them is worth an alarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from incremental.replicate import SyncStatus


@dataclass(frozen=True, slots=True)
class NamedStatus:
    """How one sync of this process is doing."""

    name: str
    status: SyncStatus | None
    """None until it has begun."""
    error: str = ""
    """Why it does not run any more."""

    def trouble(self, max_lag: float) -> str:
        """What is wrong, in one line; empty if it runs, the sink takes changes, and it is at most `max_lag` seconds behind."""
        if self.error:
            return self.error
        if self.status is None:
            return "has not begun yet"
        if self.status.sink_failing_seconds:
            return f"the sink has taken nothing for {self.status.sink_failing_seconds:.0f} s: {self.status.last_error}"
        lag, feed = self.status.checkpoint_lag, self.status.feed.trouble
        if lag <= max_lag:
            return ""
        return f"{lag:.0f} s behind, which is more than {max_lag:g} s" + (f": {feed}" if feed else "")


Watched = Callable[[], Sequence[NamedStatus]]
"""All syncs of a process, as they are now; may be called from any thread, and raises nothing."""
