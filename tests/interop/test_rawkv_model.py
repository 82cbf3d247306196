"""RawKV against a model: random operations by client-go and by us on one playground, while regions split and leaders move."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import fastcrc
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.interop.conftest import Clusters, Connect
from tests.interop.line_client import LineClient
from tests.interop.rows import YEAR, our_rows
from tests.support.live_cluster import LiveCluster
from tests.support.raw_calls import CompareAndSwapResult, compare_and_swap, put_with_ttls
from tikv_br.cluster.rawkv import RawClient
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange

TOLERANCE = 120
"""Seconds between what a TTL should be and is: the time between two steps on a slow machine."""
KEYS = [
    b"\0",
    b"a",
    b"a\0",
    b"a\0\0",
    b"a" * 8,
    b"a" * 8 + b"\0",
    b"a" * 8 + b"b",
    b"b\xff",
    b"m" * 17,
    b"\xfe",
    b"\xff" * 9,
]
VALUES = [b"", b"\0", b"\1", b"\2", b"value", (1).to_bytes(8, "big") + b"\1", bytes(8), b"x" * 300]
BOUNDED = settings(
    max_examples=8,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],  # what fails is not made smaller: every try begins with a cluster of other regions
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

Row = tuple[bytes, bytes]
keys = st.sampled_from(KEYS)
values = st.sampled_from(VALUES)
lifetimes = st.sampled_from([0, YEAR, 10 * YEAR])
bounds = st.lists(keys, min_size=2, max_size=2, unique=True).map(sorted)
whom = st.sampled_from(["client-go", "ours"])


@dataclass
class Model:
    """Rows of a cluster, by the recorded behaviour of real ones."""

    version: ApiVersion
    rows: dict[bytes, tuple[bytes, float]] = field(default_factory=dict)
    """Values and when they expire, in seconds since the epoch; 0 = never."""
    tombstones: set[bytes] = field(default_factory=set)
    """Keys whose newest version is a deletion: API V2 keeps those, and has a TTL of 0 for them."""

    def put(self, key: bytes, value: bytes, ttl: int = 0) -> None:
        """Write one pair."""
        self.rows[key] = value, ttl and time.time() + ttl
        self.tombstones.discard(key)

    def delete(self, key: bytes) -> None:
        """Remove one key, which need not exist."""
        self.rows.pop(key, None)
        if self.version is ApiVersion.V2:
            self.tombstones.add(key)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Remove a range with all its versions."""
        self.rows = {key: row for key, row in self.rows.items() if not start <= key < end}
        self.tombstones = {key for key in self.tombstones if not start <= key < end}

    def get(self, key: bytes) -> bytes | None:
        """The value of a key."""
        return self.rows[key][0] if key in self.rows else None

    def scan(self, start: bytes = b"", end: bytes = b"") -> list[Row]:
        """Pairs of [start, end), where an empty end is no end."""
        return sorted((key, value) for key, (value, _) in self.rows.items() if start <= key and (not end or key < end))

    def checksum(self, start: bytes, end: bytes) -> Checksum:
        """The checksum as servers count it: keys with their prefix, values as the user sees them."""
        prefix = b"r\0\0\0" if self.version is ApiVersion.V2 else b""
        total = Checksum()
        for key, value in self.scan(start, end):
            pair = prefix + key + value
            total += Checksum(fastcrc.crc64.xz(pair), 1, len(pair))
        return total


