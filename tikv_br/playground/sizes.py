"""How much data each region holds: counted when asked for, and again after enough was written to it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from tikv_br.playground.engine import Engine
from tikv_br.playground.region import Region

_RECOUNT_SHARE: Final = 8
"""A region is counted again when an eighth of its size was written since."""


@dataclass(frozen=True, slots=True)
class RegionSize:
    """Rows (all versions) and bytes of keys and values of a region."""

    rows: int
    size: int


@dataclass(slots=True)
class _Count:
    bounds: tuple[bytes, bytes]
    size: RegionSize


class RegionSizes:
    """The approximate sizes that PD and the split checker go by. Thread-safe."""

    def __init__(self, engine: Engine, weight: int = 1) -> None:
        """Each byte that there is counts as ``weight``."""
        self._engine = engine
        self._weight = weight
        self._lock = threading.Lock()
        self._counts: dict[int, _Count] = {}
        self._written: dict[int, int] = {}
        self.total_written = 0
        """Bytes written to all regions since the start: while it stands still, nobody writes."""

    def written(self, region_id: int, size: int) -> None:
        """Note ``size`` bytes written to a region; after an ingest, the size of the files."""
        with self._lock:
            self._written[region_id] = self._written.get(region_id, 0) + size * self._weight
            self.total_written += size

    def forget(self, region_id: int) -> None:
        """Have a region counted again before its size is told: its data were removed in bulk."""
        with self._lock:
            self._counts.pop(region_id, None)

    def at_most(self, region: Region) -> int:
        """Bytes that a region cannot exceed, without counting if it was counted once in its bounds."""
        with self._lock:
            count = self._counts.get(region.id)
            if count is not None and count.bounds == region.data_range():
                return count.size.size + self._written.get(region.id, 0)
        return self.of(region).size

    def of(self, region: Region) -> RegionSize:
        """The size of a region as of not long ago."""
        with self._lock:
            count = self._counts.get(region.id)
            written = self._written.get(region.id, 0)
        bounds = region.data_range()
        if count is not None and count.bounds == bounds and written * _RECOUNT_SHARE <= count.size.size:
            return count.size
        counted = self._count(*bounds)
        with self._lock:
            self._counts[region.id] = _Count(bounds, counted)
            self._written[region.id] = max(0, self._written.get(region.id, 0) - written)
        return counted

    def _count(self, start: bytes, end: bytes) -> RegionSize:
        rows = size = 0
        for key, value in self._engine.iterate(start, end):
            rows += 1
            size += len(key) + len(value)
        return RegionSize(rows, size * self._weight)
