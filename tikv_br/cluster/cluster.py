"""One cluster: PD, its stores, and their clients.

Makes stores of API V2 drop the timestamps that they have cached for writes.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Self

from tikv_br.cluster import versions
from tikv_br.cluster.channel import run_in_worker_thread
from tikv_br.cluster.clock import ClusterClock
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import PdHttp, free_space
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.region_errors import NO_TIMESTAMP
from tikv_br.cluster.regions import BoundInsideKey, RegionCache
from tikv_br.cluster.router import Router
from tikv_br.cluster.store import StoreClient, StorePool
from tikv_br.cluster.topology import ClusterInfo, Store, StoreConfig, StoreState, read_config
from tikv_br.cluster.versions import Capability
from tikv_br.errors import ClusterUnfit, ClusterUnreachable, RequestRefused
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.keys.text import show_both
from tikv_br.formats.limits import ENTRY_OVERHEAD, RowLimits
from tikv_br.progress_events import Event, Notice, Reporter, silent
from tikv_br.retry import STORE_UNREACHABLE, RetryPolicy

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.cluster.etcd import Etcd
    from tikv_br.cluster.ingests import Ingests

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
    stores: Iterable[StoreClient], cluster_id: int, retry_budget: float, gone: Callable[[], Collection[int]] = frozenset
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
                is_passing = any(text in answer.error.msg for text in NO_TIMESTAMP)
                error_class = ClusterUnreachable if is_passing else RequestRefused
                raise error_class(f"{store} cannot flush its timestamps: {answer.error.msg}")

    for store in stores:
        what, action = f"timestamp flush of {store}", functools.partial(flush, store)
        RetryPolicy(retry_budget).run(what, action, STORE_UNREACHABLE, ClusterUnreachable)


log = logging.getLogger(__name__)
_REPORTED: set[tuple[int, str]] = set()
"""Notices about versions, by cluster."""


def log_notice(event: Event) -> None:
    if isinstance(event, Notice):
        log.warning("%s", event.message)


class Cluster:
    """A connection to a cluster; close it, or use it as a context manager. Thread-safe, but not across a fork."""

    def __init__(self, config: ClusterConfig, pd: PdClient) -> None:
        """Use `connect`."""
        self.config = config
        self.pd = pd
        self.pd_http = PdHttp(pd.connection)
        self.clock = ClusterClock(pd)
        self.regions = RegionCache(pd.region_by_key)
        self._stores = StorePool(pd.store, config)
        self._known: tuple[Store, ...] = ()
        self.router = Router(self.regions, self._stores, config, partial(free_space, self.pd_http))
        self._etcd: list[Etcd] = []

    @classmethod
    def connect(cls, config: ClusterConfig) -> Cluster:
        """Connect to PD. Raises as `PdConnection`."""
        return cls(config, PdClient(config))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls under way end with `ClusterUnreachable`."""
        self._stores.close()
        while self._etcd:
            self._etcd.pop().close()
        self.pd.close()

    @property
    def cluster_id(self) -> int:
        return self.pd.cluster_id

    @functools.cached_property
    def ingests(self) -> Ingests:
        """The announcements of ingests in PD's etcd."""
        from tikv_br.cluster.ingests import Ingests  # late: most commands have none

        return Ingests(self.pd_etcd, self.cluster_id)

    @functools.cached_property
    def watched_ingests(self) -> Ingests:
        """As `ingests`, but without retries, for readers that poll."""
        from tikv_br.cluster.ingests import Ingests  # late, as above

        return Ingests(self._open_pd_etcd(retry_budget=0.0), self.cluster_id)

    @functools.cached_property
    def pd_etcd(self) -> Etcd:
        """A connection to the etcd that is part of PD."""
        return self._open_pd_etcd(self.config.retry_budget)

    def _open_pd_etcd(self, retry_budget: float) -> Etcd:
        from tikv_br.cluster.etcd import Etcd  # late, as above

        etcd = Etcd(self.pd.connection.addresses, self.config.tls, request_timeout=2.0, retry_budget=retry_budget)
        self._etcd.append(etcd)
        return etcd

    @functools.cached_property
    def api_version(self) -> ApiVersion:
        """The API version that the stores are configured with; asked once.

        Raises `ClusterUnfit` when they disagree, or are too old for this API version.
        """
        return self._store_config.api_version

    @property
    def timestamp_age(self) -> float:
        """Seconds by which a timestamp that a store gives to a write may be older than the write, while the store reaches PD.

        As configured when `api_version` was asked. Raises as it.
        """
        return self._store_config.timestamp_age

    def row_limits(self, codec: KeyCodec) -> RowLimits:
        """The largest rows that the stores accept by puts, by their configuration; an ingest does not check that. Raises as `api_version`."""
        config = self._store_config
        return RowLimits(config.max_key_size - len(codec.prefix), config.max_entry_size - ENTRY_OVERHEAD)

    @functools.cached_property
    def _store_config(self) -> StoreConfig:
        stores = self.stores()
        up = [store for store in stores if store.state is StoreState.UP]
        timeout = min(self.config.connect_timeout, self.config.request_timeout)
        found = read_config(up, self.config.tls, timeout, self.config.retry_budget)
        if not self.config.skip_version_check:
            versions.require(stores, versions.API_V2 if found.api_version is ApiVersion.V2 else versions.RAW)
        return found

    def info(self, reporter: Reporter = log_notice) -> ClusterInfo:
        """Return the cluster's properties; the reporter gets notices about versions and this machine's clock.

        Raises `ClusterUnfit` when the stores disagree on the API version, or are too old for it.
        """
        self.require(versions.RAW, reporter)
        # Measured now, while PD answers.
        if (remark := self.clock.remark()) and self.api_version.has_ttl:
            self._report(remark, reporter)
        return ClusterInfo(self.cluster_id, self.pd_http.cluster_version(), self.api_version, self.stores())

    def require(self, capability: Capability, reporter: Reporter = log_notice) -> None:
        """Raise `ClusterUnfit`, which names the store, if a store lacks a capability or what `api_version` needs.

        With ``config.skip_version_check`` it only reports. Each notice is reported once per process.
        """
        _ = self.api_version  # its own limit comes first
        stores = self.stores()
        skipped = self.config.skip_version_check
        if not skipped:
            versions.require(stores, capability)
        for text in versions.notices(stores, skipped=skipped):
            self._report(text, reporter)

    def notice_without(self, capability: Capability) -> None:
        """Log, once per process, what happens if a store lacks a capability that is not required."""
        if not self.config.skip_version_check:
            for text in versions.shortcomings(self.stores(), capability):
                self._report(text, log_notice)

    def _report(self, text: str, reporter: Reporter) -> None:
        if (notice := (self.cluster_id, text)) not in _REPORTED:
            _REPORTED.add(notice)
            (log_notice if reporter is silent else reporter)(Notice(text))

    def stores(self, *, known: bool = False) -> tuple[Store, ...]:
        """The stores that hold data. While PD does not answer, and with ``known``, those that it has last named, if there are any."""
        if not self._known or not (known or self.pd.connection.outage.seconds):
            self._known = tuple(store for store in self.pd.stores() if store.serves)
        return self._known

    def store(self, store_id: int) -> StoreClient:
        """The client of one store. Raises `RequestRefused` for an unknown id."""
        return self._stores.get(store_id)

    def raw(self, keyspace_id: int = 0, fence: Callable[[], object] = lambda: None) -> RawClient:
        """RawKV on one keyspace; keyspaces other than 0 exist in V2 only. For `fence` see `RawClient`."""
        return self.raw_of(KeyCodec(self.api_version, keyspace_id), fence)

    def raw_of(self, codec: KeyCodec, fence: Callable[[], object] = lambda: None) -> RawClient:
        """As `raw`, with a known codec."""
        return RawClient(self.router, codec, self.cluster_id, fence, self.clock.now)

    def flush_timestamps(self) -> None:
        """Make every running store drop its cached timestamps; see `flush_stores`. Does nothing before V2."""
        if self.api_version is ApiVersion.V2:
            stores = self.pd.stores()  # without PD stores cannot flush either
            up = [self._stores.get(store.id) for store in stores if store.serves and store.state is StoreState.UP]
            flush_stores(up, self.cluster_id, self.config.retry_budget, self.pd_http.silent_stores)


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

    def __exit__(self, *_error: object) -> None:
        self.close()


