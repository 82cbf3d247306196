"""Figures, times and texts as people read them. Pure."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime

NONE = "\N{EN DASH}"


def figure(value: float | None, unit: str) -> str:
    """A value as people read it; units are ``s``, ``B``, ``B/s`` and ``keys``."""
    if value is None:
        return NONE
    match unit:
        case "s":
            return _seconds(value)
        case "B" | "B/s":
            return _bytes(value) + unit[1:]
        case _:
            return f"{value:,.0f}"


def counted(number: int, what: str) -> str:
    """So many of something: ``1 file``, ``2,000 files``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def utc(milliseconds: int) -> str:
    """A time, to the second; a dash for 0, which is none."""
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC" if milliseconds else NONE


def day(milliseconds: int) -> str:
    """A date, in UTC."""
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d}"


def short_key(text: str) -> str:
    """A key in hex, cut where it is long; a dash for none."""
    return (text if len(text) <= 40 else f"{text[:36]}…") or NONE


def visible(text: str) -> str:
    """A text of which nothing acts unseen: control and direction characters and halves of pairs as escapes."""
    return "".join(_escaped(char) if _acts(char) else char for char in text)


def _acts(char: str) -> bool:
    return (
        not char.isprintable() and unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and char not in "\n\t"
    )


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def _seconds(value: float) -> str:
    if value < 0.1:
        return f"{value * 1000:.0f} ms" if value else "0 s"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
