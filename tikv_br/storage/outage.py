"""Availability of a storage location: one record per process and location, which all requests to it share.

An outage begins with the last answer before the first failed request and ends with the next answer to anybody. While it
lasts, one thread sends probes, with pauses, and all others wait for its result; the last probe is sent when the
patience ends. From then on every request fails at once, so that clean-up does not wait again.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from functools import partial

from tikv_br import cancellation
from tikv_br.errors import StorageUnreachable, TikvBrError
from tikv_br.retry import STORAGE_UNREACHABLE, Outage, RetryPolicy

PATIENCE_SECONDS = 60.0
"""Default of `--storage-patience`: how long a location that has answered before may be unavailable."""
FIRST_CONTACT_TRIES = 2
"""Maximum tries for a location that has never answered: its address may be wrong."""
HOLD_SECONDS = 3.0
"""Seconds after the patience for which requests fail without asking the location again."""
_CHECK_SECONDS = 0.2
"""Interval of checks for cancellation by a thread that waits for another one's probe."""

_HINT = "Check the storage and the network, then run the same command again; increase --storage-patience to wait out longer outages."

Key = tuple[str, str]
"""Endpoint and bucket."""


class StorageAway(StorageUnreachable):
    """The location was unavailable for the whole patience: not worth another attempt."""

    retryable = False


def patience_policy(patience: float, hint: str | None = None) -> RetryPolicy:
    """Return the policy for calls to servers that wait for a storage that we may reach: it ends with `StorageAway`."""
    return RetryPolicy(patience, error=partial(StorageAway, hint=hint), nested=False)


class LocationHealth:
    """Availability of one location. Thread-safe."""

    def __init__(
        self,
        place: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = cancellation.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.has_answered = False
        self.outage = Outage(place, math.inf, clock=clock)
        """Logs that the location is silent."""
        self._clock, self._sleep, self._chance = clock, sleep, chance
        self._last_answer = clock()
        self._away_since: float | None = None
        self._given_up_at: float | None = None
        self._problem: TikvBrError = StorageUnreachable("")
        self._asking = threading.Lock()

    @property
    def is_answering(self) -> bool:
        """Return whether the location's last known reaction is an answer."""
        return self.has_answered and self._away_since is None

    def quiet_seconds(self, since: float) -> float:
        """Seconds since its last answer, or since `since` if that is later."""
        return self._clock() - max(since, self._last_answer)

    def succeeded(self) -> None:
        """Record an answer of any kind."""
        self._last_answer = self._clock()
        self.has_answered = True
        self._away_since = self._given_up_at = None
        self.outage.end()

    def failed(self, began: float) -> None:
        """Record a request, sent at `began`, that the location did not answer."""
        if self._away_since is None:
            self._away_since = max(began, self._last_answer) if self.has_answered else began
        self.outage.fail(began)

    def wait(self, ask: Callable[[], TikvBrError | None], patience: float) -> None:
        """Return once the location answers.

        `ask` sends a probe and returns None, or its error. Raises `StorageAway` when the location has been unavailable
        for `patience` seconds, or at once shortly after that; `StorageUnreachable` when it has never answered.
        """
        if self.is_answering:
            return
        while not self._asking.acquire(timeout=_CHECK_SECONDS):
            cancellation.check()
        try:
            self.outage.budget, tries = patience, 0
            while not self.is_answering:
                began = self._clock()
                if self._given_up_at is not None and began - self._given_up_at < HOLD_SECONDS:
                    raise self._final()
                with self.outage.asking():
                    problem = ask()
                if problem is None:
                    self.succeeded()
                    return
                self.failed(began)
                tries += 1
                left = self._seconds_left(tries, patience)
                if left <= 0:
                    self._given_up_at, self._problem = self._clock(), problem
                    raise self._final()
                self._sleep(min(left, STORAGE_UNREACHABLE.delay(tries - 1, self._chance())))
        finally:
            self._asking.release()

    def _seconds_left(self, tries: int, patience: float) -> float:
        if not self.has_answered:
            return math.inf if tries < FIRST_CONTACT_TRIES else 0.0
        if self._given_up_at is not None:
            return 0.0
        return min(patience - self.away_seconds, cancellation.clean_up_seconds())

    def _final(self) -> TikvBrError:
        problem = self._problem
        if not self.has_answered:
            return type(problem)(problem.message, hint=problem.hint)
        return StorageAway(f"{problem.message}; gave up after {self.away_seconds:.0f} s", hint=_HINT)

    @property
    def away_seconds(self) -> float:
        """Seconds for which the location has been unavailable; 0 = it answers."""
        return 0.0 if self._away_since is None else self._clock() - self._away_since


_health: dict[Key, LocationHealth] = {}
_creating = threading.Lock()


def health_of(key: Key) -> LocationHealth:
    """The record of this process for a location."""
    with _creating:
        return _health.setdefault(key, LocationHealth(f"storage {' '.join(filter(None, key))}"))
