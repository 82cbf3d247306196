"""SIGINT and SIGTERM, for the whole program: nothing else installs handlers.

A handler runs between two instructions of the main thread, which may hold any lock at that moment, such as the lock of the event that it waits for. So
handlers only raise or keep a value. What takes a lock, as setting an event and logging do, is the work of a thread to which Python
writes the number of each signal.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from tikv_br.errors import Interrupted, Stopped, Terminated

logger = logging.getLogger(__name__)
HANDLED = (signal.SIGINT, signal.SIGTERM)
AGAIN_SECONDS = 0.01
SETTLE_SECONDS = 1.0
"""Seconds that the end of a block waits for what its signals started."""
_SETTLE = b"\0"
"""Byte that the end of a block writes between the numbers of signals."""


def raise_from_now() -> None:
    """Have both signals raise `Interrupted` and `Terminated` in the main thread, so that everything on the stack can clean up."""
    for number in HANDLED:
        signal.signal(number, lambda number, _frame: _raise(number))
    if sys.unraisablehook is not _send_again:
        _hooks_before[:] = [sys.unraisablehook]
        sys.unraisablehook = _send_again


_hooks_before: list[Callable[[sys.UnraisableHookArgs], object]] = []


def _send_again(dropped: sys.UnraisableHookArgs) -> None:
    """Python drops what is raised in a finalizer or in a callback of a weak reference; a signal is sent again a moment later."""
    if isinstance(dropped.exc_value, Stopped):
        number = signal.SIGINT if isinstance(dropped.exc_value, Interrupted) else signal.SIGTERM
        _thread.start_new_thread(_send_to_main, (number,))
    else:
        _hooks_before[0](dropped)


def _send_to_main(number: int) -> None:
    time.sleep(AGAIN_SECONDS)
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _raise(number: int, hint: str | None = None) -> None:
    raise _error(number, hint)


def _error(number: int, hint: str | None) -> Stopped:
    if number == signal.SIGINT:
        return Interrupted("interrupted", hint=hint)
    return Terminated("terminated (SIGTERM)", hint=hint)


class StepSignals:
    """Both signals raise in the main thread, until `ignore`: from then on they are only logged."""

    def __init__(self) -> None:
        self._ignored = False
        self.came_at: float | None = None
        """Time of the first signal, on the monotonic clock."""

    def ignore(self) -> None:
        """Stop raising."""
        self._ignored = True

    def handle(self, number: int) -> None:
        """Raise, unless they are ignored; called at any moment, so it takes no lock."""
        self.came_at = self.came_at or time.monotonic()
        if not self._ignored:
            _raise(number)

    def react(self, number: int) -> None:
        """Log a signal that is ignored; called in the thread that reads numbers of signals."""
        if self._ignored:
            logger.warning("%s ignored: still undoing the earlier steps", signal.Signals(number).name)


@contextlib.contextmanager
def raising() -> Iterator[StepSignals]:
    """Have both signals raise within the block; does nothing outside the main thread."""
    signals = StepSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    with _received_by(_Receiver(signals.handle, signals.react)):
        yield signals


@contextlib.contextmanager
def stopping(
    stop: threading.Event,
    hint: str = "",
    has_begun: Callable[[], bool] = lambda: True,
    *,
    only_first: bool = False,
    at_once: bool = False,
) -> Iterator[Sequence[Stopped]]:
    """Set ``stop`` on the first signal, and add its error to the sequence for the caller to raise.

    A second one raises at once, unless ``only_first``; with ``at_once`` the first one does: for work that may end anywhere.

    The first one also raises before anything ``has_begun``, which must take no lock: servers that do not answer would be waited for.
    """
    received: list[Stopped] = []

    def handle(number: int) -> None:
        if not has_begun():
            _raise(number)
        if at_once or (received and not only_first):
            _raise(number, hint)
        received.append(_error(number, hint))

    with _received_by(_Receiver(handle, lambda _: stop.set())):
        yield received


class _Receiver(Struct, frozen=True):
    handle: Callable[[int], None]
    """Called in the main thread at any moment: may only raise or keep a value."""
    react: Callable[[int], None]
    """Called in the thread that reads the numbers of signals."""


_receivers: list[_Receiver] = []
"""Receivers of the blocks that the main thread is in; the last one gets the signals."""
_settled: dict[int, threading.Event] = {}
_pipe: list[int] = []
"""The end that Python writes to, while this process has the thread that reads the other one."""


@contextlib.contextmanager
def _received_by(receiver: _Receiver) -> Iterator[None]:
    """Pass signals to the receiver within the block, which is run by the main thread."""
    if not _pipe:
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        _thread.start_new_thread(
            _read, (readable,)
        )  # `threading.Thread` waits for its start with locks that a signal breaks
        _pipe.append(writable)
    _receivers.append(receiver)
    wakeup = signal.set_wakeup_fd(_pipe[0], warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda number, _frame: receiver.handle(number)) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _settle()
        signal.set_wakeup_fd(wakeup)
        _receivers.remove(receiver)


def _settle() -> None:
    """Wait until the thread has reacted to the signals that came: they are not to reach the receiver of an outer block."""
    _settled[0] = done = threading.Event()
    with contextlib.suppress(BlockingIOError):
        os.write(_pipe[0], _SETTLE)
        done.wait(SETTLE_SECONDS)


def _read(pipe: int) -> None:
    while True:
        for number in os.read(pipe, 1):
            if number == _SETTLE[0]:
                _settled[0].set()
            elif number in HANDLED and _receivers:
                _receivers[-1].react(number)


def _drop_parent_pipe() -> None:
    if _pipe:
        signal.set_wakeup_fd(-1)  # else signals of a forked child would be its parent's
        _pipe.clear()
        _receivers.clear()


os.register_at_fork(after_in_child=_drop_parent_pipe)
