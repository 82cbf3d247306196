"""One cluster: PD, its stores, and their clients."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from tikv_br.cluster.channel import run_in_worker_thread
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import PdHttp
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.regions import Region, RegionCache
from tikv_br.cluster.router import Router
from tikv_br.cluster.store import StoreClient, StorePool
from tikv_br.cluster.topology import ClusterInfo, Store, StoreState, detect_api_version
from tikv_br.errors import ClusterUnreachable, RequestRefused
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.retry import STORE_UNREACHABLE, RetryPolicy


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
        timeout = min(self.config.connect_timeout, self.config.request_timeout)
        return detect_api_version(self._up_stores(), self.config.tls, timeout, self.config.retry_budget)

    def info(self) -> ClusterInfo:
        """What a plan must know. Raises `ClusterUnfit` when the stores disagree on the API version."""
        stores = tuple(store for store in self.pd.stores() if store.serves)
        return ClusterInfo(self.cluster_id, self.pd_http.cluster_version(), self.api_version, stores)

    def store(self, store_id: int) -> StoreClient:
        """The client of one store. Raises `RequestRefused` for an unknown id."""
        return self._stores.get(store_id)

    def raw(self, keyspace_id: int = 0, fence: Callable[[], object] = lambda: None) -> RawClient:
        """RawKV on one keyspace; keyspaces other than 0 exist in V2 only. For `fence` see `RawClient`."""
        return RawClient(self.router, KeyCodec(self.api_version, keyspace_id), self.cluster_id, fence)

    def flush_timestamps(self) -> None:
        """Make every running store drop its cached timestamps; see `flush_stores`. Does nothing before V2."""
        if self.api_version is ApiVersion.V2:
            clients = [self._stores.get(store.id) for store in self._up_stores()]
            flush_stores(clients, self.cluster_id, self.config.retry_budget, self.pd_http.silent_stores)

    def _up_stores(self) -> list[Store]:
        return [store for store in self.pd.stores() if store.serves and store.state is StoreState.UP]


class ClusterPool:
    """Connections that an operation, or the tasks of one process, share: one per cluster, made at its first use. Thread-safe.

    A context manager. Closing it closes all connections; it can be used again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clusters: dict[ClusterConfig, Cluster] = {}

    def get(self, config: ClusterConfig) -> Cluster:
        """The connection to a cluster. Raises as `Cluster.connect`."""
        with self._lock:
            if config not in self._clusters:
                self._clusters[config] = Cluster.connect(config)
            return self._clusters[config]

    def close(self) -> None:
        """Close all connections; calls under way end with `ClusterUnreachable`."""
        with self._lock:
            clusters, self._clusters = self._clusters, {}
        for cluster in clusters.values():
            cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_KEY = KeyCodec(ApiVersion.V2).rpc_key(b"")
"""The first key of the default keyspace; it need not exist."""


def flush_request(cluster_id: int) -> brpb_pb2.BackupRequest:
    """A Backup that writes nothing and reads at most one key. A V2 store drops its cached timestamps before it starts."""
    return brpb_pb2.BackupRequest(
        cluster_id=cluster_id,
        start_key=_KEY,
        end_key=_KEY + b"\0",  # start equal to end would kill the store
        is_raw_kv=True,
        dst_api_version=kvrpcpb_pb2.V2,
        storage_backend=brpb_pb2.StorageBackend(noop=brpb_pb2.Noop()),
    )


def flush_stores(
    stores: Iterable[StoreClient],
    cluster_id: int,
    retry_budget: float,
    gone: Callable[[], Collection[int]] = frozenset,
) -> None:
    """Flush each of these V2 stores, so that their later writes get timestamps above all that PD has issued.

    A store that does not answer is asked again until it answers or is `gone`: when PD hears nothing of it either, it takes
    no writes, and comes back with an empty cache. Raises `RetryBudgetExhausted` when another does not answer for
    `retry_budget` seconds: its next writes may lie below a timestamp already taken. PD calls a store that died gone after
    20 s; the budget must be longer.
    """

    def flush(store: StoreClient) -> None:
        request, timeout = flush_request(cluster_id), store.request_timeout
        try:
            answers = run_in_worker_thread(lambda: list(store.backup(request, timeout=timeout)))
        except ClusterUnreachable:
            if store.store.id in gone():
                return
            raise
        for answer in answers:
            # The store flushed before it met a region in motion; any other error means that it did not.
            if answer.HasField("error") and not answer.error.HasField("region_error"):
                raise RequestRefused(f"{store} cannot flush its timestamps: {answer.error.msg}")

    for store in stores:
        what, action = f"timestamp flush of {store}", functools.partial(flush, store)
        RetryPolicy(retry_budget).run(what, action, STORE_UNREACHABLE, ClusterUnreachable)


THREADS = 16
WINDOW = 2 * THREADS
"""Regions that are asked, or wait to be, behind the first one without an answer: at most this many requests are wasted."""
REGION_PAGE = 4096
"""Regions per request to PD."""


def first_rpc_key(cluster: Cluster, keyspace_id: int, start: bytes, end: bytes) -> bytes | None:
    """The first RPC key of [start, end), a range of one keyspace; None when there is none. An empty end is no end.

    As `RawClient.first_rpc_key`, but with up to `THREADS` requests in parallel. Regions may split, merge and move at the same
    time. Raises as `RawClient`.
    """
    raw = cluster.raw(keyspace_id)
    asked: deque[Future[bytes | None]] = deque()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="first-key") as pool:
        try:
            for part in _parts(cluster, raw.codec, start, end):
                asked.append(pool.submit(raw.first_rpc_key, *part))
                if len(asked) == WINDOW and (found := asked.popleft().result()) is not None:
                    return found
            return next((found for each in asked if (found := each.result()) is not None), None)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _parts(cluster: Cluster, codec: KeyCodec, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The range, cut at the ends of regions: parts of RPC keys, in order and without gaps."""
    last, more = codec.bound(end), True
    while more:
        page = cluster.pd.scan_regions(codec.bound(start), last, REGION_PAGE)
        cluster.regions.update(page)
        cuts = [cut for cut in (_cut(codec, region, last) for region in page) if cut > start]
        for cut in cuts:
            yield start, cut
            start = cut
        more = bool(cuts) and _is_before(page[-1], last)
    yield start, end


def _cut(codec: KeyCodec, region: Region, last: bytes) -> bytes:
    """Where a region ends within the range; ``b""`` if it does not, or not at a key: then the request for the part fails."""
    try:
        return codec.from_bound(region.end) if _is_before(region, last) else b""
    except DamagedBytes:
        return b""


def _is_before(region: Region, last: bytes) -> bool:
    """Whether a region ends before a bound, an empty one being the end of all."""
    return bool(region.end) and (not last or region.end < last)
