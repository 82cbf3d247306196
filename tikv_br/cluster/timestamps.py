"""PD timestamps: milliseconds since the epoch in the upper bits, a counter in the lower 18."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tikv_br.errors import UsageError

LOGICAL_BITS = 18
MAX_LOGICAL = (1 << LOGICAL_BITS) - 1
MAX_TS = 2**64 - 1
_MAX_MS = 253_402_300_800_000
"""Begin of the year 10000, which no calendar of Python has."""
_AGE_FORM = re.compile(r"-(\d+) *([smhd])|(\d+) *(second|minute|hour|day)s? ago", re.IGNORECASE)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def compose(physical_ms: int, logical: int = 0) -> int:
    """The timestamp of a time in unix milliseconds and a counter."""
    return (physical_ms << LOGICAL_BITS) + logical


def physical_ms(ts: int) -> int:
    """Unix milliseconds of a timestamp."""
    return ts >> LOGICAL_BITS


def minus_seconds(ts: int, seconds: float) -> int:
    """The timestamp `seconds` earlier, with the counter at 0; never below 0."""
    return compose(max(physical_ms(ts) - round(seconds * 1000), 0))


def seconds_between(earlier_ts: int, later_ts: int) -> float:
    """Return the seconds from one timestamp to a later one; 0 if it is not later."""
    return max(physical_ms(later_ts) - physical_ms(earlier_ts), 0) / 1000


def show_ts(ts: int, *, age: bool = True) -> str:
    """A timestamp with its time, such as ``449532120711430144 = 2024-05-02 10:00:00 UTC (4 min ago)``.

    Without `age` for texts that are read later: of reports and records.
    """
    return f"{ts} = {show_time(physical_ms(ts), age=age)}"


def show_time(milliseconds: int, *, age: bool = True) -> str:
    """A time to the second, with its distance from this machine's: ``2024-05-02 10:00:00 UTC (4 min ago)``; ``-`` = unknown."""
    if not milliseconds:
        return "-"
    if not 0 < milliseconds < _MAX_MS:
        return f"an invalid time ({milliseconds} ms)"
    shown = f"{datetime.fromtimestamp(milliseconds // 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"{shown} ({_age(time.time() - milliseconds / 1000)})" if age else shown


def _age(seconds: float) -> str:
    size = abs(round(seconds))
    if size < 120:
        text = f"{size} s"
    elif size < 120 * 60:
        text = f"{size // 60} min"
    else:
        text = f"{size // 3600} h" if size < 48 * 3600 else f"{size // 86400:,} days"
    return f"{text} ago" if seconds >= 0 else f"in {text}"


def parse_ts(text: str, name: str, now: Callable[[], float] = time.time) -> int:
    """The timestamp of a text: a PD timestamp, a time (in UTC unless it has an offset), or an age such as ``-2m`` or ``2 minutes ago``.

    An age counts from ``now()``: PD's time wherever a PD is given. Raises `UsageError`, and what ``now`` raises.
    """
    text = text.strip()
    if text.isdecimal() and 0 < int(text) <= MAX_TS:
        return int(text)
    with contextlib.suppress(ValueError, OverflowError):
        found = _AGE_FORM.fullmatch(text)
        if found:
            unit = _UNITS[(found[2] or found[4])[0].lower()]
            moment = datetime.fromtimestamp(now(), UTC) - timedelta(**{unit: int(found[1] or found[3])})
        elif ":" in text:  # a day alone is no time
            moment = datetime.fromisoformat(text.removesuffix(" UTC"))
            moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        else:
            raise ValueError
        if moment.timestamp() > 0:
            return compose(round(moment.timestamp() * 1000))
    raise UsageError(
        f"{name} {text!r} is not a time",
        hint="Pass a PD timestamp, a time such as 2026-05-02T10:00:00+02:00 or '2026-05-02 10:00:00' (UTC), or an age such as -2m "
        "or '2 minutes ago'.",
    )
