"""A cursor over a range of RPC keys that takes one region's part at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from formats.errors import DamagedBytes
from formats.keys import KeyCodec
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.cluster.router import Router
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import ClusterUnfit

T = TypeVar("T")

SendPart = Callable[[StoreClient, kvrpcpb_pb2.Context, bytes, bytes], T]
"""Sends a request for a part [start, end) of the range that lies in one region; raises `RegionErrorSeen`."""


class RangeWalk:
    """What is left of an RPC range [start, end); an empty end, possible before V2 only, is no end. For one thread."""

    def __init__(self, router: Router, codec: KeyCodec, cluster_id: int, start: bytes, end: bytes) -> None:
        self._router = router
        self._codec = codec
        self._cluster_id = cluster_id
        self._end = end
        self._end_bound = codec.bound(end)
        self.cursor = start
        """Where the rest begins."""
        self.done = bool(end) and start >= end
        """Whether nothing is left."""

    def send_part(self, send: SendPart[T], what: str) -> tuple[T, bytes]:
        """Send for the first part of the rest, as `Router.call` does; returns the answer and the end of that part.

        The cursor stays: `advance` moves it, as far as the answer went.
        """

        def send_to(region: Region, store: StoreClient) -> tuple[T, bytes]:
            end = self._end_within(region)
            context = region.context(self._codec.api_version, self._cluster_id)
            return send(store, context, self.cursor, end), end

        return self._router.call(self._codec.bound(self.cursor), send_to, what, unknown_passes=True)

    def advance(self, to: bytes) -> None:
        """Move the cursor to a key, or with an empty one to the end of a range without end."""
        self.done = not to or bool(self._end and to >= self._end)
        self.cursor = to

    def _end_within(self, region: Region) -> bytes:
        """Where the part ends that lies in this region."""
        if not region.end or (self._end_bound and self._end_bound <= region.end):
            return self._end
        try:
            end = self._codec.from_bound(region.end)
        except DamagedBytes as error:
            raise ClusterUnfit(f"region {region.id} ends at {region.end.hex()}, which is no key: {error}") from None
        if end <= self.cursor:
            raise ClusterUnfit(f"region {region.id} ends at {region.end.hex()}, in the middle of a key's versions")
        return end
