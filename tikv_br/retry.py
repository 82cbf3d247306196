"""Retries: which waits (`Backoff`), how long (`RetryPolicy`), and the state of one call (`Backoffer`).

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
The last try is made when the budget ends.
A call's budget runs from its first failure, so that one slow request does not eat it; waits for a busy store do not
count against it, up to a budget of their own. A call that needs another one (a request to a store looks for its region
at PD) shares its budget with it: together they take no longer than one. All calls to PD share the budget of an `Outage`. At clean-up no
call waits beyond `cancellation.clean_up_seconds`. Why this is no library: `docs/adr/0013-one-retry-policy.md`.

Limits on how long something may fail, and waits for a state.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
import weakref
from _thread import start_new_thread
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Self, TypeVar

from msgspec import Struct

from tikv_br import cancellation
from tikv_br.errors import ClusterUnreachable, RetryBudgetExhausted, TikvBrError

T = TypeVar("T")
log = logging.getLogger(__name__)

ERRORS_SHOWN = 3
MAX_DOUBLINGS = 20


class Backoff(Struct, frozen=True):
    """One row of the table. Times are in seconds."""

    name: str
    base: float
    cap: float
    jitter: bool = False
    busy: bool = False
    """Count waits against the budget for busy stores instead of the call's own."""

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
PD_UNAVAILABLE = Backoff("PD", 0.5, 3.0, jitter=True)
ETCD_UNAVAILABLE = Backoff("etcd", 0.1, 1.0, jitter=True)
STORAGE_UNREACHABLE = Backoff("storage unreachable", 0.1, 2.0, jitter=True)


class RetryPolicy(Struct, frozen=True):
    """Limits of retrying a call after its first failure. Times are in seconds."""

    budget: float = math.inf
    busy_budget: float = 0.0
    """Budget for waits for busy stores, in addition to `budget`."""
    max_tries: float = math.inf
    error: Callable[[str], TikvBrError] | None = RetryBudgetExhausted
    """Makes the error of a call whose budget is spent; None: the last failure itself is raised."""
    nested: bool = True
    """Let waits also spend the budget of the call that this one is a part of."""

    def run(self, what: str, action: Callable[[], T], backoff: Backoff, retried: type[TikvBrError]) -> T:
        """Run `action` until it raises no `retried` error. `what` names it in the message of a spent budget."""
        with Backoffer(what, self) as backoffer:
            while True:
                try:
                    return action()
                except retried as error:
                    backoffer.wait(backoff, error)


REPORT_SECONDS = 10.0
"""Seconds of a server's silence before it is logged."""
WATCH_SECONDS = 0.5
PROBE_SECONDS = 1.0
"""Seconds of silence after which a server that works for long is probed."""
GAP_SECONDS = 40.0
"""A failure so long after the last one begins another outage: longer than a request and the wait before it take."""


