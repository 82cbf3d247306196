"""A signal at the worst moment: the main thread is inside of `threading.Event.wait`, and holds the event's lock."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from tikv_br import signals

SECONDS = 60
_IS_OWNED = threading.Condition._is_owned.__code__  # type: ignore[attr-defined]
_WAIT = threading.Event.wait.__code__


def strike_in_wait(
    chosen: Callable[[object], bool], number: int = signal.SIGTERM, struck: Callable[[], object] = int
) -> None:
    """Raise a signal in the current thread, once, as it begins to wait for an event that is ``chosen``."""

    def trace(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or frame.f_code is not _IS_OWNED:
            return
        wait = frame.f_back and frame.f_back.f_back
        if wait is not None and wait.f_code is _WAIT and chosen(wait.f_locals["self"]):
            sys.settrace(None)
            struck()
            signal.raise_signal(number)

    sys.settrace(trace)


def run_struck(work: Callable[[], int], mark: Path, *, stop_only: bool) -> int:
    """Do work that gets SIGTERM at that moment, and makes the file ``mark`` then; its exit code. For a fork.

    With ``stop_only`` the event is the one that the signal sets.
    """
    signal.alarm(SECONDS)
    if not stop_only:
        strike_in_wait(lambda _event: True, struck=mark.touch)
        return work()
    stopping = signals.stopping

    def struck_stopping(stop: threading.Event, *others: Any, **more: Any) -> AbstractContextManager[object]:  # noqa: ANN401 - passed on
        strike_in_wait(lambda event: event is stop, struck=mark.touch)
        return stopping(stop, *others, **more)

    with mock.patch.object(signals, "stopping", struck_stopping):
        return work()
