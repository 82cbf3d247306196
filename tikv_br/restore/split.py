"""Split the target where files begin and spread the new regions over the stores, so that ingest runs everywhere at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from formats.keys import KeyCodec
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.region_errors import RegionErrorSeen
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import ClusterError

log = logging.getLogger(__name__)
MOST_KEYS = 1024
"""Keys of one SplitRegion."""
SCATTER_SECONDS = 60.0
"""How long to wait for the new regions to spread; a restore works without, only slower."""
_POLL_SECONDS = 0.2
_NOTHING_TO_SPLIT = "no valid key found for split"


def split_regions(cluster: Cluster, keys: Sequence[bytes]) -> list[int]:
    """Split at ascending RPC keys; returns the ids of the regions that came of it. A bound that is there already stays.

    Raises `ClusterError`.
    """
    codec = KeyCodec(cluster.api_version)
    made: list[int] = []
    done = 0
    while done < len(keys):
        rest = keys[done:]
        count, regions = cluster.router.call(
            codec.bound(rest[0]),
            lambda region, store, rest=rest: _split(cluster, codec, region, store, rest),  # type: ignore[misc]
            "split",
        )
        cluster.regions.update(regions)
        made += [region.id for region in regions]
        done += count
    return made


def _split(
    cluster: Cluster, codec: KeyCodec, region: Region, store: StoreClient, keys: Sequence[bytes]
) -> tuple[int, list[Region]]:
    """Split one region at those of ``keys`` that lie in it: how many those were, and what it became."""
    here = [key for key in keys[:MOST_KEYS] if region.contains(codec.bound(key))]
    inside = [key for key in here if codec.bound(key) != region.start]
    if not inside:
        return len(here), []
    context = region.context(codec.api_version, cluster.cluster_id)
    # Keys go as they are: with is_raw_kv the store encodes them itself.
    request = kvrpcpb_pb2.SplitRegionRequest(context=context, split_keys=inside, is_raw_kv=True)
    answer = store.split_region(request)
    if answer.HasField("region_error"):
        if _NOTHING_TO_SPLIT in answer.region_error.message:
            return len(here), []
        raise RegionErrorSeen(answer.region_error)
    return len(here), [Region.of(item).led_from(store.store.id) for item in answer.regions]


def scatter_regions(cluster: Cluster, region_ids: Sequence[int], seconds: float = SCATTER_SECONDS) -> int:
    """Ask PD to spread regions and wait until it has, ``seconds`` at most; returns how many were not.

    PD may refuse what is too new, or not be able to place: that is no error, the regions stay where they are.
    """
    deadline = time.monotonic() + seconds
    try:
        waiting = _ask(cluster, region_ids, deadline)
        moving = [region_id for region_id in region_ids if region_id not in waiting]
        while moving and time.monotonic() < deadline:
            moving = [region_id for region_id in moving if _moves(cluster, region_id)]
            if moving:
                time.sleep(_POLL_SECONDS)
    except ClusterError as error:
        log.warning("regions were not spread over the stores: %s", error.message)
        return len(region_ids)
    for region_id in region_ids:
        cluster.regions.invalidate(region_id)
    return len(waiting) + len(moving)


def _ask(cluster: Cluster, region_ids: Sequence[int], deadline: float) -> set[int]:
    """Have PD begin; the ids that it refused until the end, because it does not know them yet or cannot."""
    waiting = list(region_ids)
    while waiting:
        waiting = cluster.pd.scatter(waiting)
        if time.monotonic() >= deadline:
            break
        if waiting:
            time.sleep(_POLL_SECONDS)
    return set(waiting)


def _moves(cluster: Cluster, region_id: int) -> bool:
    operator = cluster.pd.operator(region_id)
    return operator is not None and operator.running and operator.desc == "scatter-region"
