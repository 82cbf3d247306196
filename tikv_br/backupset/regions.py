"""How much of a backup each region of the source held, for who wants to see where the data lie; nothing rests on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST = 1000
"""That a backup keeps: neighbours are put together where there are more."""


@dataclass(frozen=True, slots=True)
class RegionPart:
    """What one region held when it was backed up, or several neighbouring ones. RPC keys, as the files have them."""

    start: bytes
    end: bytes
    """Exclusive; ``b""`` = unbounded."""
    total_kvs: int
    total_bytes: int
    """Keys and values, as the files have them."""
    regions: int = 1
    """0 = it is not known how many."""


def put_together(parts: Sequence[RegionPart], most: int = MOST) -> tuple[RegionPart, ...]:
    """Parts in the order of their keys, neighbours put together where there are more than ``most``."""
    ordered = sorted(parts, key=lambda part: part.start)
    size = -(-len(ordered) // most) or 1
    return tuple(_one(ordered[at : at + size]) for at in range(0, len(ordered), size))


def _one(parts: Sequence[RegionPart]) -> RegionPart:
    return RegionPart(
        parts[0].start,
        parts[-1].end,
        sum(part.total_kvs for part in parts),
        sum(part.total_bytes for part in parts),
        sum(part.regions for part in parts) if all(part.regions for part in parts) else 0,
    )
