"""Output of a change feed: the live rows, and its resolved-ts."""

from __future__ import annotations

import time
from collections.abc import Callable

from tikv_br.incremental.feed.events import Missed, Resolved, Rows
from tikv_br.incremental.feed.feed import Feed

PATIENCE = 90.0
"""Seconds that a slow machine may take to catch up."""


class FeedState:
    """Collected output of a feed."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._newest: dict[bytes, tuple[int, bytes, bool]] = {}
        self.resolved = 0
        self.missed: list[Missed] = []

    def take(self, seconds: float) -> bool:
        """Take one event; whether there was one. No row may come at or below what was resolved before it."""
        event = self._feed.poll(seconds)
        match event:
            case Rows(batch):
                for row in batch.to_pylist():
                    assert row["ts"] > self.resolved
                    known = self._newest.get(row["key"])
                    if known is None or row["ts"] >= known[0]:
                        self._newest[row["key"]] = (row["ts"], row["value"], row["deleted"])
            case Resolved(ts):
                assert ts > self.resolved
                self.resolved = ts
            case Missed():
                self.missed.append(event)
            case None:
                pass
        return event is not None

    def until(self, ts: int) -> None:
        """Take all up to a timestamp."""
        self.wait(lambda: self.resolved >= ts)

    def wait(self, reached: Callable[[], bool]) -> None:
        """Take all until a state is reached."""
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < deadline, self._feed.status
            self.take(1.0)

    @property
    def state(self) -> dict[bytes, bytes]:
        """The live rows."""
        return {key: value for key, (_, value, deleted) in self._newest.items() if not deleted}
