"""This machine's clock, compared with PD's timestamps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from tikv_br.cluster.timestamps import physical_ms

QUESTIONS = 5
SUSPICIOUS_SECONDS = 1.0
STALL_SECONDS = 0.2
"""PD advances its timestamps every 50 ms, unless they are ahead of its own clock."""


class TimestampSource(Protocol):
    """What is needed of `PdClient`."""

    def tso(self) -> int:
        """A fresh timestamp. Raises `ClusterError`."""


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """How far this machine's clock is from PD's timestamps."""

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
    """Also true if they jump because the leader changes just now."""
    began, first = time.monotonic(), physical_ms(pd.tso())
    time.sleep(STALL_SECONDS)
    advanced, elapsed = (physical_ms(pd.tso()) - first) / 1000, time.monotonic() - began
    return not elapsed / 2 - STALL_SECONDS / 4 < advanced < elapsed + SUSPICIOUS_SECONDS
