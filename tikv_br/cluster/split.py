"""Splits regions at given keys, and has PD spread them over the stores."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tikv_br import cancellation
from tikv_br.cancellation import run_on_threads
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.region_errors import check_region_error
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import RequestRefused
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.retry import Backoff

SPLIT_KEYS = 1024
"""Keys that one request may carry."""
SCATTER_IDS = 256
"""Regions that one request asks PD to scatter."""
REGION_PAGE = 4096
"""Regions per request to PD."""
THREADS = 16
PAUSE = Backoff("scatter", 0.01, 0.2)
"""Seconds between two requests to PD."""
_NOTHING_TO_SPLIT = "no valid key found for split"
_SCATTER = "scatter-region"


def split_at(cluster: Cluster, codec: KeyCodec, rpc_keys: Iterable[bytes]) -> list[Region]:
    """Make each of these RPC keys the start of a region; keys that are one already count as done.

    Regions are split at the same time, each at all of its keys. Returns the regions that came out of splits, as the stores
    reported them. Raises as `Router.call` does.
    """
    groups = list(by_region(cluster, codec, sorted(set(rpc_keys))))
    found = run_on_threads(lambda keys: _split_all(cluster, codec, keys), groups, THREADS, "split")
    made = {piece.id: piece for pieces in found for piece in pieces}
    return sorted(made.values(), key=lambda region: region.start)


def by_region(cluster: Cluster, codec: KeyCodec, keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Ascending keys, grouped by PD's regions."""
    bounds = [codec.bound(key) for key in keys]
    done = 0
    while done < len(keys):
        for region in cluster.pd.scan_regions(bounds[done], bounds[-1] + b"\0", REGION_PAGE):
            if region.end and region.end <= bounds[done]:
                continue
            last = bisect_left(bounds, region.end, done) if region.end else len(keys)
            cluster.regions.update([region])
            yield keys[done:last]
            done = last
            if done == len(keys):
                return


def _split_all(cluster: Cluster, codec: KeyCodec, keys: Sequence[bytes]) -> list[Region]:
    """Split wherever these ascending keys lie by now; returns the regions that came of it."""
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
    return list(made.values())


def _split(
    cluster: Cluster, codec: KeyCodec, region: Region, store: StoreClient, keys: Sequence[bytes]
) -> list[Region]:
    request = kvrpcpb_pb2.SplitRegionRequest(
        context=region.context(codec.api_version, cluster.cluster_id),
        split_keys=keys,  # not encoded: the store does that
        is_raw_kv=codec.mode is KeyMode.RAW,
    )
    answer = store.call(store.kv.SplitRegion, request)
    if _NOTHING_TO_SPLIT in answer.region_error.message:
        return []
    check_region_error(answer)
    return [Region.of(piece).with_leader_on(region.leader.store_id) for piece in answer.regions]


def scatter(cluster: Cluster, regions: Sequence[Region], timeout: float) -> list[int]:
    """Spread regions over the stores and wait, up to `timeout` seconds, until PD has moved them.

    Returns the ids that were not done in time: they hold data all the same, only not evenly. The leaders are
    looked up again when needed. Raises `ClusterError` when PD is unavailable.
    """
    deadline = time.monotonic() + timeout
    ids = [region.id for region in regions]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="scatter") as pool:
        try:
            waiting = _ask_to_scatter(cluster, pool, ids, deadline)
            return waiting + _wait_until_moved(cluster, pool, sorted(set(ids) - set(waiting)), deadline)
        finally:
            pool.shutdown(cancel_futures=True)
            for region_id in ids:
                cluster.regions.invalidate(region_id)


def _wait_until_moved(cluster: Cluster, pool: ThreadPoolExecutor, ids: Sequence[int], deadline: float) -> list[int]:
    """The ids that are still on their way at the deadline."""
    moving = list(ids)
    for tries in itertools.count():
        still = list(pool.map(lambda region_id: _is_scattering(cluster, region_id), moving))
        moving = [region_id for region_id, is_moving in zip(moving, still, strict=True) if is_moving]
        if not moving or time.monotonic() > deadline:
            return moving
        cancellation.sleep(PAUSE.delay(tries, 0.0))
    raise AssertionError


def _ask_to_scatter(cluster: Cluster, pool: ThreadPoolExecutor, ids: Sequence[int], deadline: float) -> list[int]:
    """The ids that PD did not agree to scatter in time; it first has to hear of new regions, and to find them replicated."""
    todo, tries = list(ids), 0
    while todo:
        batch = todo[:SCATTER_IDS]
        found = pool.map(cluster.pd.region_by_id, batch)
        known = [region_id for region_id, region in zip(batch, found, strict=True) if region is not None]
        refused = set(_try_scatter(cluster, known)) if known else set()
        agreed = set(known) - refused
        todo = [region_id for region_id in todo if region_id not in agreed]
        if agreed:
            tries = 0
        elif time.monotonic() > deadline:
            break
        else:
            cancellation.sleep(PAUSE.delay(tries, 0.0))
            tries += 1
    return todo


def _try_scatter(cluster: Cluster, region_ids: Sequence[int]) -> Sequence[int]:
    """The ids that PD did not take; "not fully replicated" and "has no leader" pass with time."""
    try:
        return cluster.pd.scatter(region_ids)
    except RequestRefused:
        return region_ids


def _is_scattering(cluster: Cluster, region_id: int) -> bool:
    operator = cluster.pd.operator(region_id)
    return operator is not None and operator.desc == _SCATTER and operator.running
