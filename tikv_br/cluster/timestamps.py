"""PD timestamps: milliseconds since the epoch in the upper bits, a counter in the lower 18. Pure."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

from tikv_br.errors import UsageError

LOGICAL_BITS = 18
MAX_LOGICAL = (1 << LOGICAL_BITS) - 1
MAX_TS = 2**64 - 1


def compose(physical_ms: int, logical: int = 0) -> int:
    """The timestamp of a time in unix milliseconds and a counter."""
    return (physical_ms << LOGICAL_BITS) + logical


def physical_ms(ts: int) -> int:
    """Unix milliseconds of a timestamp."""
    return ts >> LOGICAL_BITS


def minus_seconds(ts: int, seconds: float) -> int:
    """The timestamp `seconds` earlier, with the counter at 0; never below 0."""
    return compose(max(physical_ms(ts) - round(seconds * 1000), 0))


def show_ts(ts: int) -> str:
    """A timestamp with its time, such as ``449532120711430144 (2024-05-02T10:00:00.123Z)``."""
    return (
        f"{ts} ({datetime.fromtimestamp(physical_ms(ts) / 1000, UTC):%Y-%m-%dT%H:%M:%S}.{physical_ms(ts) % 1000:03}Z)"
    )


def parse_ts(text: str, name: str) -> int:
    """The timestamp that is a PD timestamp or a time such as ``2026-05-02T10:00:00Z``. Raises `UsageError`."""
    if text.isdecimal() and 0 < int(text) <= MAX_TS:
        return int(text)
    with contextlib.suppress(ValueError, OverflowError):
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None and moment.timestamp() > 0:
            return compose(round(moment.timestamp() * 1000))
    raise UsageError(
        f"{name} {text!r} is not a time",
        hint="Pass a PD timestamp, or a time with its offset from UTC, such as 2026-05-02T10:00:00Z or 2026-05-02T12:00:00+02:00.",
    )
