"""Cancels the work of threads from another thread: their waits end, and their calls in flight are cancelled. Also how long clean-up waits.

A thread works under at most one `Cancellation`, the one of the innermost `Cancellation.active` block that it runs in. Threads that
it starts work under none unless they are given functions made by `inherit`. A cancellation may be used from any thread.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class TaskCancelled(Exception):
    """Raised in cancelled work, whose result is not needed. Not an error; do not catch it."""


class Cancellation:
    """Cancellation of a piece of work and its threads; it cannot be withdrawn."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._calls: dict[object, Callable[[], object]] = {}

    @property
    def is_cancelled(self) -> bool:
        """Return whether `cancel` was called."""
        return self._event.is_set()

    def cancel(self) -> None:
        """End all waits and cancel all calls in flight; idempotent."""
        self._event.set()
        with self._lock:
            calls = list(self._calls.values())
        for cancel_call in calls:
            cancel_call()

    def check(self) -> None:
        """Raise `TaskCancelled` if cancelled."""
        if self._event.is_set():
            raise TaskCancelled

    def sleep(self, seconds: float) -> None:
        """Sleep. Raises `TaskCancelled` as soon as cancelled."""
        self._event.wait(seconds)
        self.check()

    @contextlib.contextmanager
    def calling(self, cancel_call: Callable[[], object]) -> Iterator[None]:
        """Have `cancel` call ``cancel_call`` as well while the block runs. Raises `TaskCancelled` if cancelled already."""
        key = object()
        with self._lock:
            self._calls[key] = cancel_call
        try:
            if self._event.is_set():
                cancel_call()
                raise TaskCancelled
            yield
        finally:
            with self._lock:
                del self._calls[key]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let the current thread work under this cancellation while the block runs."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


def current() -> Cancellation | None:
    """The cancellation that the current thread works under."""
    return _current.get()


def check() -> None:
    """Raise `TaskCancelled` if the current thread's work is cancelled."""
    if (cancellation := _current.get()) is not None:
        cancellation.check()


def sleep(seconds: float) -> None:
    """Sleep as `time.sleep`. Raises `TaskCancelled` as soon as the current thread's work is cancelled."""
    cancellation = _current.get()
    if cancellation is None:
        time.sleep(seconds)
    else:
        cancellation.sleep(seconds)


def inherit(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` for other threads, to be run there under the cancellation of the thread that calls this."""
    cancellation = _current.get()
    if cancellation is None:
        return function

    def run(*args: P.args, **named: P.kwargs) -> R:
        with cancellation.active():
            return function(*args, **named)

    return run


class BackgroundWork:
    """A daemon thread that runs a function until `stop`, under a cancellation of its own."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        """``function`` may wait by `sleep`, which `stop` ends."""
        self._function = function
        self._cancellation = Cancellation()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._cancellation.is_cancelled

    def stop(self) -> None:
        """End its waits, and return when it has ended; at clean-up after `JOIN_SECONDS` in any case. Idempotent."""
        self._cancellation.cancel()
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS if is_cleaning_up() else None)

    def _run(self) -> None:
        with self._cancellation.active(), contextlib.suppress(TaskCancelled):
            self._function()


@contextlib.contextmanager
def cancelled_by(stop: threading.Event) -> Iterator[None]:
    """Let the block work under a cancellation that follows an event, such as one that a signal handler sets: it must take no lock."""
    work = Cancellation()

    def watch() -> None:
        while not stop.is_set():
            sleep(POLL_SECONDS)
        work.cancel()

    watcher = BackgroundWork("cancellation", watch)
    watcher.start()
    try:
        with work.active():
            yield
    finally:
        watcher.stop()


POLL_SECONDS = 0.2
CLEAN_UP_SECONDS = 5.0
"""Seconds that clean-up waits, in all, for servers and storage that do not answer."""
SIGNAL_SECONDS = 2.0
"""The same after a signal, counted from the signal: the process must have ended within `CLEAN_UP_SECONDS`."""
JOIN_SECONDS = 1.0
"""Seconds that clean-up waits for a thread, and minimum timeout of a request."""


_clean_ups: dict[object, float] = {}
"""End of each clean-up of this process, on the monotonic clock. Clean-ups of several threads may end in any order."""


@contextlib.contextmanager
def clean_up(signalled: float | None = None) -> Iterator[None]:
    """While this runs, nothing in this process waits for `CLEAN_UP_SECONDS` for what does not answer.

    ``signalled`` is when a signal came that has led to the clean-up, on the monotonic clock.
    """
    key = object()
    _clean_ups[key] = time.monotonic() + CLEAN_UP_SECONDS if signalled is None else signalled + SIGNAL_SECONDS
    try:
        yield
    finally:
        _clean_ups.pop(key, None)


def is_cleaning_up() -> bool:
    """Return whether this process cleans up."""
    return bool(_clean_ups)


def clean_up_seconds() -> float:
    """Return the seconds for which clean-up still waits; infinite if this process does not clean up."""
    return min(_clean_ups.copy().values(), default=math.inf) - time.monotonic()


def request_seconds(timeout: float) -> float:
    """Return the timeout of one request: ``timeout``, or less during clean-up."""
    return min(timeout, max(clean_up_seconds(), JOIN_SECONDS))


def run_on_threads(function: Callable[[T], R], items: Iterable[T], threads: int, name: str) -> list[R]:
    """Call the function for all items, and return what it returns, in order.

    The first error, as a signal or the cancellation of this thread's work, cancels the other calls and is raised.
    """
    work, outer = Cancellation(), current()
    with (
        outer.calling(work.cancel) if outer is not None else contextlib.nullcontext(),
        work.active(),
        ThreadPoolExecutor(threads, thread_name_prefix=name) as pool,
    ):
        try:
            calls = [pool.submit(inherit(function), item) for item in items]
            for call in as_completed(calls):
                call.result()
            return [call.result() for call in calls]
        except BaseException:
            work.cancel()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
