"""Key intervals: what is missing, and the proof that parts make up the whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tikv_br.errors import CoverageError


@dataclass(frozen=True, slots=True, order=True)
class KeyRange:
    """RPC keys ``[start, end)``; an empty end is no bound."""

    start: bytes
    end: bytes

    @property
    def is_empty(self) -> bool:
        """Whether no key lies in it."""
        return bool(self.end) and self.start >= self.end

    def contains(self, other: KeyRange) -> bool:
        """Whether all of ``other`` lies in it."""
        return self.start <= other.start and (not self.end or (bool(other.end) and other.end <= self.end))

    def __str__(self) -> str:
        return f"[{self.start.hex() or 'start'}, {self.end.hex() or 'end'})"


def intersection(one: KeyRange, other: KeyRange) -> KeyRange:
    """What two ranges have in common; it may be empty."""
    start = max(one.start, other.start)
    end = min(one.end or other.end, other.end or one.end)
    return KeyRange(start, max(start, end) if end else end)


def missing(wanted: KeyRange, parts: Iterable[KeyRange]) -> list[KeyRange]:
    """What of ``wanted`` no part covers, in order. Parts may overlap each other and reach beyond ``wanted``."""
    holes: list[KeyRange] = []
    reached = wanted.start
    for part in sorted(parts):
        if part.is_empty or (part.end and part.end <= reached):
            continue
        if wanted.end and part.start >= wanted.end:
            break
        if part.start > reached:
            holes.append(KeyRange(reached, part.start))
        if not part.end:
            return holes
        reached = part.end
    if not wanted.end or reached < wanted.end:
        holes.append(KeyRange(reached, wanted.end))
    return holes


def subtract(wanted: Iterable[KeyRange], parts: Sequence[KeyRange]) -> list[KeyRange]:
    """What of each of ``wanted`` no part covers."""
    return [hole for whole in wanted for hole in missing(whole, parts)]


def prove(wanted: Sequence[KeyRange], parts: Iterable[KeyRange]) -> None:
    """Raise `CoverageError` unless ``parts`` are ``wanted`` cut into pieces: no hole, no overlap, nothing beyond."""
    ordered = sorted(parts)
    prove_disjoint(ordered)
    for part in ordered:
        if part.is_empty or not any(whole.contains(part) for whole in wanted):
            raise CoverageError(f"{part} is no part of what was to be backed up")
    for whole in wanted:
        if not whole.is_empty and (holes := missing(whole, ordered)):
            raise CoverageError(f"nothing covers {holes[0]}, and {len(holes) - 1} further holes")


def prove_disjoint(parts: Iterable[KeyRange]) -> None:
    """Raise `CoverageError` when two parts have a key in common."""
    previous: KeyRange | None = None
    for part in sorted(part for part in parts if not part.is_empty):
        if previous is not None and (not previous.end or part.start < previous.end):
            raise CoverageError(f"{previous} and {part} overlap")
        previous = part
