"""Where writes meet change feeds: each V2 write goes through here, and each subscription is known here.

One lock makes one order of three things: a write with its events, a change of a region as far as feeds see it, and a
subscription. So a write that was let in before its region split or moved is refused, as Raft would, instead of being
missed by whoever scans the region afterwards.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from formats.api_version import ApiVersion
from tikv_br.cluster.pb import cdcpb_pb2, metapb_pb2
from tikv_br.playground import cdc_errors, cdc_rows, region_errors
from tikv_br.playground.cdc_rows import Event, Span
from tikv_br.playground.encoding import Row
from tikv_br.playground.node import Failpoints, StoreNode
from tikv_br.playground.raw_faults import RegionFault
from tikv_br.playground.region import Region
from tikv_br.playground.regions import RegionTable


class Outbox(Protocol):
    """The stream on which a subscription's events go out. Called under the hub's lock."""

    def push(self, event: Event) -> None:
        """Send an event, after those before."""
        ...

    def has_room(self, event: Event) -> bool:
        """Whether the stream may hold it until the client takes it."""
        ...


@dataclass(slots=True, eq=False)
class Subscription:
    """One region's changes for one request of one stream."""

    outbox: Outbox
    store_id: int
    region_id: int
    request_id: int
    span: Span
    raw: bool
    """Whether it asks for RawKV; one for transactions never sees a row here."""
    version: int = 0
    """Of the region's epoch, when it began."""
    initialized: bool = False
    """Whether the incremental scan is over; resolved-ts are told from then on."""
    deaf_until: float = 0.0
    """While its store has not noticed (until this monotonic time) that it lost the lead; 0 while it leads."""
    ended: bool = False