class Outage:
    """Silence of a server, shared by all calls to it. Thread-safe.

    It begins with the first failure and ends with the next answer to anybody. A silence of `REPORT_SECONDS` is logged while it lasts,
    by a thread that watches the time: also if nothing has failed yet, as requests to a server that hangs do only by their timeouts, and
    long ones and streams not for minutes.
    """

    def __init__(self, server: str, budget: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``server`` names it in the log; ``budget`` is for how many seconds it is asked again."""
        self.server, self.budget = server, budget
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._failed = 0.0
        self._answered = -math.inf
        self._pending: dict[object, float] = {}
        """When each request was sent that should be answered soon."""
        self._works: dict[object, tuple[float, Callable[[], bool]]] = {}
        """When each work began that may take long, and its probe."""
        self._is_probing = False
        self._reported: float | None = None
        """Begin of the silence that was logged."""

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """While a request is sent that should be answered soon: not one for much work. Its end is no answer, see `end` and `fail`."""
        key = object()
        self._pending[key] = self._clock()
        _watch(self)
        try:
            yield
        finally:
            del self._pending[key]

    @contextlib.contextmanager
    def working(self, probe: Callable[[], bool]) -> Iterator[None]:
        """While the server does what may take long, and may be silent about it: whether it hangs is seen by ``probe``.

        That asks it something that any server answers at once, in another thread, and returns whether it has; it raises nothing.
        """
        key = object()
        self._works[key] = self._clock(), probe
        _watch(self)
        try:
            yield
        finally:
            del self._works[key]

    def probe(self) -> None:
        """Send a probe if the server works for somebody and has been silent for `PROBE_SECONDS`."""
        works = list(self._works.copy().values())
        if not works or self._is_probing:
            return
        if self._clock() - max(min(began for began, _ in works), self._answered) >= PROBE_SECONDS:
            self._is_probing = True
            start_new_thread(self._run_probe, (works[-1][1],))

    def _run_probe(self, probe: Callable[[], bool]) -> None:
        began = self._clock()
        try:
            with self.asking():
                has_answered = probe()
            if has_answered:
                self.end()
            else:
                self.fail(began)
        finally:
            self._is_probing = False

    def fail(self, began: float | None = None) -> None:
        """Note a request that was not answered; it counts from now, or from when it began."""
        with self._lock:
            now = self._clock()
            if self._since is None or now - self._failed > GAP_SECONDS:
                self._since = now if began is None else max(began, self._answered)
            self._failed = now
        self.report()
        _watch(self)

    def end(self) -> None:
        """Note an answer, of any kind."""
        self._answered = self._clock()
        if self._since is None and self._reported is None:
            return
        with self._lock:
            self._since = None
            reported, self._reported = self._reported, None
        if reported is not None:
            log.warning("%s answers again, after %.0f s", self.server, self._answered - reported)

    def report(self) -> None:
        """Log a silence that has just become long; each once."""
        with self._lock:
            now, failing = self._clock(), self._since
            if failing is not None and now - self._failed > GAP_SECONDS:
                failing = None
            waiting = min((max(sent, self._answered) for sent in self._pending.copy().values()), default=None)
            began = [each for each in (failing, waiting) if each is not None]
            if not began or now - (since := min(began)) < REPORT_SECONDS:
                return
            if self._reported is not None and since - self._reported < GAP_SECONDS:
                return
            left = self.budget - (0.0 if failing is None else now - failing)
            if left <= 0:
                return
            self._reported = since
        until = time.strftime("%H:%M:%S", time.gmtime(time.time() + left)) if math.isfinite(left) else ""
        limit = f"trying until {until} UTC" if until else "waiting"
        log.warning("%s has not answered for %.0f s, %s", self.server, now - since, limit)

    @property
    def seconds(self) -> float:
        """Return the seconds since it stopped answering; 0 = no failure is known."""
        since = self._since
        return 0.0 if since is None or self._clock() - self._failed > GAP_SECONDS else self._clock() - since

    @property
    def is_spent(self) -> bool:
        """Return whether the budget is spent: the server is then asked once per call."""
        return self.seconds >= self.budget

    def check(self) -> None:
        """Raise `ClusterUnreachable` if clean-up has waited long enough for servers, and this one did not answer when last asked."""
        if self._since is not None and cancellation.clean_up_seconds() <= 0:
            raise ClusterUnreachable(f"{self.server} has not answered for {self.seconds:.0f} s")


_watched: weakref.WeakSet[Outage] = weakref.WeakSet()
_is_watching = False
_watching = threading.Lock()


def _watch(outage: Outage) -> None:
    """Have a silence logged when its time has come; by one thread of the process."""
    global _is_watching  # noqa: PLW0603 - the state of this process
    if _is_watching and outage in _watched:
        return
    with _watching:
        _watched.add(outage)
        if _is_watching:
            return
        _is_watching = True
    start_new_thread(_report_silences, ())  # `threading.Thread` waits for its start with locks that a signal breaks


def _report_silences() -> None:
    while True:
        time.sleep(WATCH_SECONDS)
        _look_at_all()


def _look_at_all() -> None:
    with _watching:
        found = list(_watched)
    for outage in found:
        outage.probe()
        outage.report()


def _forget_watcher() -> None:
    global _is_watching, _watching
    _is_watching, _watching = False, threading.Lock()
    _watched.clear()


os.register_at_fork(after_in_child=_forget_watcher)


class Backoffer:
    """Waits between the tries of one call, and ends it when its policy's budget is spent. Used by one thread.

    As a context manager it is the current call of its thread: calls made inside the block spend its budget, too.
    """

    def __init__(
        self,
        what: str,
        policy: RetryPolicy,
        outage: Outage | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = cancellation.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """The call begins now. `what` names it in the message. With an `outage` of its server, its budget is spent when that one's is."""
        self._what, self._policy, self._outage = what, policy, outage
        self._busy_left = policy.busy_budget
        self._clock, self._sleep, self._chance = clock, sleep, chance
        self._began = clock()
        self._first_failure: float | None = None
        self._waits: Counter[Backoff] = Counter()
        self._tries = 0
        self._seen: deque[str] = deque(maxlen=ERRORS_SHOWN)
        self._free = 0.0
        self._outer: Backoffer | None = _current() if policy.nested else None

    def __enter__(self) -> Self:
        self._before = _current()
        _thread.call = self
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.call = self._before

    def wait(self, backoff: Backoff, cause: TikvBrError | str, at_least: float = 0.0) -> None:
        """Sleep before the next try, the last time until the budget ends. Raises the policy's error when it is spent.

        `at_least`: seconds that the server asked for; raises as well if they overrun the budget.
        """
        now = self._clock()
        delay = max(backoff.delay(self._waits[backoff], self._chance()), at_least)
        self._waits[backoff] += 1
        calls = self._calls()
        for call in calls:
            call._record_failure(now, str(cause))  # noqa: SLF001 - of this class
        hurry = cancellation.clean_up_seconds()
        if backoff.busy and delay <= min(self._busy_left, hurry):
            self._busy_left -= delay
            for call in calls:
                call._free += delay  # noqa: SLF001
        else:
            left = min(hurry, *(call._seconds_left(now) for call in calls))  # noqa: SLF001
            if left <= 0 or at_least > left:
                raise calls[-1]._spent_error(now, cause) from None  # noqa: SLF001
            delay = min(delay, left)
        self._sleep(delay)

    def _calls(self) -> list[Backoffer]:
        """This call, and those that need it, the outermost last."""
        calls, outer = [self], self._outer
        while outer is not None:
            calls.append(outer)
            outer = outer._outer  # noqa: SLF001 - of this class
        return calls

    def _record_failure(self, now: float, cause: str) -> None:
        self._tries += 1
        if self._first_failure is None:
            self._first_failure = now
        if cause in self._seen:
            self._seen.remove(cause)
        self._seen.append(cause)

    def _seconds_left(self, now: float) -> float:
        if self._tries >= self._policy.max_tries:
            return 0.0
        spent = 0.0 if self._first_failure is None else now - self._first_failure - self._free
        if self._outage is not None:
            spent = max(spent, self._outage.seconds)
        return self._policy.budget - spent

    def _spent_error(self, now: float, cause: TikvBrError | str) -> TikvBrError:
        if self._policy.error is None and isinstance(cause, TikvBrError):
            return cause
        seen = "; ".join(
            cause for cause in self._seen if not any(cause in more for more in self._seen if more != cause)
        )
        message = f"{self._what}: gave up after {now - self._began:.1f} s and {self._tries} tries: {seen}"
        return (self._policy.error or RetryBudgetExhausted)(message)


_thread = threading.local()


def _current() -> Backoffer | None:
    call: Backoffer | None = getattr(_thread, "call", None)
    return call


POLL_SECONDS = 0.1
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
        wait([done], timeout=POLL_SECONDS)
        if not done.done():
            watch(began)
    return done.result()
