"""Sends a request to the store that leads its key, and follows the region when it moves, splits or merges."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from tikv_br.cluster import retry
from tikv_br.cluster.channel import FailedUnknown
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.cluster.region_errors import Action, RegionErrorSeen, check_region_error
from tikv_br.cluster.regions import Peer, Region, RegionCache
from tikv_br.cluster.retry import Backoffer
from tikv_br.cluster.store import StoreClient, StorePool
from tikv_br.errors import ClusterUnreachable, RequestRefused

__all__ = ["Router", "check_region_error", "take_hint", "take_regions"]

T = TypeVar("T")


class Router:
    """Routes by key, retries by the table of `region_errors`. Thread-safe."""

    def __init__(self, regions: RegionCache, stores: StorePool, config: ClusterConfig) -> None:
        self.regions = regions
        self._stores = stores
        self.config = config

    def call(
        self,
        bound: bytes,
        send: Callable[[Region, StoreClient], T],
        what: str,
        *,
        repeatable: bool = True,
        unknown_passes: bool = False,
    ) -> T:
        """Run ``send(region, store)`` with the region that holds the physical key `bound` and its leader's store.

        `send` asks for what it wants of *that* region (it may be another at each try) and raises `RegionErrorSeen`
        for a region error in the answer (`check_region_error`); it is run again until it returns.

        Raises `RetryBudgetExhausted` when the budget is spent, `RequestRefused` for errors that no retry cures, and
        whatever else `send` raises. With `repeatable` false a failure that may have taken effect raises
        `ClusterUnreachable` instead of being tried again. With `unknown_passes` gRPC's UNKNOWN is taken for silence: of
        RawKV, whose refusals come in answers, it is that of a proxy, or of a store that is ending.
        """
        attempt = _Call(self, what, repeatable=repeatable)
        while True:
            region = self.regions.locate(bound)
            store = self._leader_store(region, attempt)
            if store is None:
                continue
            try:
                return send(region, store)
            except RegionErrorSeen as seen:
                attempt.after_region_error(region, seen)
            except ClusterUnreachable as error:
                attempt.after_silence(region, error)
            except FailedUnknown as error:
                if not unknown_passes:
                    raise
                attempt.after_silence(region, error)

    def _leader_store(self, region: Region, attempt: _Call) -> StoreClient | None:
        """The leader's store; None, after a wait, when PD no longer knows it: then the region has moved."""
        try:
            return self._stores.get(region.leader.store_id)
        except RequestRefused as error:
            attempt.after_removed_store(region, error)
            return None

    def backoffer(self, what: str) -> Backoffer:
        """A fresh budget of this cluster's."""
        return Backoffer(what, self.config.retry_budget, self.config.busy_budget)

    def forget_store(self, store_id: int) -> None:
        """Ask PD for a store's address again."""
        self._stores.forget(store_id)


class _Call:
    """What one call has been through."""

    def __init__(self, router: Router, what: str, *, repeatable: bool) -> None:
        self._router = router
        self._regions = router.regions
        self._what = what
        self._repeatable = repeatable
        self._hints = 0
        self._silent: set[int] = set()

    @functools.cached_property
    def _backoffer(self) -> Backoffer:
        """Made when first needed: most calls succeed at once."""
        return self._router.backoffer(self._what)

    def after_region_error(self, region: Region, seen: RegionErrorSeen) -> None:
        """Do what the table says, wait, and return for the next try; or raise."""
        reaction = seen.reaction
        match reaction.action:
            case Action.FAIL:
                raise RequestRefused(f"{self._what}: region {region.id}: {seen}") from None
            case Action.RETRY_UNSURE if not self._repeatable:
                raise self._unsure(str(seen)) from None
            case Action.SWITCH_LEADER:
                if self._take_hint(region, seen.error.not_leader):
                    return
            case Action.TAKE_REGIONS:
                take_regions(self._regions, region, seen.error.epoch_not_match)
            case Action.RELOCATE:
                self._regions.invalidate(region.id)
            case Action.RECONNECT:
                self._regions.invalidate(region.id)
                self._router.forget_store(region.leader.store_id)
            case Action.RETRY | Action.RETRY_UNSURE:
                pass
        asked = seen.error.server_is_busy.backoff_ms / 1000
        self._backoffer.wait(reaction.backoff, f"region {region.id}: {seen}", at_least=asked)

    def after_silence(self, region: Region, error: ClusterUnreachable | FailedUnknown) -> None:
        """Try the region's other peers in turn, then ask PD again."""
        if not self._repeatable:
            raise self._unsure(error.message) from None
        self._silent.add(region.leader.store_id)
        self._backoffer.wait(retry.STORE_UNREACHABLE, error)
        other = next((peer for peer in region.peers if peer.voter and peer.store_id not in self._silent), None)
        if other is not None:
            self._regions.switch_leader(region.id, other)
            return
        self._silent.clear()
        self._regions.invalidate(region.id)
        self._router.forget_store(region.leader.store_id)

    def after_removed_store(self, region: Region, error: RequestRefused) -> None:
        """Forget a region whose leader is on a store that left the cluster."""
        self._regions.invalidate(region.id)
        self._backoffer.wait(retry.REGION_MISS, error)

    def _take_hint(self, region: Region, error: errorpb_pb2.NotLeader) -> bool:
        """Switch to the leader that a store names; True when the next try needs no wait."""
        if not take_hint(self._regions, region, error):
            return False
        self._hints += 1
        return self._hints == 1  # two stores that name each other must not keep us spinning

    def _unsure(self, cause: str) -> ClusterUnreachable:
        return ClusterUnreachable(f"{self._what}: whether it took effect is not known: {cause}")


def take_hint(regions: RegionCache, region: Region, error: errorpb_pb2.NotLeader) -> bool:
    """Switch to the leader that a store names; False when it names none: then the region is forgotten."""
    if not error.HasField("leader"):
        regions.invalidate(region.id)
        return False
    regions.switch_leader(region.id, Peer.of(error.leader))
    return True


def take_regions(regions: RegionCache, region: Region, error: errorpb_pb2.EpochNotMatch) -> None:
    """Take what the store sent if it is newer than ours; when the store lags behind, a wait is all it takes."""
    sent = [Region.of(item).led_from(region.leader.store_id) for item in error.current_regions]
    same = next((item for item in sent if item.id == region.id), None)
    if same is not None and (same.version, same.conf_ver) < (region.version, region.conf_ver):
        return
    regions.invalidate(region.id)
    regions.update(sent)
