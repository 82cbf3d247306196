"""The stream of one store, read by a thread of its own, and the subscriptions on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from incremental.feed.coverage import Piece
from incremental.feed.inbox import Inbox, InboxClosed
from tikv_br.cluster.event_feed import EventFeed
from tikv_br.cluster.pb import cdcpb_pb2, metapb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.errors import ClusterUnreachable, TikvBrError

if TYPE_CHECKING:
    from incremental.feed.locator import Located

CLIENT_VERSION = "6.2.0"
"""What we say that we are: from 4.0.8 stores send resolved-ts of many regions at once, from 5.3.0 they check the cluster
id, and 6.2.0 is the first with RawKV."""
MESSAGE_OVERHEAD = 256
"""What a message that waits takes beside its bytes, roughly: stores send rows one by one, and some take less than this."""


@dataclass(slots=True, eq=False)
class Subscription:
    """A region on a stream."""

    region: Region
    request_id: int
    piece: Piece
    moved: float
    """When its resolved-ts moved last; at first, when it was asked for."""
    initialized: bool = False
    """Whether the incremental scan has ended; before that nothing is resolved."""

    @property
    def key(self) -> tuple[int, int]:
        """What events name it by."""
        return self.region.id, self.request_id


@dataclass(frozen=True, slots=True)
class Arrived:
    """Messages of a stream, as they came."""

    stream: StoreStream
    data: list[bytes]


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream is over, and with it all its subscriptions."""

    stream: StoreStream
    error: TikvBrError


class StoreStream:
    """Owned by the feed's thread but for its reader, which fills the inbox."""

    def __init__(self, call: EventFeed, inbox: Inbox[Arrived | Ended | Located], cluster_id: int) -> None:
        """Starts to read at once."""
        self.call = call
        self._inbox = inbox
        self._header = cdcpb_pb2.Header(cluster_id=cluster_id, ticdc_version=CLIENT_VERSION)
        self._by_key: dict[tuple[int, int], Subscription] = {}
        self._by_region: dict[int, Subscription] = {}
        self.scan_ended = 0.0
        """When (monotonic) the store last said that an incremental scan has ended."""
        self._reader = threading.Thread(target=self._read, name=f"feed of {call}", daemon=True)
        self._reader.start()

    @property
    def store_id(self) -> int:
        """Whose stream it is."""
        return self.call.store.id

    @property
    def subscriptions(self) -> list[Subscription]:
        """All that live on it."""
        return list(self._by_key.values())

    def find(self, region_id: int, request_id: int) -> Subscription | None:
        """The subscription that an event is for; None when it is over."""
        return self._by_key.get((region_id, request_id))

    def resolved_for(self, region_ids: list[int], request_id: int) -> Iterator[Subscription]:
        """The subscriptions that a resolved-ts is for; before multiplexing it names no request (0)."""
        for region_id in region_ids:
            found = self._by_key.get((region_id, request_id)) if request_id else self._by_region.get(region_id)
            if found is not None:
                yield found

    def register(self, subscription: Subscription) -> None:
        """Ask for the changes of a region's part of the span since its resolved-ts."""
        region, piece = subscription.region, subscription.piece
        self._by_key[subscription.key] = self._by_region[region.id] = subscription
        self.call.send(
            cdcpb_pb2.ChangeDataRequest(
                header=self._header,
                region_id=region.id,
                region_epoch=metapb_pb2.RegionEpoch(conf_ver=region.conf_ver, version=region.version),
                checkpoint_ts=piece.resolved,
                start_key=piece.start,
                end_key=piece.end,
                request_id=subscription.request_id,
                register=cdcpb_pb2.ChangeDataRequest.Register(),
                kv_api=cdcpb_pb2.ChangeDataRequest.RawKV,
            )
        )

    def deregister(self, subscription: Subscription) -> None:
        """Ask for no more of it; what still comes is for nobody."""
        self.drop(subscription)
        self.call.send(
            cdcpb_pb2.ChangeDataRequest(
                header=self._header,
                region_id=subscription.region.id,
                request_id=subscription.request_id,
                deregister=cdcpb_pb2.ChangeDataRequest.Deregister(),
            )
        )

    def drop(self, subscription: Subscription) -> None:
        """Forget a subscription that the store has ended."""
        self._by_key.pop(subscription.key, None)
        if self._by_region.get(subscription.region.id) is subscription:
            del self._by_region[subscription.region.id]

    def cancel(self) -> None:
        """End the stream; `Ended` still comes, unless the inbox is closed."""
        self.call.cancel()

    def join(self, timeout: float) -> None:
        """Wait for the reader, which ends after `cancel` once the inbox has room or is closed."""
        self._reader.join(timeout)

    def _read(self) -> None:
        error: TikvBrError = ClusterUnreachable(f"{self.call}: the reader of its feed has failed")
        try:
            for data in self.call:
                self._inbox.put(Arrived(self, [data]), len(data) + MESSAGE_OVERHEAD)
        except InboxClosed:
            pass
        except TikvBrError as met:
            error = met
        finally:
            self.call.cancel()
            self._inbox.put_now(Ended(self, error))
