"""Time that a test moves."""

from __future__ import annotations

import sys
import time

import pytest

from tikv_br.cluster import cluster


def move_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the tool's clock in this process be wrong by so many seconds. Servers have processes of their own, and gRPC needs the right time."""
    right = time.time

    def wrong() -> float:
        caller: str = sys._getframe(1).f_globals["__name__"]
        return right() + (seconds if caller.startswith("tikv_br.") else 0)

    monkeypatch.setattr(time, "time", wrong)
    monkeypatch.setattr(cluster, "_REPORTED", set())


class Clock:
    """Time that passes by sleeping, or by hand; calling it returns the time."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.slept.append(seconds)
        self.now += seconds
