"""How long to wait before the next try, and when to give up.

==================  =======  ======  ======
cause               base ms  cap ms  jitter
==================  =======  ======  ======
region miss               2     500  none
no leader yet             2     500  none
stale command             2    1000  none
not ready yet             2     500  none
store busy             2000   10000  equal
disk full               500    5000  none
recovery                100   10000  equal
witness                1000   10000  equal
store unreachable       100    2000  equal
PD                      500    3000  equal
etcd                    100    1000  equal
==================  =======  ======  ======

The wait before try n is ``min(cap, base * 2**n)``; equal jitter takes half of it and a random part of the other half.
A call's budget runs from its first failure, so that one slow request does not eat it; waits for a busy store do not
count against it, up to a budget of their own.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from tikv_br.errors import RetryBudgetExhausted

ERRORS_SHOWN = 3
MAX_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Backoff:
    """One row of the table. Times are in seconds."""

    name: str
    base: float
    cap: float
    jitter: bool = False
    busy: bool = False
    """Whether waits count against the budget for busy stores instead of the call's own."""

    def delay(self, tries: int, chance: float) -> float:
        """Seconds to wait after `tries` earlier waits of this kind; `chance` is random in [0, 1)."""
        full = min(self.cap, self.base * (1 << min(tries, MAX_DOUBLINGS)))
        return full / 2 * (1 + chance) if self.jitter else full


REGION_MISS = Backoff("region miss", 0.002, 0.5)
NO_LEADER = Backoff("no leader yet", 0.002, 0.5)
STALE_COMMAND = Backoff("stale command", 0.002, 1.0)
NOT_READY = Backoff("not ready yet", 0.002, 0.5)
STORE_BUSY = Backoff("store busy", 2.0, 10.0, jitter=True, busy=True)
DISK_FULL = Backoff("disk full", 0.5, 5.0)
RECOVERY = Backoff("recovery", 0.1, 10.0, jitter=True)
WITNESS = Backoff("witness", 1.0, 10.0, jitter=True)
STORE_UNREACHABLE = Backoff("store unreachable", 0.1, 2.0, jitter=True)
PD_TROUBLE = Backoff("PD", 0.5, 3.0, jitter=True)
ETCD_TROUBLE = Backoff("etcd", 0.1, 1.0, jitter=True)


class Backoffer:
    """Waits between the tries of one call, and ends it when the budget is spent. Used by one thread."""

    def __init__(
        self,
        what: str,
        budget: float,
        busy_budget: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`what` names the call in the message; budgets are in seconds."""
        self._what = what
        self._budget = budget
        self._busy_left = busy_budget
        self._clock, self._sleep, self._chance = clock, sleep, chance
        self._first_failure: float | None = None
        self._tries: Counter[Backoff] = Counter()
        self._seen: deque[str] = deque(maxlen=ERRORS_SHOWN)
        self._free = 0.0

    def wait(self, backoff: Backoff, cause: Exception | str, at_least: float = 0.0) -> None:
        """Sleep before the next try. Raises `RetryBudgetExhausted` when the wait would overrun the budget.

        `at_least`: seconds that the server asked for.
        """
        now = self._clock()
        if self._first_failure is None:
            self._first_failure = now
        self._remember(str(cause))
        delay = max(backoff.delay(self._tries[backoff], self._chance()), at_least)
        self._tries[backoff] += 1
        if backoff.busy and delay <= self._busy_left:
            self._busy_left -= delay
            self._free += delay
        elif now - self._first_failure - self._free + delay > self._budget:
            raise self._exhausted(now - self._first_failure)
        self._sleep(delay)

    def _remember(self, cause: str) -> None:
        if cause in self._seen:
            self._seen.remove(cause)
        self._seen.append(cause)

    def _exhausted(self, seconds: float) -> RetryBudgetExhausted:
        tries = self._tries.total()
        seen = "; ".join(
            cause for cause in self._seen if not any(cause in more for more in self._seen if more != cause)
        )
        return RetryBudgetExhausted(f"{self._what}: gave up after {seconds:.1f} s and {tries} tries: {seen}")
