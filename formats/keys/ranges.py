"""Ranges of keys: `KeyRange` and its set operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from tikv_br.formats.json_types import Hex
from tikv_br.formats.keys.text import show_key


class KeyRange(Struct, frozen=True, order=True):
    """Keys ``[start, end)``: RPC keys unless said otherwise; an empty end is no bound."""

    start: Hex
    end: Hex

    @property
    def is_empty(self) -> bool:
        return bool(self.end) and self.start >= self.end

    def contains(self, other: KeyRange) -> bool:
        return self.start <= other.start and (not self.end or (bool(other.end) and other.end <= self.end))

    def __str__(self) -> str:
        return f"[{show_key(self.start) or 'start'}, {show_key(self.end) or 'end'})"


EVERY_KEY = KeyRange(b"", b"")


def intersection(one: KeyRange, other: KeyRange) -> KeyRange:
    """Return the intersection of two ranges; it may be empty."""
    start = max(one.start, other.start)
    end = min(one.end or other.end, other.end or one.end)
    return KeyRange(start, max(start, end) if end else end)


def hull(ranges: Sequence[KeyRange]) -> KeyRange:
    """The smallest range with all of these, which are ascending and at least one."""
    return KeyRange(ranges[0].start, ranges[-1].end)


def gaps(wanted: KeyRange, parts: Iterable[KeyRange]) -> list[KeyRange]:
    """Return the parts of ``wanted`` that no part covers, in order. Parts may overlap and extend beyond ``wanted``."""
    missing: list[KeyRange] = []
    reached = wanted.start
    for part in sorted(parts):
        if part.is_empty or (part.end and part.end <= reached):
            continue
        if wanted.end and part.start >= wanted.end:
            break
        if part.start > reached:
            missing.append(KeyRange(reached, part.start))
        if not part.end:
            return missing
        reached = part.end
    if not wanted.end or reached < wanted.end:
        missing.append(KeyRange(reached, wanted.end))
    return missing


def subtract(wanted: Iterable[KeyRange], parts: Sequence[KeyRange]) -> list[KeyRange]:
    """Return the parts of each range of ``wanted`` that no part covers."""
    return [gap for whole in wanted for gap in gaps(whole, parts)]


_WINDOW = 8
"""Bytes after the common prefix that are used: enough to halve 64 times."""


def middle_key(low: bytes, high: bytes) -> bytes | None:
    """A short key in (low, high], about half-way as bytes count; None when ``low`` is not below ``high``.

    Keys are read as fractions, so only their first bytes that differ matter.
    """
    if low >= high:
        return None
    prefix = next((at for at, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), len(low))
    first, last = (int.from_bytes(key[prefix : prefix + _WINDOW].ljust(_WINDOW, b"\0"), "big") for key in (low, high))
    middle = low[:prefix] + ((first + last + 1) // 2).to_bytes(_WINDOW, "big").rstrip(b"\0")
    return middle if low < middle <= high else high
