"""Commands that run until they are told to stop, and then end in order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from tikv_br.errors import Interrupted, Terminated


@contextlib.contextmanager
def signals_stop(stop: threading.Event, hint: str) -> Iterator[list[Interrupted | Terminated]]:
    """The first SIGTERM or SIGINT sets ``stop``, and is listed for whoever is to raise it; a second one raises at once."""
    errors: dict[int, Interrupted | Terminated] = {
        signal.SIGTERM: Terminated("told to end (SIGTERM)", hint=hint),
        signal.SIGINT: Interrupted("interrupted", hint=hint),
    }
    told: list[Interrupted | Terminated] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        if told:
            raise errors[number]
        told.append(errors[number])
        stop.set()

    before = {number: signal.signal(number, ask) for number in errors}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
