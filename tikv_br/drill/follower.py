"""The follower of a drill's source: how far the target is behind, and waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tikv_br.cluster import timestamps
from tikv_br.drill.tail import Tail, TailPlan
from tikv_br.errors import CutOverFailed
from tikv_br.patience import wait_until

POLL_SECONDS = 0.1


@dataclass
class SourceFollower:
    """The tail, with how far it is behind."""

    plan: TailPlan
    tail: Tail

    def now_ts(self) -> int:
        """Return a timestamp of the source that is larger than those of all earlier writes."""
        return self.plan.clusters.get(self.plan.source).pd.tso()

    def lag(self) -> float:
        """Seconds, by the source's timestamps, that the target is behind."""
        checkpoint = self.tail.checkpoint_ts()
        return seconds_between(checkpoint, self.now_ts()) if checkpoint else float("inf")

    def catch_up(self, poll: Callable[[], None]) -> None:
        """Return when the target has all that the source has now, calling ``poll`` until then. Raises `CutOverFailed`."""
        now = self.now_ts()

        def is_reached() -> bool:
            poll()
            return self.tail.checkpoint_ts() >= now

        self.wait(is_reached, "did not reach the source's current timestamp")

    def wait(self, is_reached: Callable[[], bool], failure: str) -> None:
        """Wait for a state of the tail. Raises `CutOverFailed` when that takes too long."""
        patience = self.plan.options.patience

        def too_late() -> CutOverFailed:
            return CutOverFailed(f"the tail {failure} within {patience:g} s: it is {self.lag():.1f} s behind")

        wait_until(is_reached, patience, too_late, poll=POLL_SECONDS, check=self.plan.check_lease)


def seconds_between(earlier_ts: int, later_ts: int) -> float:
    """Return the seconds from one timestamp to a later one; 0 if it is not later."""
    return max(timestamps.physical_ms(later_ts) - timestamps.physical_ms(earlier_ts), 0) / 1000