class ChangeHub:
    """All subscriptions of a playground, store by store. Thread-safe."""

    def __init__(self, regions: RegionTable, failpoints: Failpoints) -> None:
        self.lock = threading.Lock()
        self._regions = regions
        self._failpoints = failpoints
        self._subscriptions: dict[tuple[int, int], list[Subscription]] = {}
        self._pins: defaultdict[int, set[int]] = defaultdict(set)
        self._applied: defaultdict[int, int] = defaultdict(int)
        regions.on_change(self._region_changed)

    # -- writes -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, node: StoreNode) -> Iterator[int]:
        """Give a write its timestamp: 0 but in V2. One before it holds back the store's resolved-ts meanwhile."""
        if node.api_version is not ApiVersion.V2:
            yield 0
            return
        with self.lock:
            pin = node.causal.next_ts()
            ts = node.causal.next_ts()
            self._pins[node.store_id].add(pin)
        try:
            yield ts
        finally:
            with self.lock:
                self._pins[node.store_id].discard(pin)

    def write(self, node: StoreNode, region: Region, puts: Sequence[Row], deletes: Sequence[bytes]) -> None:
        """Write rows of ``region``, and tell those who subscribed to it.

        Raises `RegionFault` when, in V2, the region has been split, merged or moved since it was looked up.
        """
        if node.api_version is not ApiVersion.V2:
            node.engine.write(puts, deletes)
            return
        with self.lock:
            self._check_unchanged(region)
            node.engine.write(puts, deletes)
            self._applied[region.id] += 1
            for_whom = [each for each in self._of(node.store_id, region.id) if each.raw and not each.deaf_until]
            if for_whom:
                self._tell(for_whom, cdc_rows.rows_of(puts))

    def _check_unchanged(self, region: Region) -> None:
        now = self._regions.get(region.id)
        if now is None:
            raise RegionFault(region_errors.region_not_found(region.id, read=False))
        if now.leader_store != region.leader_store:
            raise RegionFault(self._regions.not_leader(now))
        if now.version != region.version:
            sent = region.to_pb().region_epoch
            raise RegionFault(region_errors.epoch_not_match(now, sent, self._regions.siblings(now, sent)))

    def _tell(self, subscriptions: Sequence[Subscription], rows: Sequence[Event.Row]) -> None:
        for each in subscriptions:
            wanted = [row for row in rows if each.span.holds(row.key)]
            if not wanted:
                continue
            event = cdc_rows.live_event(each.region_id, each.request_id, self._applied[each.region_id], wanted)
            if each.outbox.has_room(event):
                each.outbox.push(event)
            else:
                self._end(each, cdc_errors.congested(each.region_id))

    # -- subscriptions ------------------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription, epoch: metapb_pb2.RegionEpoch) -> cdcpb_pb2.Error | Region:
        """Begin with every write from now on; the region as it is now, or why it cannot be."""
        with self.lock:
            region = self._regions.get(subscription.region_id)
            if region is None or region.peer_on(subscription.store_id) is None:
                return cdc_errors.region_not_found(subscription.region_id)
            there = self._of(subscription.store_id, region.id)
            if any(self._same(each, subscription) for each in there):
                return cdc_errors.duplicate_request(region.id)
            if region.leader_store != subscription.store_id:
                return cdc_errors.not_leader(self._regions.not_leader(region))
            if epoch.version != region.version:
                return cdc_errors.stale_epoch(region, epoch, self._regions.siblings(region, epoch))
            subscription.version = region.version
            self._subscriptions[subscription.store_id, region.id] = [*there, subscription]
            return region

    def end(self, subscription: Subscription, error: cdcpb_pb2.Error) -> None:
        """Let an error be the last event of a subscription; no error when it has ended."""
        with self.lock:
            if not subscription.ended:
                self._end(subscription, error)

    def drop(self, outbox: Outbox) -> None:
        """Forget all subscriptions of a stream that is over."""
        with self.lock:
            for each in self._all_of(outbox):
                self._remove(each)

    def subscriptions(self, outbox: Outbox) -> list[Subscription]:
        """Those of a stream that have not ended."""
        with self.lock:
            return self._all_of(outbox)

    def describe(self) -> list[dict[str, object]]:
        """Every subscription, store by store, for the admin API; keys of the span in hex."""
        with self.lock:
            there = [each for place in sorted(self._subscriptions) for each in self._subscriptions[place]]
            return [
                {
                    "store_id": each.store_id,
                    "region_id": each.region_id,
                    "request_id": each.request_id,
                    "start": each.span.start.hex(),
                    "end": each.span.end.hex(),
                    "initialized": each.initialized,
                }
                for each in there
            ]

    def resolve(self, node: StoreNode, outbox: Outbox) -> tuple[int, list[Subscription]]:
        """A timestamp below all later writes of the store, and the subscriptions of a stream that may hear it.

        Every event up to it has been pushed. The caller holds the lock.
        """
        is_v2 = node.api_version is ApiVersion.V2
        ts = min([node.causal.next_ts() if is_v2 else node.tso.next(), *self._pins[node.store_id]])
        return ts, [each for each in self._all_of(outbox) if each.initialized and self._is_led(each)]

    def overrun(self, outbox: Outbox) -> list[Subscription]:
        """The subscriptions of a stream whose store has yet to notice that it lost the lead; ends those that are over."""
        with self.lock:
            deaf = [each for each in self._all_of(outbox) if each.deaf_until]
            for each in deaf:
                if time.monotonic() >= each.deaf_until:
                    self._end(each, self._lost(each))
            return [each for each in deaf if each.initialized and not each.ended]

    def _lost(self, subscription: Subscription) -> cdcpb_pb2.Error:
        region = self._regions.get(subscription.region_id)
        if region is None or region.peer_on(subscription.store_id) is None:
            return cdc_errors.region_not_found(subscription.region_id)
        return cdc_errors.not_leader(self._regions.not_leader(region))

    def _is_led(self, subscription: Subscription) -> bool:
        """Whether its store leads the region as it was: asked once a timestamp is taken that no next leader goes below."""
        region = self._regions.get(subscription.region_id)
        return (
            region is not None
            and not subscription.deaf_until
            and region.leader_store == subscription.store_id
            and region.version == subscription.version
        )

    @staticmethod
    def _same(one: Subscription, other: Subscription) -> bool:
        return one.outbox is other.outbox and one.request_id == other.request_id

    def _of(self, store_id: int, region_id: int) -> list[Subscription]:
        return self._subscriptions.get((store_id, region_id), [])

    def _all_of(self, outbox: Outbox) -> list[Subscription]:
        return [each for there in self._subscriptions.values() for each in there if each.outbox is outbox]

    def _end(self, subscription: Subscription, error: cdcpb_pb2.Error) -> None:
        self._remove(subscription)
        region_id, request_id = subscription.region_id, subscription.request_id
        subscription.outbox.push(Event(region_id=region_id, request_id=request_id, error=error))

    def _remove(self, subscription: Subscription) -> None:
        subscription.ended = True
        place = subscription.store_id, subscription.region_id
        rest = [each for each in self._of(*place) if each is not subscription]
        if rest:
            self._subscriptions[place] = rest
        else:
            self._subscriptions.pop(place, None)

    # -- regions ------------------------------------------------------------------------------------------------

    def _region_changed(self, old: Sequence[Region], new: Sequence[Region]) -> None:
        """End what was subscribed to regions that are no longer what they were."""
        with self.lock:
            for region in old:
                there = self._of(region.leader_store, region.id)
                known = [each for each in there if each.version == region.version]  # none that knows of the change
                if len(old) != len(new):  # a merge does not tell what became of the regions
                    self._end_all(known, cdc_errors.epoch_not_match(new if len(new) > 1 else []))
                else:
                    self._lose(known, new[0])

    def _lose(self, subscriptions: Sequence[Subscription], region: Region) -> None:
        """Another store leads the region: what was subscribed at the old one ends, at once or when that notices."""
        seconds = 0.0
        if subscriptions:
            seconds = self._failpoints.overrun(store_id=subscriptions[0].store_id, region_id=region.id)
        if seconds:
            for each in subscriptions:
                each.deaf_until = time.monotonic() + seconds
        else:
            self._end_all(subscriptions, cdc_errors.not_leader(self._regions.not_leader(region)))

    def _end_all(self, subscriptions: Sequence[Subscription], error: cdcpb_pb2.Error) -> None:
        for each in subscriptions:
            self._end(each, error)