THREADS = 16
WINDOW = 2 * THREADS
"""Regions that are asked, or wait to be, behind the first one without an answer: at most this many requests are wasted."""


def refuse_beyond(limits: RowLimits, rows: pa.RecordBatch, codec: KeyCodec, span: KeyRange = EVERY_KEY) -> None:
    """Refuse rows within a range of RPC keys that stores ingest, but that no client could overwrite or delete. Raises `ClusterUnfit`."""
    for key in limits.keys_beyond(rows):
        at = codec.rpc_key(key)
        if span.contains(KeyRange(at, at + b"\0")):
            raise ClusterUnfit(
                f"stores take no row from clients that is as large as the one at key {show_both(key)}, whose key has {len(key):,} "
                "bytes: no client could overwrite or delete it",
                hint="Raise storage.max-key-size or raftstore.raft-entry-max-size of the target's stores, then run the same command again.",
            )


def first_rpc_key(cluster: Cluster, keyspace_id: int, span: KeyRange) -> bytes | None:
    """The first RPC key of ``span``, a range of one keyspace; None when there is none.

    As `RawClient.first_rpc_key`, but with up to `THREADS` requests in parallel. Regions may split, merge and move at the same
    time. Raises as `RawClient`.
    """
    raw = cluster.raw(keyspace_id)
    asked: deque[Future[bytes | None]] = deque()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="first-key") as pool:
        try:
            for part in _parts(cluster, raw.codec, span):
                asked.append(pool.submit(raw.first_rpc_key, part))
                if len(asked) == WINDOW and (found := asked.popleft().result()) is not None:
                    return found
            return next((found for each in asked if (found := each.result()) is not None), None)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _parts(cluster: Cluster, codec: KeyCodec, span: KeyRange) -> Iterator[KeyRange]:
    """The range, cut at the ends of regions: parts of RPC keys, in order and without gaps."""
    start = span.start
    for region in cluster.pd.each_region(codec.bound(start), codec.bound(span.end)):
        cluster.regions.update([region])
        try:
            cut = region.end_within(codec, span)
        except BoundInsideKey:
            continue
        if start < cut != span.end:
            yield KeyRange(start, cut)
            start = cut
    yield KeyRange(start, span.end)
