"""A cluster whose regions move, split and merge while something reads them: helpers of the tests of both engines."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.integration.backup.data import load
from tests.support.background import Background
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import PATIENCE, eventually
from tikv_br.cluster.config import ClusterConfig
from tikv_br.formats.api_version import ApiVersion

SPLITS = [b"row00100", b"row01", b"row02", b"\x90"]
READ_FIRST = b""
"""A key of the first region, whose 1,800 rows are read in three pages while pages still grow."""


@contextlib.contextmanager
def moving_cluster(directory: Path, rows: dict[bytes, bytes]) -> Iterator[LiveCluster]:
    """Run a V1 cluster of three stores with these rows in five regions; dead leaders are replaced after a second."""
    with live_cluster(directory, ApiVersion.V1, stores=3, election_timeout=1.0) as live:
        load(live, rows)
        live.split(*SPLITS)
        yield live


@contextlib.contextmanager
def spread_and_healed(live: LiveCluster) -> Iterator[LiveCluster]:
    """Have the regions as at first, spread over the stores, and heal afterwards what was broken."""
    _reshape(live)
    live.scatter()
    yield live
    live.heal()


@contextlib.contextmanager
def healed_late(live: LiveCluster, killing: list[int]) -> Iterator[None]:
    """Heal while the block runs, two seconds after these failpoints have killed a majority of the stores."""
    majority = len(killing) // 2 + 1
    healing = threading.Event()

    def heal() -> None:
        eventually(lambda: sum(live.hits(each) for each in killing) >= majority)
        time.sleep(2)
        healing.set()
        live.heal()

    with ThreadPoolExecutor(1) as pool:
        healed = pool.submit(heal)
        yield
        assert healing.is_set(), "the work ended before the stores came back"
        healed.result()


def _reshape(live: LiveCluster) -> None:
    if merged := [key for key in SPLITS if region_at(live, key)["start"] != key.hex()]:
        live.split(*merged)
    while region_at(live, READ_FIRST)["end"] != SPLITS[0].hex():
        live.merge(**merge(live)["arguments"])


def region_at(live: LiveCluster, key: bytes) -> dict[str, Any]:
    """Return the region of a key."""
    return next(
        region
        for region in live.regions()
        if bytes.fromhex(region["start"]) <= key and (not region["end"] or key < bytes.fromhex(region["end"]))
    )


def other_store(live: LiveCluster, region: dict[str, Any]) -> int:
    """Return a store that does not lead the region."""
    return next(store_id for store_id in live.store_ids if store_id != region["leader_store"])


def split(live: LiveCluster) -> dict[str, Any]:
    """Split the region that is read while it is read."""
    return {"name": "split", "arguments": {"keys": [b"\x01".hex(), b"\x60".hex()]}}


def merge(live: LiveCluster) -> dict[str, Any]:
    """Merge the region that is read into its right neighbour."""
    source = region_at(live, READ_FIRST)
    target = region_at(live, bytes.fromhex(source["end"]))
    return {"name": "merge", "arguments": {"source": source["id"], "target": target["id"]}}


def transfer_leader(live: LiveCluster) -> dict[str, Any]:
    """Move the lead of the region that is read."""
    region = region_at(live, READ_FIRST)
    return {
        "name": "transfer-leader",
        "arguments": {"region_id": region["id"], "store_id": other_store(live, region)},
    }


@contextlib.contextmanager
def restless(live: LiveCluster, rows: Iterable[bytes]) -> Iterator[list[int]]:
    """Split regions at these keys in turn, and move the leader of each, for the length of the block; the ids of those that moved."""
    keys, moved = itertools.cycle(sorted(rows)), list[int]()

    def move() -> None:
        key = next(keys)
        live.split(key)
        region = region_at(live, key)
        live.transfer_leader(region["id"], other_store(live, region))
        moved.append(region["id"])

    with Background([(move, 0.02)]):
        yield moved


def impatient(live: LiveCluster) -> ClusterConfig:
    """Config whose calls fail after a few seconds."""
    return replace(live.config, retry_budget=4.0)


def patient(live: LiveCluster) -> ClusterConfig:
    """A config whose calls outlast all stalls of a busy machine, for work that succeeds."""
    return replace(live.config, retry_budget=PATIENCE)
