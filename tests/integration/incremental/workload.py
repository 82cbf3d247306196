"""Writers, and a cluster that is never at rest: what a sync must follow without a hole."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tests.support.live_cluster import LiveCluster, contents
from tikv_br.cluster.rawkv import RawClient

KEYS = 420
POINTS = ("cdc.register", "cdc.scan", "cdc.resolved")
TTLS = (1, 2, 3, 30, 5000)
"""Seconds: some end while the writers write, some while the sync catches up, some stay."""
Faults = Sequence[tuple[str, Any]]
"""Points, and what may happen there."""
FEED_FAULTS: Faults = [
    *((point, {"feed_error": {kind: {}}}) for point in POINTS for kind in ("congested", "region_not_found")),
    *((point, {"drop": {}}) for point in POINTS),
    ("cdc.scan", {"delay": {"seconds": 0.3}}),
]
"""Ends of subscriptions and of streams, and scans that others overtake."""
WRITE_FAULTS: Faults = [
    *((rpc, {"region_error": {"server_is_busy": {}}}) for rpc in ("RawBatchPut", "RawBatchDelete")),
    *((rpc, {"drop": {}}) for rpc in ("RawBatchPut", "RawBatchDelete")),
    ("RawBatchPut", {"delay": {"seconds": 0.2}}),
]
"""Errors of the writers."""
MARK = b" expires"
"""At the end of each value that was written with a TTL."""

TOLERANCE = 2
"""Seconds that the end of a row may differ from that of its copy."""


class Row(NamedTuple):
    """Row of a key in a cluster."""

    value: bytes
    end: tuple[int, int] | None
    """When it expires: between these two moments, in seconds since the epoch; None: never."""


State = dict[bytes, Row]


def key_of(number: int) -> bytes:
    """The key of a number below `KEYS`."""
    return b"key%04d" % number


class Writer:
    """Puts, overwrites and deletes single keys and neighbours, with and without TTL. Writers share the keys."""

    def __init__(self, raw: RawClient, seed: int, number: int) -> None:
        self._raw = raw
        self._chance = random.Random(f"writer {number} of {seed}")
        self._name = b"%d.%d" % (seed, number)
        self.written = 0

    def step(self) -> None:
        """One request of the client, which may become several on the wire."""
        chance, self.written = self._chance, self.written + 1
        first = chance.randrange(KEYS)
        ttl = chance.choice(TTLS) if chance.random() < 0.3 else 0
        value = b"%s.%d" % (self._name, self.written) + (MARK if ttl else b"")
        several = [key_of(number % KEYS) for number in range(first, first + 25)]
        match chance.choices(["put", "delete", "batch put", "batch delete"], [60, 20, 15, 5]):
            case ["put"]:
                self._raw.put(several[0], value, ttl)
            case ["delete"]:
                self._raw.delete(several[0])
            case ["batch put"]:
                self._raw.batch_put(dict.fromkeys(several, value), ttl)
            case _:
                self._raw.batch_delete(several[:10])


class Commotion:
    """Splits, merges and moves a cluster's regions, arms failpoints, kills and restarts stores, one after the other."""

    def __init__(self, live: LiveCluster, seed: int, regions: range, faults: Faults) -> None:
        """``regions`` is how many there are to be, more or less."""
        self._live = live
        self._chance = random.Random(f"commotion of {seed}")
        self._wanted = regions
        self._faults = faults
        self._dead = 0
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        """One thing; every tenth is the death of a store, or its return."""
        regions = regions_of(self._live)
        kind = self._chance.choices(["split", "merge", "transfer", "move", "fault"], [5, 5, 9, 4, 4])[0]
        if self._is_time_to_kill_or_restart():
            kind = "restart" if self._dead else "kill"
        elif len(regions) not in self._wanted:
            kind = "split" if len(regions) < self._wanted.start else "merge"
        self.done[kind] += 1
        self._do(kind, regions)

    def _is_time_to_kill_or_restart(self) -> bool:
        return self.done.total() % 10 == 5

    def _do(self, kind: str, regions: list[Any]) -> None:
        match kind:
            case "split":
                self._split()
            case "merge":
                self._merge(regions)
            case "transfer":
                self._transfer(self._chance.choice(regions))
            case "move":
                self._move(self._chance.choice(regions))
            case "fault":
                self._live.fail(*self._chance.choice(self._faults))
            case "kill":
                self._dead = self._chance.choice(self._live.store_ids)
                self._live.kill_store(self._dead)
            case _:
                self._live.restart_store(self._dead)
                self._dead = 0

    def _split(self) -> None:
        codec = self._live.raw().codec
        self._live.split(codec.bound(codec.rpc_key(key_of(self._chance.randrange(KEYS)))))

    def _merge(self, regions: list[Any]) -> None:
        at = self._chance.randrange(len(regions) - 1)
        source, target = self._chance.sample(regions[at : at + 2], 2)
        self._live.merge(source=source["id"], target=target["id"])

    def _transfer(self, region: Any) -> None:  # noqa: ANN401 - JSON
        stores = [store_id for _, store_id in region["peers"] if store_id != self._dead]
        self._live.transfer_leader(region_id=region["id"], store_id=self._chance.choice(stores))

    def _move(self, region: Any) -> None:  # noqa: ANN401 - JSON
        here = [store_id for _, store_id in region["peers"]]
        there = [store_id for store_id in self._live.store_ids if store_id not in {*here, self._dead}]
        if there:
            from_store, to_store = self._chance.choice(here), self._chance.choice(there)
            self._live.move_peer(region_id=region["id"], from_store=from_store, to_store=to_store)


def regions_of(live: LiveCluster) -> list[Any]:
    """The regions of keyspace 0, in key order."""
    return [region for region in live.regions() if region["start"].startswith("72000000")]


def state_of(live: LiveCluster) -> State:
    """All that a cluster holds in keyspace 0."""
    raw, found = live.raw(), contents(live)

    def row(key: bytes) -> Row | None:
        before = int(time.time())
        ttl = raw.get_ttl(key)
        if ttl is None:  # its time is over
            return None
        return Row(found[key], (before + ttl, int(time.time()) + ttl) if ttl else None)

    with ThreadPoolExecutor(4) as pool:
        rows = pool.map(row, found)
        return {key: row for key, row in zip(found, rows, strict=True) if row is not None}


def differences(source: State, target: State) -> dict[bytes, tuple[Row | None, Row | None]]:
    """Keys whose value differs, or whose end by more than `TOLERANCE`; what is over by now may be gone."""
    now = time.time()

    def same(one: Row | None, other: Row | None) -> bool:
        if one is None or other is None:
            _, end = one or other or Row(b"", None)
            return end is not None and end[0] <= now + TOLERANCE
        if one.end is None or other.end is None:
            return one == other
        return one.value == other.value and max(one.end[0] - other.end[1], other.end[0] - one.end[1]) <= TOLERANCE

    pairs = {key: (source.get(key), target.get(key)) for key in sorted(source.keys() | target.keys())}
    return {key: pair for key, pair in pairs.items() if not same(*pair)}
