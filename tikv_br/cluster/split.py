"""Splits regions at given keys, and has PD spread them over the stores."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from formats.keys import KeyCodec
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.region_errors import check_region_error
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import RequestRefused

SPLIT_KEYS = 1024
"""Keys that one request may carry."""
SCATTER_IDS = 256
"""Regions that one request asks PD to scatter."""
POLL_SECONDS = 0.2
_NOTHING_TO_SPLIT = "no valid key found for split"
_SCATTER = "scatter-region"


def split_at(cluster: Cluster, codec: KeyCodec, rpc_keys: Iterable[bytes]) -> list[Region]:
    """Make each of these RPC keys the start of a region; keys that are one already count as done.

    Returns the regions that came out of splits, as the stores reported them. Raises as `Router.call` does.
    """
    keys = sorted(set(rpc_keys))
    made: dict[int, Region] = {}
    done = 0

    def send(region: Region, store: StoreClient) -> int:
        inside = [key for key in keys[done : done + SPLIT_KEYS] if region.contains(codec.bound(key))]
        wanted = [key for key in inside if codec.bound(key) != region.start]
        pieces = _split(cluster, codec, region, store, wanted) if wanted else []
        cluster.regions.update(pieces)
        made.update((piece.id, piece) for piece in pieces)
        return len(inside)

    while done < len(keys):
        done += cluster.router.call(codec.bound(keys[done]), send, "SplitRegion")
    return sorted(made.values(), key=lambda region: region.start)


def _split(
    cluster: Cluster, codec: KeyCodec, region: Region, store: StoreClient, keys: Sequence[bytes]
) -> list[Region]:
    request = kvrpcpb_pb2.SplitRegionRequest(
        context=region.context(codec.api_version, cluster.cluster_id),
        split_keys=keys,  # not encoded: the store does that when is_raw_kv is set
        is_raw_kv=True,
    )
    answer = store.split_region(request)
    if _NOTHING_TO_SPLIT in answer.region_error.message:
        return []
    check_region_error(answer)
    return [Region.of(piece).led_from(region.leader.store_id) for piece in answer.regions]


def scatter(cluster: Cluster, regions: Sequence[Region], timeout: float, group: str = "") -> list[int]:
    """Spread regions over the stores and wait, up to `timeout` seconds, until PD has moved them.

    Returns the ids that were not done in time: they hold data all the same, only not evenly. Raises `ClusterError` when
    PD is in trouble.
    """
    deadline = time.monotonic() + timeout
    asked = _ask_to_scatter(cluster, [region.id for region in regions], deadline, group)
    waiting = [region.id for region in regions]
    while True:
        waiting = [region_id for region_id in waiting if region_id not in asked or _moving(cluster, region_id)]
        if not (set(waiting) & asked) or time.monotonic() > deadline:
            return waiting
        time.sleep(POLL_SECONDS)


def _ask_to_scatter(cluster: Cluster, region_ids: Sequence[int], deadline: float, group: str) -> set[int]:
    """The ids that PD agreed to scatter; it first has to hear of new regions, and to find them replicated."""
    todo = list(region_ids)
    while todo:
        known = [region_id for region_id in todo[:SCATTER_IDS] if cluster.pd.region_by_id(region_id) is not None]
        refused = set(_try_scatter(cluster, known, group)) if known else set()
        agreed = set(known) - refused
        todo = [region_id for region_id in todo if region_id not in agreed]
        if not agreed:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
    return set(region_ids) - set(todo)


def _try_scatter(cluster: Cluster, region_ids: Sequence[int], group: str) -> Sequence[int]:
    """The ids that PD did not take; "not fully replicated" and "has no leader" pass with time."""
    try:
        return cluster.pd.scatter(region_ids, group)
    except RequestRefused:
        return region_ids


def _moving(cluster: Cluster, region_id: int) -> bool:
    operator = cluster.pd.operator(region_id)
    return operator is not None and operator.desc == _SCATTER and operator.running