class RawKv(RuleBasedStateMachine):
    """Each operation goes through a client chosen at random, and its answer must be the model's."""

    def __init__(self, live: LiveCluster, go: LineClient, version: ApiVersion) -> None:
        super().__init__()
        self.live, self.go = live, go
        self.clients: dict[str, LineClient | RawClient] = {"client-go": go, "ours": live.raw()}
        self.model = Model(version)

    @initialize()
    def begin(self) -> None:
        """Empty the cluster; its regions stay as the example before has left them."""
        self.live.raw().delete_range(EVERY_KEY)

    @rule(who=whom, key=keys, value=values, ttl=lifetimes)
    def put(self, who: str, key: bytes, value: bytes, ttl: int) -> None:
        """Put, with a TTL where there are any."""
        ttl = ttl if self.model.version.has_ttl else 0
        self.clients[who].put(key, value, ttl)
        self.model.put(key, value, ttl)

    @rule(
        who=whom,
        rows=st.lists(st.tuples(keys, values, lifetimes), min_size=1, max_size=8, unique_by=lambda row: row[0]),
    )
    def batch_put(self, who: str, rows: list[tuple[bytes, bytes, int]]) -> None:
        """Put into several regions at once, some with and some without TTL."""
        rows = [(key, value, ttl if self.model.version.has_ttl else 0) for key, value, ttl in rows]
        client = self.clients[who]
        if isinstance(client, RawClient):
            put_with_ttls(client, rows)
        else:
            client.batch_put_with_ttls(rows)
        for row in rows:
            self.model.put(*row)

    @rule(who=whom, key=keys)
    def delete(self, who: str, key: bytes) -> None:
        """Delete what may not be there."""
        self.clients[who].delete(key)
        self.model.delete(key)

    @rule(who=whom, some=st.sets(keys, min_size=1))
    def batch_delete(self, who: str, some: set[bytes]) -> None:
        """Delete in several regions at once."""
        self.clients[who].batch_delete(some)
        for key in some:
            self.model.delete(key)

    @rule(who=whom, ends=bounds)
    def delete_range(self, who: str, ends: list[bytes]) -> None:
        """Delete a range."""
        self.clients[who].delete_range(KeyRange(*ends))
        self.model.delete_range(*ends)

    @rule(who=whom, key=keys, previous=st.none() | values, value=values, right=st.booleans())
    def compare_and_swap(self, who: str, key: bytes, previous: bytes | None, value: bytes, *, right: bool) -> None:
        """Swap against the right value or any."""
        found = self.model.get(key)
        previous = found if right else previous
        client = self.clients[who]
        swapped = (
            compare_and_swap(client, key, previous, value)
            if isinstance(client, RawClient)
            else client.compare_and_swap(key, previous, value)
        )
        assert swapped == CompareAndSwapResult(found == previous, found)
        if found == previous:
            self.model.put(key, value)

    @rule(who=whom, some=st.lists(keys, min_size=1, unique=True))
    def get(self, who: str, some: list[bytes]) -> None:
        """Get one and several."""
        client = self.clients[who]
        assert client.get(some[0]) == self.model.get(some[0])
        assert client.batch_get(some) == {key: self.model.rows[key][0] for key in some if key in self.model.rows}

    @precondition(lambda self: self.model.version.has_ttl)
    @rule(who=whom, key=keys)
    def get_ttl(self, who: str, key: bytes) -> None:
        """Ask for a TTL; that of a tombstone is 0, which our client takes for what it is."""
        ttl = self.clients[who].get_ttl(key)
        if key not in self.model.rows:
            assert ttl == (0 if who == "client-go" and key in self.model.tombstones else None)
            return
        expiry = self.model.rows[key][1]
        assert ttl is not None
        assert (ttl == 0) == (expiry == 0)
        assert not ttl or abs(ttl - (expiry - time.time())) < TOLERANCE

    @rule(ends=bounds, limit=st.integers(1, len(KEYS)))
    def scan(self, ends: list[bytes], limit: int) -> None:
        """Scan a part, forward and backward, and all."""
        start, end = ends
        inside = self.model.scan(start, end)
        assert our_rows(self.live, 0, start, end) == inside
        assert self.go.scan(start, end, limit) == inside[:limit]
        assert self.go.reverse_scan(end, start, limit) == inside[::-1][:limit]
        assert self.go.scan() == our_rows(self.live) == self.model.scan()

    @rule(who=whom, ends=bounds)
    def checksum(self, who: str, ends: list[bytes]) -> None:
        """Checksum a part."""
        assert self.clients[who].checksum(KeyRange(*ends)) == self.model.checksum(*ends)

    @rule(key=keys)
    def split(self, key: bytes) -> None:
        """Split at a key, unless there is a bound already."""
        codec = self.live.raw().codec
        self.live.split(codec.bound(codec.rpc_key(key)))

    @rule(number=st.integers(0, 30), step=st.integers(1, 2))
    def transfer_leader(self, number: int, step: int) -> None:
        """Move the leader of a region."""
        regions = self.live.regions()
        region = regions[number % len(regions)]
        others = [store for store in self.live.store_ids if store != region["leader_store"]]
        self.live.transfer_leader(region_id=region["id"], store_id=others[step % len(others)])


@pytest.mark.parametrize("version", list(ApiVersion), ids=lambda version: version.label)
def test_answers_are_the_models(version: ApiVersion, clusters: Clusters, client_go: Connect) -> None:
    """Whichever client writes, whichever reads, and wherever regions lie, everything is as the model says."""
    live = clusters(version)

    class Here(RawKv):
        def __init__(self) -> None:
            super().__init__(live, client_go(live), version)

    run_state_machine_as_test(Here, settings=BOUNDED)
