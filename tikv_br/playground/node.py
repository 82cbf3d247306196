"""What one store of the playground is made of: handed to each of its gRPC services."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from formats.api_version import ApiVersion
from tikv_br.playground.pace import Pace

if TYPE_CHECKING:
    import grpc

    from tikv_br.cluster.pb import cdcpb_pb2, errorpb_pb2
    from tikv_br.playground.cdc_hub import ChangeHub
    from tikv_br.playground.engine import Engine
    from tikv_br.playground.failpoints import StorageTrouble
    from tikv_br.playground.regions import RegionTable
    from tikv_br.playground.sizes import RegionSizes


class TimestampOracle(Protocol):
    """PD's TSO."""

    def next(self, count: int = 1) -> int:
        """Allocate ``count`` timestamps and return the last of them."""
        ...


class CausalClock(Protocol):
    """A store's cache of timestamps taken from PD: what it hands out may be up to 3 s old."""

    def next_ts(self) -> int:
        """The timestamp of the store's next write, always above the one before."""
        ...

    def flush(self) -> None:
        """Throw the cache away: the next timestamp is above every one that PD has handed out before this call."""
        ...

    def renew(self) -> None:
        """Fetch one more batch ahead; called every 100 ms."""
        ...


class Failpoints(Protocol):
    """Faults that a test has asked for."""

    def intercept(
        self, rpc: str, *, store_id: int, region_id: int, context: grpc.ServicerContext
    ) -> errorpb_pb2.Error | None:
        """Called first by each RPC: sleeps, drops the connection or kills the store as asked.

        Returns the region error to answer with, or None when the call shall go its way.
        """
        ...

    def intercept_feed(
        self, point: str, *, store_id: int, region_id: int, context: grpc.ServicerContext
    ) -> cdcpb_pb2.Error | None:
        """As `intercept`, at a point of a change feed: the error that ends the region's subscription, or None."""
        ...

    def intercept_storage(self, point: str, *, store_id: int) -> StorageTrouble | None:
        """What is to happen to a file that a store fetches or writes; None: nothing."""
        ...

    def overrun(self, *, store_id: int, region_id: int) -> float:
        """Seconds for which a store shall not notice that it lost a region's lead; 0 as a rule."""
        ...


class Crimes(Protocol):
    """Requests that would have killed a real store."""

    def record(self, *, store_id: int, rpc: str, what: str) -> None:
        """Remember the crime, so that the test that committed it fails."""
        ...


@dataclass(slots=True)
class StoreNode:
    """One store: its identity, the data it shares with the others, and its own clock of causal timestamps."""

    store_id: int
    cluster_id: int
    address: str  # host:port of its gRPC services
    status_address: str  # host:port of its HTTP status server
    api_version: ApiVersion
    engine: Engine
    regions: RegionTable
    tso: TimestampOracle
    causal: CausalClock
    failpoints: Failpoints
    crimes: Crimes
    changes: ChangeHub  # takes every write to the database and tells the change feeds
    sizes: RegionSizes  # tell it what you write: `node.sizes.written(region_id, size)`
    data_dir: Path  # this store's own files (downloaded SSTs), not the shared RocksDB
    alive: bool = True
    pace: Pace = field(default_factory=Pace)  # tell it the bytes that you back up or download
    downloads: Counter[str] = field(default_factory=Counter)  # how often each file was fetched from a storage

    def now(self) -> int:
        """The store's wall clock in unix seconds: TTLs end by it."""
        return int(time.time())
