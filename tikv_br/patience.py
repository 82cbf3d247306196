"""Limits on how long something may fail, and waits for a state."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from tikv_br.errors import TikvBrError

T = TypeVar("T")
WATCH_SECONDS = 0.1
"""Interval at which a request in the background is watched."""


class Patience:
    """Start and permitted duration of failures. Written by one thread, read by any."""

    def __init__(
        self,
        seconds: float = math.inf,
        option: str = "",
        what: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``option``: the flag that sets the seconds; ``what``: what fails, if errors do not say it. Both are for the message."""
        self._seconds, self._option, self._what = seconds, option, what
        self._clock = clock
        self._since: float | None = None

    @property
    def failing_seconds(self) -> float:
        """The time since the first failure in a row; 0 = it does not fail."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    @property
    def is_failing(self) -> bool:
        """Return whether the last attempt failed."""
        return self._since is not None

    def begin(self, began: float | None = None) -> None:
        """Note a failure, of an attempt that began then; by default it counts from now."""
        if self._since is None:
            self._since = self._clock() if began is None else began

    def end(self) -> None:
        """Record a success."""
        self._since = None

    def fail(self, error: TikvBrError, began: float | None = None) -> None:
        """Record a failure as `begin`; raises the error, with the time in its message, if failures last too long."""
        self.begin(began)
        if (seconds := self.failing_seconds) > self._seconds:
            what = f"{self._what}: " if self._what else ""
            raise type(error)(
                f"{what}{error.message} (for {seconds:.0f} s, which is longer than {self._option})", hint=error.hint
            ) from None


def wait_until(
    look: Callable[[], T | None],
    seconds: float,
    too_late: Callable[[], TikvBrError],
    *,
    poll: float,
    check: Callable[[], object] = lambda: None,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Wait until ``look``, called every ``poll`` seconds, returns something true, and return that. Raises ``too_late()`` after so many seconds.

    ``check`` is called after each look; what it raises ends the wait.
    """
    until = time.monotonic() + seconds
    while not (found := look()):
        check()
        if time.monotonic() > until:
            raise too_late()
        sleep(poll)
    return found


def in_background(call: Callable[[], T], name: str, watch: Callable[[float], None]) -> T:
    """Make a request in a thread of its own; what ``watch`` raises is raised here, and the request abandoned."""
    began, done = time.monotonic(), Future[T]()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    while not done.done():
        wait([done], timeout=WATCH_SECONDS)
        if not done.done():
            watch(began)
    return done.result()
