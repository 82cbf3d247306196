"""Ranges of keys: `KeyRange` and its set operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tikv_br.formats.json_types import Hex
from tikv_br.formats.keys.text import show_key


@dataclass(frozen=True, slots=True, order=True)
class KeyRange:
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
