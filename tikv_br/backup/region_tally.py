"""Counts the rows of a task by the regions that they came from."""

from __future__ import annotations

from dataclasses import dataclass, field

from formats.checksum import Checksum
from formats.errors import DamagedBytes
from tikv_br.backup.convert import Converter
from tikv_br.backupset.coverage import KeyRange, intersection
from tikv_br.backupset.regions import RegionPart
from tikv_br.cluster.regions import RegionCache


@dataclass(slots=True)
class RegionTally:
    """Is told pages in the order of their keys; none reaches beyond the region that it came from."""

    regions: RegionCache
    converter: Converter
    interval: KeyRange
    """Of the task, in RPC keys of the source."""
    _here: KeyRange | None = None
    """What of the interval lies in the region of the last page."""
    _reached: bytes = b""
    """Where the part before it ended."""
    _sums: Checksum = field(default_factory=Checksum)
    _done: list[RegionPart] = field(default_factory=list)

    def add(self, first_key: bytes, rows: Checksum) -> None:
        """Count a page by its first RPC key; ``rows`` is in the form of the target. Raises `ClusterError`."""
        if self._here is None or (self._here.end and first_key >= self._here.end):
            self._close()
            self._here = self._region_of(first_key)
        self._sums += rows

    def narrow(self, end: bytes) -> None:
        """Count no further than to this RPC key, before which all pages so far lie: the rest is another's."""
        self.interval = KeyRange(self.interval.start, end)
        if self._here is not None:
            self._here = intersection(self._here, self.interval)

    def parts(self) -> tuple[RegionPart, ...]:
        """What was counted; regions without rows are left out."""
        self._close()
        return tuple(self._done)

    def _close(self) -> None:
        if self._here is not None:
            self._reached = self._here.end
            if self._sums.total_kvs:
                self._done.append(part_of(self.converter.target_range(self._here), self._sums))
        self._here, self._sums = None, Checksum()

    def _region_of(self, key: bytes) -> KeyRange:
        codec = self.converter.source
        region = self.regions.locate(codec.bound(key))
        try:
            start = codec.from_bound(region.start)
        except DamagedBytes:  # PD can be made to split anywhere
            start = key
        start = max(start, self._reached)  # it may have merged with the one before
        try:
            end = self._end(region.end)
        except DamagedBytes:
            end = key + b"\0"
        return intersection(self.interval, KeyRange(start, end))

    def _end(self, bound: bytes) -> bytes:
        codec = self.converter.source
        beyond = not bound or (self.interval.end and codec.bound(self.interval.end) <= bound)
        return self.interval.end if beyond else codec.from_bound(bound)


def part_of(span: KeyRange, sums: Checksum) -> RegionPart:
    """One region's, in RPC keys of the target."""
    return RegionPart(span.start, span.end, sums.total_kvs, sums.total_bytes)
