"""PD timestamps: milliseconds since the epoch in the upper bits, a counter in the lower 18."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tikv_br.errors import UsageError
from tikv_br.formats.numbers import parse_decimal

LOGICAL_BITS = 18
MAX_TS = 2**64 - 1
_MAX_MS = 253_402_300_800_000
"""Begin of the year 10000, which no calendar of Python has."""
_AGE_PART = r"\d+ *(?:seconds?|minutes?|hours?|days?|weeks?|[smhdw])"
_AGE_FORM = rf"(?i)-({_AGE_PART}(?: *{_AGE_PART})*)|({_AGE_PART}(?: *{_AGE_PART})*) ago"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_DAYS = "|".join(("today", "yesterday", *(f"{name}|{name[:3]}" for name in _WEEKDAYS)))
_DAY_FORM = rf"(?i)(?:last )?({_DAYS})(?:(?: at)?[ t](\d.*))?"


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
    """The timestamp of a text, for all flags that take a time.

    A PD timestamp, a time (in UTC unless it has an offset), an age such as ``-2m``, ``1h30m ago`` or ``2 minutes ago``, ``now``, or
    a day: ``today``, ``yesterday`` or a weekday, the last one before today, from 00:00 UTC, or with a time: ``monday 14:30``.
    Ages and days count from ``now()``: PD's time wherever a PD is given. Raises `UsageError`, and what ``now`` raises.
    """
    text = text.strip()
    if ts := parse_decimal(text, MAX_TS):
        return ts
    with contextlib.suppress(ValueError, OverflowError):
        if found := re.fullmatch(_AGE_FORM, text):
            parts = re.findall(r"(\d+) *([a-z])", (found[1] or found[2]).lower())
            age = sum((timedelta(**{_UNITS[unit]: int(count)}) for count, unit in parts), timedelta())
            moment = datetime.fromtimestamp(now(), UTC) - age
        elif text.lower() == "now":
            moment = datetime.fromtimestamp(now(), UTC)
        elif found := re.fullmatch(_DAY_FORM, text):
            moment = _moment_of_day(found[1].lower(), found[2] or "00:00", datetime.fromtimestamp(now(), UTC))
        elif ":" in text:  # a day alone is no time
            moment = datetime.fromisoformat(text.removesuffix(" UTC"))
            moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        else:
            raise ValueError
        if moment.timestamp() > 0:
            return compose(round(moment.timestamp() * 1000))
    raise UsageError(
        f"{name} {text!r} is not a time",
        hint="Pass a PD timestamp, a time such as 2026-05-02T10:00:00+02:00 or '2026-05-02 10:00:00' (UTC), an age such as -2m "
        "or '2m ago', or a day such as yesterday, 'yesterday 14:30' or 'monday 14:30' (UTC).",
    )


def _moment_of_day(day: str, clock: str, now: datetime) -> datetime:
    """A time of a day before or of ``now``. Raises `ValueError`."""
    named = next((at for at, name in enumerate(_WEEKDAYS) if day in {name, name[:3]}), None)
    days = ("today", "yesterday").index(day) if named is None else (now.weekday() - named) % 7 or 7
    date = (now - timedelta(days=days)).date()
    moment = datetime.fromisoformat(f"{date}T{clock.upper().removesuffix(' UTC')}")
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
