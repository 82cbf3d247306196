"""Cuts keys or pairs into batches that each lie within one region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tikv_br.cluster.region_errors import RegionErrorSeen
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient

BATCH_BYTES = 256 << 10
"""Keys and values of one batch: the whole batch becomes one Raft entry, whose limit is 8 MiB."""
BATCH_ITEMS = 512
"""Keys or pairs of one batch."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchSender(Generic[T]):
    """Sends the head of a list of items that ascend by key: as much as one region and one batch take."""

    bound_of: Callable[[T], bytes]
    """The physical key of an item."""
    size_of: Callable[[T], int]
    """What an item weighs, in bytes."""
    send: Callable[[Region, StoreClient, Sequence[T]], None]
    """Sends one batch; raises `RegionErrorSeen`."""

    def send_head(self, region: Region, store: StoreClient, items: Sequence[T], first: int) -> int:
        """Send a batch that begins with ``items[first]``, which `region` holds; returns how many items it took.

        A batch that the store finds too large is halved until it fits, down to one item.
        """
        return send_what_fits(self._head(region, items, first), lambda batch: self.send(region, store, batch))

    def _head(self, region: Region, items: Sequence[T], first: int) -> Sequence[T]:
        size = 0
        for at in range(first, min(first + BATCH_ITEMS, len(items))):
            size += self.size_of(items[at])
            if at > first and (size > BATCH_BYTES or not region.contains(self.bound_of(items[at]))):
                return items[first:at]
        return items[first : first + BATCH_ITEMS]


def send_what_fits(batch: Sequence[T], send: Callable[[Sequence[T]], None]) -> int:
    """Send a batch, or its beginning: it is halved as long as the store finds it too large. How many items were sent."""
    while True:
        try:
            send(batch)
        except RegionErrorSeen as seen:
            if seen.kind != "raft_entry_too_large" or len(batch) == 1:
                raise
            batch = batch[: len(batch) // 2]
        else:
            return len(batch)
