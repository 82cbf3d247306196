"""PD's time: the only module that asks this machine's clock about what comes from a cluster or a file.

`tests/unit/test_clocks.py` lists the other uses of this machine's clock, each with its reason.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from msgspec import Struct

from tikv_br.cluster.timestamps import physical_ms
from tikv_br.errors import ClusterError

if TYPE_CHECKING:
    from tikv_br.cluster.pd import PdClient

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
MEASURED_SECONDS = 600.0
"""Seconds for which a difference of clocks counts: they drift, and are corrected in small steps."""


class ClockDifference(Struct, frozen=True):
    """Difference between this machine's clock and PD's timestamps."""

    ahead: float
    """Seconds that this machine is ahead of the timestamps; negative: behind."""
    stalled: bool = False
    """The timestamps stand still: changes of PD's leader have moved them ahead of PD's own clock, which catches up."""


def measure_clock(pd: PdClient) -> ClockDifference:
    """Compare the clocks; of some questions, the one answered soonest says most. Raises `ClusterError`."""
    questions: list[tuple[float, float]] = []
    for _ in range(QUESTIONS):
        before = time.time()
        pd_time = physical_ms(pd.tso()) / 1000
        after = time.time()
        questions.append((after - before, (before + after) / 2 - pd_time))
    ahead = min(questions)[1]
    return ClockDifference(ahead, stalled=ahead < -SUSPICIOUS_SECONDS and _stands_still(pd))


def _stands_still(pd: PdClient) -> bool:
    """Return whether PD's timestamps stand still or jump; they also jump while the leader changes."""
    began, first = time.monotonic(), physical_ms(pd.tso())
    time.sleep(STALL_SECONDS)
    advanced, elapsed = (physical_ms(pd.tso()) - first) / 1000, time.monotonic() - began
    return not elapsed / 2 - STALL_SECONDS / 4 < advanced < elapsed + SUSPICIOUS_SECONDS


def seconds_now(ahead: float) -> int:
    """Return whole seconds since the epoch, by a clock that this machine's is `ahead` seconds ahead of."""
    return int(time.time() - ahead)


def no_clock() -> int:
    """Stands for PD's time where nothing that is read or written expires."""
    raise ValueError("a row expires, and no clock of a cluster was passed")


SHOWN_SECONDS = 1.0
"""Longest wait of a status for the first measurement."""


class ClusterClock:
    """PD's clock, by which rows expire. Thread-safe.

    The difference to this machine's clock is measured at the first use, again if this machine's clock was set since, and now and then.
    """

    def __init__(self, pd: PdClient) -> None:
        self._pd = pd
        self._lock = threading.Lock()
        self._ahead: float | None = None
        self._set_at = 0.0
        self._measured = 0.0

    @property
    def ahead(self) -> float:
        """Seconds that this machine's clock is ahead of PD's; negative: behind. Raises `ClusterError` if PD does not answer the first time."""
        with self._lock:
            return self._measure()

    def now(self) -> int:
        """PD's time in whole seconds since the epoch. Raises as `ahead`."""
        return seconds_now(self.ahead)

    def shown(self) -> float:
        """PD's time for a status, in seconds since the epoch; this machine's for as long as PD has never answered.

        A status must not wait for a PD that is away: a thread measures, and only the first measurement is waited for, for a second.
        """
        if self._is_outdated() and self._lock.acquire(blocking=False):
            measuring = threading.Thread(target=self._measure_and_release, name="clock", daemon=True)
            measuring.start()
            if self._ahead is None:
                measuring.join(SHOWN_SECONDS)
        return time.time() - (self._ahead or 0.0)

    def _measure_and_release(self) -> None:
        try:
            with contextlib.suppress(ClusterError):
                self._measure()
        finally:
            self._lock.release()

    def _is_outdated(self) -> bool:
        moved = time.time() - time.monotonic() - self._set_at
        return self._ahead is None or abs(moved) > SET_SECONDS or time.monotonic() - self._measured > MEASURED_SECONDS

    def _measure(self) -> float:
        now, set_at, known = time.monotonic(), time.time() - time.monotonic(), self._ahead
        if known is None:
            known = self._ask()
        elif abs(moved := set_at - self._set_at) > SET_SECONDS or now - self._measured > MEASURED_SECONDS:
            known += moved  # PD's clock has not been set: this counts while PD is silent
            with contextlib.suppress(ClusterError):
                known = self._ask()
        else:
            return known
        self._ahead, self._set_at, self._measured = known, set_at, now
        return known

    def _ask(self) -> float:
        found = measure_clock(self._pd)
        # Timestamps that stand still are not PD's time; how far they are ahead of it is not known.
        return 0.0 if found.stalled and -LEADER_SECONDS < found.ahead < 0 else found.ahead

    def remark(self) -> str:
        """A sentence about clocks that differ; empty if comparisons allow for the difference. Raises as `ahead`."""
        ahead = self.ahead
        if abs(ahead) <= CLOCK_SECONDS:
            return ""
        seconds = round(abs(ahead))
        difference = f"{seconds // 3600} h {seconds % 3600 // 60} min" if seconds >= 3600 else f"{seconds} s"
        side = "ahead of" if ahead > 0 else "behind"
        return f"This machine's clock is {difference} {side} PD's. Expiry is judged by PD's."
