"""Work that no signal breaks into: gRPC's calls.

Handlers of signals raise in the main thread, between any two steps of what it does. Where those are gRPC's, a lock stays
taken, or a call is left without a thread that waits for its end, and closing the channel then waits for ever. Other
threads are never broken into; the wait of the main thread for them can be, without harm.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")
GRACE = 0.5
"""Seconds that an action still has to end once a signal has come."""


def off_main(action: Callable[[], T]) -> T:
    """Run `action`, in another thread if this is the main one; returns what it returns, raises what it raises.

    A signal that raises ends the wait, `GRACE` later where the action goes on; then it does so by itself, until what it
    uses is closed.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return action()
    ended: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            found = action()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failure = error
            ended.put(lambda: _raise(failure))
        else:
            ended.put(lambda: found)

    _worker().put(run)
    try:
        outcome = ended.get()
    except BaseException:  # a signal: what the caller undoes should not meet what is still being done
        with contextlib.suppress(queue.Empty):
            ended.get(timeout=GRACE)
        raise
    return outcome()


Inbox = queue.SimpleQueue[Callable[[], None]]
_idle: queue.SimpleQueue[Inbox] = queue.SimpleQueue()
"""What is put into one of them is run; a thread for each, which ends with the process."""


def _worker() -> Inbox:
    with contextlib.suppress(queue.Empty):
        return _idle.get_nowait()
    inbox: Inbox = queue.SimpleQueue()
    _thread.start_new_thread(_serve, (inbox,))  # `threading.Thread` waits for its start with locks that a signal breaks
    return inbox


def _serve(inbox: Inbox) -> None:
    while True:
        inbox.get()()
        _idle.put(inbox)


def _forget() -> None:
    global _idle  # noqa: PLW0603 - a forked child has none of its parent's threads
    _idle = queue.SimpleQueue()


os.register_at_fork(after_in_child=_forget)


def _raise(error: BaseException) -> NoReturn:
    raise error
