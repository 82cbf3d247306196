"""PD's timestamps: milliseconds since the epoch in the upper bits, a counter in the lower 18."""

from __future__ import annotations

LOGICAL_BITS = 18
MAX_LOGICAL = (1 << LOGICAL_BITS) - 1


def compose(physical_ms: int, logical: int = 0) -> int:
    """The timestamp of a time in unix milliseconds and a counter."""
    return (physical_ms << LOGICAL_BITS) + logical


def physical_ms(ts: int) -> int:
    """Unix milliseconds of a timestamp."""
    return ts >> LOGICAL_BITS


def minus_seconds(ts: int, seconds: float) -> int:
    """The timestamp `seconds` earlier, with the counter at 0; never below 0."""
    return compose(max(physical_ms(ts) - round(seconds * 1000), 0))
