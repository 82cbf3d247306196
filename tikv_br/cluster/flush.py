"""Makes stores of API V2 drop the timestamps that they have cached for writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable

from tikv_br.cluster.channel import run_in_worker_thread
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.region_errors import NO_TIMESTAMP
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import ClusterUnreachable, RequestRefused
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.retry import STORE_UNREACHABLE, RetryPolicy

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
