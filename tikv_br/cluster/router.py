"""Sends a request to the store that leads its key, and follows the region when it moves, splits or merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tikv_br import retry
from tikv_br.cluster.channel import FailedUnknown
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.cluster.region_errors import Action, RegionErrorSeen
from tikv_br.cluster.regions import Peer, Region, RegionCache
from tikv_br.cluster.store import StoreClient, StorePool
from tikv_br.errors import ClusterUnreachable, RequestRefused, RetryBudgetExhausted, StoreFull
from tikv_br.retry import Backoffer

BATCH_BYTES = 256 << 10
"""Keys and values of one batch: the whole batch becomes one Raft entry, whose limit is 8 MiB."""
BATCH_ITEMS = 512
"""Keys or pairs of one batch."""

T = TypeVar("T")


def send_in_halves(batch: Sequence[T], send: Callable[[Sequence[T]], None]) -> int:
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


class Router:
    """Routes by key, retries by the table of `region_errors`. Thread-safe."""

    def __init__(
        self,
        regions: RegionCache,
        stores: StorePool,
        config: ClusterConfig,
        space_of: Callable[[int], str] = lambda _store_id: "",
    ) -> None:
        """``space_of`` describes the space on a store's disk."""
        self.regions = regions
        self._stores = stores
        self.config = config
        self._space_of = space_of

    def call(
        self, bound: bytes, send: Callable[[Region, StoreClient], T], what: str, *, retry_unknown: bool = False
    ) -> T:
        """Run ``send(region, store)`` with the region that holds the physical key `bound` and its leader's store.

        `send` asks for what it wants of *that* region (it may be another at each try) and raises `RegionErrorSeen`
        for a region error in the answer (`check_region_error`); it is run again until it returns.

        Raises `RetryBudgetExhausted` when the budget is spent, `RequestRefused` for permanent errors, and
        whatever else `send` raises. What `send` does may be done twice: a request whose answer is lost is sent again. With
        `retry_unknown` gRPC's UNKNOWN counts as no answer. That is right for RawKV, which refuses in answers: UNKNOWN comes from a proxy, or
        from a store that is ending.
        """
        with Backoffer(what, self.config.retry) as backoffer:
            attempt = _Call(self, what, backoffer)
            while True:
                region = self.regions.locate(bound)
                try:
                    store = self._stores.get(region.leader.store_id)
                except RequestRefused as error:  # the store has left the cluster, and the region has moved
                    self.regions.invalidate(region.id)
                    backoffer.wait(retry.REGION_MISS, error)
                    continue
                try:
                    return send(region, store)
                except RegionErrorSeen as seen:
                    attempt.after_region_error(region, seen)
                except ClusterUnreachable as error:
                    attempt.after_no_answer(region, error)
                except FailedUnknown as error:
                    if not retry_unknown:
                        raise
                    attempt.after_no_answer(region, error)

    def full_store(self, store_id: int, what: str, cause: str) -> StoreFull:
        """The error for a store whose disk stays full."""
        return StoreFull(f"{what}: {self._stores.get(store_id)} has no space left{self._space_of(store_id)}: {cause}")

    def forget_store(self, store_id: int) -> None:
        """Ask PD for a store's address again."""
        self._stores.forget(store_id)


class _Call:
    """State of one call: its retries and the hints about leaders that it followed."""

    def __init__(self, router: Router, what: str, backoffer: Backoffer) -> None:
        self._router = router
        self._regions = router.regions
        self._what = what
        self._backoffer = backoffer
        self._hints = 0
        self._silent: set[int] = set()

    def after_region_error(self, region: Region, seen: RegionErrorSeen) -> None:
        """Do what the table says, wait, and return for the next try; or raise."""
        reaction = seen.reaction
        match reaction.action:
            case Action.FAIL:
                raise RequestRefused(f"{self._what}: region {region.id}: {seen}") from None
            case Action.SWITCH_LEADER:
                if self._follow_leader_hint(region, seen.error.not_leader):
                    return
            case Action.APPLY_REGIONS:
                apply_current_regions(self._regions, region, seen.error.epoch_not_match)
            case Action.RELOCATE:
                self._regions.invalidate(region.id)
            case Action.RECONNECT:
                self._regions.invalidate(region.id)
                self._router.forget_store(region.leader.store_id)
            case Action.RETRY:
                pass
        self._wait(region, seen)

    def _wait(self, region: Region, seen: RegionErrorSeen) -> None:
        """Wait before the next try. Raises `StoreFull` if the budget is spent on a full disk."""
        asked = seen.error.server_is_busy.backoff_ms / 1000
        try:
            self._backoffer.wait(seen.reaction.backoff, f"region {region.id}: {seen}", at_least=asked)
        except RetryBudgetExhausted:
            if seen.kind != "disk_full":
                raise
            store_id = next(iter(seen.error.disk_full.store_id), region.leader.store_id)
            raise self._router.full_store(store_id, self._what, seen.error.message) from None

    def after_no_answer(self, region: Region, error: ClusterUnreachable | FailedUnknown) -> None:
        """Try the region's other peers in turn, then ask PD again."""
        self._silent.add(region.leader.store_id)
        self._backoffer.wait(retry.STORE_UNREACHABLE, error)
        other = next((peer for peer in region.peers if peer.voter and peer.store_id not in self._silent), None)
        if other is not None:
            self._regions.switch_leader(region.id, other)
            return
        self._silent.clear()
        self._regions.invalidate(region.id)
        self._router.forget_store(region.leader.store_id)

    def _follow_leader_hint(self, region: Region, error: errorpb_pb2.NotLeader) -> bool:
        """Switch to the leader that a store names; True when the next try needs no wait."""
        if not apply_leader_hint(self._regions, region, error):
            return False
        self._hints += 1
        return self._hints == 1  # two stores that name each other must not keep us spinning


def apply_leader_hint(regions: RegionCache, region: Region, error: errorpb_pb2.NotLeader) -> bool:
    """Switch to the leader that a store names; False if it names none; the region is then removed from the cache."""
    if not error.HasField("leader"):
        regions.invalidate(region.id)
        return False
    regions.switch_leader(region.id, Peer.of(error.leader))
    return True


def apply_current_regions(regions: RegionCache, region: Region, error: errorpb_pb2.EpochNotMatch) -> None:
    """Apply the store's regions if newer than the cached ones; if the store is behind, only wait."""
    sent = [Region.of(item).with_leader_on(region.leader.store_id) for item in error.current_regions]
    same = next((item for item in sent if item.id == region.id), None)
    if same is not None and (same.version, same.conf_ver) < (region.version, region.conf_ver):
        return
    regions.invalidate(region.id)
    regions.update(sent)
