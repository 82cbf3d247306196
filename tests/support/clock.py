"""Time that a test moves."""

from __future__ import annotations


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
