"""One cluster: PD, its stores, and the clients that find their way in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Self

from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.flush import flush_stores
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import PdHttp
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.regions import RegionCache
from tikv_br.cluster.router import Router
from tikv_br.cluster.store import StoreClient, StorePool
from tikv_br.cluster.topology import ClusterInfo, Store, StoreState, detect_api_version


class Cluster:
    """A connection to a cluster; close it, or use it as a context manager. Thread-safe, but not across a fork."""

    def __init__(self, config: ClusterConfig, pd: PdClient) -> None:
        """Use `connect`."""
        self.config = config
        self.pd = pd
        self.pd_http = PdHttp(pd.connection)
        self.regions = RegionCache(pd.region_by_key)
        self._stores = StorePool(pd.store, config)
        self.router = Router(self.regions, self._stores, config)

    @classmethod
    def connect(cls, config: ClusterConfig) -> Cluster:
        """Connect to PD. Raises as `PdConnection`."""
        return cls(config, PdClient(config))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls under way end with `ClusterUnreachable`."""
        self._stores.close()
        self.pd.close()

    @property
    def cluster_id(self) -> int:
        """The cluster's id."""
        return self.pd.cluster_id

    @functools.cached_property
    def api_version(self) -> ApiVersion:
        """The API version that the stores are configured with; asked once. Raises `ClusterUnfit` when they disagree."""
        gone = self.pd_http.silent_stores
        return detect_api_version(self._up_stores(), self.config.tls, self.config.request_timeout, gone)

    def info(self) -> ClusterInfo:
        """What a plan must know. Raises `ClusterUnfit` when the stores disagree on the API version."""
        stores = tuple(store for store in self.pd.stores() if store.serves)
        return ClusterInfo(self.cluster_id, self.pd_http.cluster_version(), self.api_version, stores)

    def store(self, store_id: int) -> StoreClient:
        """The client of one store. Raises `RequestRefused` for an unknown id."""
        return self._stores.get(store_id)

    def raw(self, keyspace_id: int = 0, fence: Callable[[], object] = lambda: None, below: bytes = b"") -> RawClient:
        """RawKV on one keyspace, ``below`` a prefix; keyspaces other than 0 exist in V2 only. For `fence` see `RawClient`."""
        return RawClient(self.router, KeyCodec(self.api_version, keyspace_id, below), self.cluster_id, fence)

    def flush_timestamps(self) -> None:
        """Make every store that is up give up its cached timestamps; see `flush`. Before V2 there are none."""
        if self.api_version is ApiVersion.V2:
            clients = [self._stores.get(store.id) for store in self._up_stores()]
            flush_stores(clients, self.cluster_id, self.config.retry_budget, self.pd_http.silent_stores)

    def _up_stores(self) -> list[Store]:
        return [store for store in self.pd.stores() if store.serves and store.state is StoreState.UP]
