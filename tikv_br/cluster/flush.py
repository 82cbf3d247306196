"""Makes every store give up its cached timestamps.

A V2 store stamps writes from a batch of timestamps that it fetched up to 3 s before. After a flush every later write has
a timestamp above any that PD gave out before the flush. The request that flushes is a Backup to nowhere of a range that
holds one key: a store flushes before it looks at the range (seen on running servers).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from tikv_br.cluster import retry
from tikv_br.cluster.off_main import off_main
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.retry import Backoffer
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import ClusterUnreachable, RequestRefused

_KEY = KeyCodec(ApiVersion.V2).rpc_key(b"")
"""The first key of the default keyspace; it need not exist."""


def flush_request(cluster_id: int) -> brpb_pb2.BackupRequest:
    """A Backup that writes nothing and reads at most one key."""
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
    """Flush each of these V2 stores, within `retry_budget` seconds of trouble a store.

    A store that does not answer is left out if it is `gone`: when PD hears nothing of it either, it takes no writes,
    and comes back with an empty cache. Raises `RetryBudgetExhausted` when another does not answer: its next writes may
    lie below a timestamp already taken.
    """
    for store in stores:
        backoffer = Backoffer(f"flush of {store}", retry_budget)
        while True:
            try:
                _flush(store, cluster_id)
            except ClusterUnreachable as error:
                if store.store.id not in gone():
                    backoffer.wait(retry.STORE_UNREACHABLE, error)
                    continue
            break


def _flush(store: StoreClient, cluster_id: int) -> None:
    answers = off_main(lambda: list(store.backup(flush_request(cluster_id), timeout=store.request_timeout)))
    for answer in answers:
        # The store flushed before it met a region in motion; any other error means that it did not.
        if answer.HasField("error") and not answer.error.HasField("region_error"):
            raise RequestRefused(f"{store} does not flush its timestamps: {answer.error.msg}")
