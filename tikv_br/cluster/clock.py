"""This machine's clock, compared with PD's timestamps."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

from tikv_br.cluster.timestamps import physical_ms

QUESTIONS = 5
SUSPICIOUS_SECONDS = 1.0
STALL_SECONDS = 0.2
"""PD advances its timestamps every 50 ms, unless they are ahead of its own clock."""
CLOCK_SECONDS = 5
"""Seconds of tolerance between a store's clock and PD's; also for an expiry computed from a TTL in whole seconds."""
LEADER_SECONDS = 60.0
"""Tolerance for changes of PD's leader: each moves timestamps ahead by up to 3 s, until PD's clock catches up."""
SET_SECONDS = 1.0
"""This machine's clock was set if it has moved by more than this against the monotonic one."""


class TimestampSource(Protocol):
    """The part of `PdClient` that gives timestamps."""

    def tso(self) -> int:
        """A fresh timestamp. Raises `ClusterError`."""


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """Difference between this machine's clock and PD's timestamps."""

    ahead: float
    """Seconds that this machine is ahead of the timestamps; negative: behind."""
    stalled: bool = False
    """The timestamps stand still: changes of PD's leader have moved them ahead of PD's own clock, which catches up."""


def measure_clock(pd: TimestampSource) -> ClockDifference:
    """Compare the clocks; of some questions, the one answered soonest says most. Raises `ClusterError`."""
    questions: list[tuple[float, float]] = []
    for _ in range(QUESTIONS):
        before = time.time()
        pd_time = physical_ms(pd.tso()) / 1000
        after = time.time()
        questions.append((after - before, (before + after) / 2 - pd_time))
    ahead = min(questions)[1]
    return ClockDifference(ahead, stalled=ahead < -SUSPICIOUS_SECONDS and _stands_still(pd))


def _stands_still(pd: TimestampSource) -> bool:
    """Return whether PD's timestamps stand still or jump; they also jump while the leader changes."""
    began, first = time.monotonic(), physical_ms(pd.tso())
    time.sleep(STALL_SECONDS)
    advanced, elapsed = (physical_ms(pd.tso()) - first) / 1000, time.monotonic() - began
    return not elapsed / 2 - STALL_SECONDS / 4 < advanced < elapsed + SUSPICIOUS_SECONDS


def seconds_now(ahead: float = 0.0) -> int:
    """Return whole seconds since the epoch, by a clock that this machine's is `ahead` seconds ahead of."""
    return int(time.time() - ahead)


class ClusterClock:
    """PD's clock, by which rows expire. Thread-safe.

    The difference to this machine's clock is measured at the first use, and again if this machine's clock was set since.
    """

    def __init__(self, pd: TimestampSource) -> None:
        self._pd = pd
        self._lock = threading.Lock()
        self._ahead: float | None = None
        self._set_at = 0.0

    @property
    def ahead(self) -> float:
        """Seconds that this machine's clock is ahead of PD's; negative: behind. Raises `ClusterError` where it is measured."""
        with self._lock:
            set_at = time.time() - time.monotonic()
            if self._ahead is None or abs(set_at - self._set_at) > SET_SECONDS:
                found = measure_clock(self._pd)
                # Timestamps that stand still are not PD's time; how far they are ahead of it is not known.
                moved = found.stalled and -LEADER_SECONDS < found.ahead < 0
                self._ahead, self._set_at = 0.0 if moved else found.ahead, set_at
            return self._ahead

    def now(self) -> int:
        """PD's time in whole seconds since the epoch. Raises as `ahead`."""
        return seconds_now(self.ahead)

    def remark(self) -> str:
        """A sentence about clocks that differ; empty if comparisons allow for the difference. Raises as `ahead`."""
        ahead = self.ahead
        if abs(ahead) <= CLOCK_SECONDS:
            return ""
        seconds = round(abs(ahead))
        difference = f"{seconds // 3600} h {seconds % 3600 // 60} min" if seconds >= 3600 else f"{seconds} s"
        side = "ahead of" if ahead > 0 else "behind"
        return f"This machine's clock is {difference} {side} PD's. Expiry is judged by PD's."
