"""Cancels the work of threads from another thread: their waits end, and their calls in flight are cancelled.

A thread works under at most one `Cancellation`, the one of the innermost `Cancellation.active` block that it runs in. Threads that
it starts work under none unless they are given functions made by `inherit`. A cancellation may be used from any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class TaskCancelled(Exception):
    """Raised in cancelled work, whose result is not needed. Not an error; do not catch it."""


class Cancellation:
    """What a piece of work and its threads are cancelled by; it cannot be withdrawn."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._calls: dict[object, Callable[[], object]] = {}

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
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
    """As `time.sleep`. Raises `TaskCancelled` as soon as the current thread's work is cancelled."""
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


@contextlib.contextmanager
def cancelled_on_error() -> Iterator[None]:
    """Work under a new cancellation while the block runs, cancelled if the block raises, as at a signal."""
    cancellation = Cancellation()
    with cancellation.active():
        try:
            yield
        except BaseException:
            cancellation.cancel()
            raise
