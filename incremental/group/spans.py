"""Cuts the span of a changefeed along the borders of regions. Pure, but for asking PD where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from formats.api_version import ApiVersion
from formats.errors import DamagedBytes
from formats.keys import KeyCodec
from incremental.group.model import ChangefeedInfo
from tikv_br.backupset.coverage import KeyRange
from tikv_br.cluster.regions import Region


class RegionApi(Protocol):
    """What is needed of `PdClient`."""

    def scan_regions(self, start: bytes, end: bytes, limit: int = 0) -> list[Region]:
        """The regions that cover a range of bounds."""


def sub_spans(pd: RegionApi, changefeed: ChangefeedInfo) -> list[KeyRange]:
    """The changefeed's span in as many parts as it asks for, or fewer where there are fewer regions. Raises `ClusterError`."""
    codec = KeyCodec(ApiVersion.V2, changefeed.keyspace_id)
    whole = changefeed.range
    regions = pd.scan_regions(codec.bound(whole.start), codec.bound(whole.end))
    return cut(whole, [key for region in regions if (key := _key(codec, region.start))], changefeed.spans)


def cut(whole: KeyRange, borders: Sequence[bytes], parts: int) -> list[KeyRange]:
    """A range in at most so many parts of about equally many regions, which meet at `borders` (ascending RPC keys)."""
    inner = [key for key in borders if whole.start < key < whole.end]
    count = min(parts, len(inner) + 1)
    chosen = [inner[at * (len(inner) + 1) // count - 1] for at in range(1, count)]
    return [KeyRange(*pair) for pair in zip([whole.start, *chosen], [*chosen, whole.end], strict=True)]


def _key(codec: KeyCodec, bound: bytes) -> bytes:
    """The RPC key at which a region begins; empty for a border that is no key's: nothing is cut there."""
    try:
        return codec.from_bound(bound)
    except DamagedBytes:
        return b""
