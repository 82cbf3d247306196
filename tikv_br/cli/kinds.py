"""Kinds of values of flags: durations, sizes and rates, and the limits of numbers."""

from __future__ import annotations

import math
import re

import typer

from tikv_br.cli.command import FlagKind

MAX_DURATION = 100 * 365 * 86400.0
"""Seconds that a duration may have: what timers, timestamps and servers can still add to the present time."""
MAX_SIZE = 2**50
"""Bytes that a size may have."""
MIN_RATE, MAX_RATE = 0.001, 2.0**20
"""MiB per second that a rate limit may be. Below this a large backup would never end."""
MAX_COUNT = 10**12
"""Rows that an option may ask for."""
MAX_CONCURRENCY = 4096
MAX_BACKUPS = 100_000
"""Backups or reports that a rule may keep."""
MAX_SEED = 2**32 - 1

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_duration(text: str) -> float:
    """Read ``90s``, ``1m``, ``1h30m``, ``500ms`` or plain seconds; returns seconds. Raises `typer.BadParameter`."""
    bare = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", bare):
        seconds = float(bare)
    else:
        parts = _DURATION_PART.findall(bare)
        if not parts or "".join(number + unit for number, unit in parts) != bare:
            raise typer.BadParameter(f"{bare!r} is not a valid duration: use 90s, 5m, 1h30m or 500ms")
        seconds = sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
    if seconds > MAX_DURATION:
        raise typer.BadParameter(f"{_cut(bare)} is too long: pass at most 36500d (100 years)")
    return seconds


def parse_rate_limit(text: str) -> int:
    """Read ``10MiB``, ``512KiB/s`` or a number of MiB per second; returns bytes per second, 0 only for "unlimited".

    Raises `typer.BadParameter`.
    """
    bare = text.strip().removesuffix("/s")
    match = _SIZE.fullmatch(bare)
    try:
        rate = float(match[1]) * _SIZE_UNITS[match[2].lower()] / 2**20 if match and bare[-1].isalpha() else float(bare)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a valid rate: use 10MiB, 512KiB, or MiB/s as a number") from None
    if rate != 0 and not MIN_RATE <= rate <= MAX_RATE:  # nan is outside as well
        raise typer.BadParameter(
            f"{_cut(text)} MiB/s is out of range: pass 0 (unlimited), or {MIN_RATE} to {MAX_RATE:.0f}"
        )
    return math.ceil(rate * 2**20)


def parse_size(text: str) -> int:
    """Read ``64MiB``, ``64m``, ``1GB`` or plain bytes (units are powers of 1024). Raises `typer.BadParameter`."""
    bare = text.strip()
    match = _SIZE.fullmatch(bare)
    if match is None:
        raise typer.BadParameter(f"{bare!r} is not a valid size: use 4096, 64KiB, 16MiB or 1GiB")
    size = float(match[1]) * _SIZE_UNITS[match[2].lower()]
    if size > MAX_SIZE:
        raise typer.BadParameter(f"{_cut(bare)} is too large: pass at most 1024TiB")
    return int(size)


def _cut(text: str) -> str:
    """A value as messages show it: hundreds of digits say nothing."""
    return text if len(text) <= 40 else f"{text[:40]}…"


TIME = FlagKind("DURATION", parse_duration)
SIZE = FlagKind("SIZE", parse_size)
RATE = FlagKind("RATE", parse_rate_limit)
