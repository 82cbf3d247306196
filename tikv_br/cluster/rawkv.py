"""RawKV calls with user keys of one keyspace, with routing and retries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tikv_br.cluster.clock import no_clock
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.region_errors import check_answer, check_pairs, check_region_error
from tikv_br.cluster.regions import Region
from tikv_br.cluster.router import BATCH_ITEMS, Router
from tikv_br.cluster.scan import RangeWalk
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import UsageError
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import RAW_MODE, RAW_MODE_END, KeyCodec, last_key
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange

if TYPE_CHECKING:
    import grpc

    from tikv_br.cluster.puts import ColumnWriter
    from tikv_br.cluster.rate_limit import RateLimit
    from tikv_br.formats.rawscan import RawPage, ScanPage

PAGE_ROWS = 40_960
"""Default maximum of rows per page: with it, small rows fill a page as well."""

EXECUTION_SHARE = 2 / 3
"""Part of our timeout after which a store must no longer begin a write: one that we gave up must not take effect after later ones."""

T = TypeVar("T")
Request = TypeVar("Request")
Response = TypeVar("Response")


class TimedTtl(NamedTuple):
    """A TTL in seconds (0 = never), and when the request was under way."""

    ttl: int
    sent: float
    """Time of sending by `time.monotonic`, as is `received`."""
    received: float


class RawClient:
    """RawKV on one keyspace. Thread-safe.

    Every call raises `RetryBudgetExhausted`, `RequestRefused`, `ApiVersionMismatch` or another `ClusterError`.
    TTLs are in seconds from now, on the server's clock; 0 is never.
    """

    def __init__(
        self,
        router: Router,
        codec: KeyCodec,
        cluster_id: int,
        fence: Callable[[], object] = lambda: None,
        now: Callable[[], int] = no_clock,
    ) -> None:
        """`fence` is called right before each request that writes, and may raise to stop it.

        `now` gives the seconds since the epoch by which expiries are judged, as `ClusterClock` does.
        """
        self._router = router
        self.cluster_id = cluster_id
        self._fence = fence
        self.now = now
        self._execution_ms = round(1000 * EXECUTION_SHARE * router.config.request_timeout)
        self.codec = codec
        self._context = partial(
            Region.context, api_version=codec.api_version, cluster_id=cluster_id, max_execution_ms=self._execution_ms
        )

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None when there is none."""

        def send(store: StoreClient, context: kvrpcpb_pb2.Context, rpc_key: bytes) -> bytes | None:
            answer = store.call(store.kv.RawGet, kvrpcpb_pb2.RawGetRequest(context=context, key=rpc_key))
            check_answer(answer)
            return None if answer.not_found else answer.value

        return self._on_key(key, send, "RawGet")

    def batch_get(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The values of the keys that exist."""
        rpc_keys = sorted({self.codec.rpc_key(key) for key in keys})
        found: dict[bytes, bytes] = {}
        done = 0

        def send(region: Region, store: StoreClient) -> int:
            batch = [key for key in rpc_keys[done : done + BATCH_ITEMS] if region.contains(self.codec.bound(key))]
            request = kvrpcpb_pb2.RawBatchGetRequest(context=self._context(region), keys=batch)
            answer = store.call(store.kv.RawBatchGet, request)
            check_region_error(answer)
            check_pairs(answer.pairs)
            found.update((self.codec.user_key(pair.key), pair.value) for pair in answer.pairs)
            return len(batch)

        while done < len(rpc_keys):
            done += self._router.call(self.codec.bound(rpc_keys[done]), send, "RawBatchGet", retry_unknown=True)
        return found

    def put(self, key: bytes, value: bytes, ttl: int = 0) -> None:
        """Write one pair. Raises `UsageError` for a TTL on a cluster without TTL, before anything is sent."""
        self._check_ttl(ttl)

        def send(store: StoreClient, context: kvrpcpb_pb2.Context, rpc_key: bytes) -> None:
            request = kvrpcpb_pb2.RawPutRequest(context=context, key=rpc_key, value=value, ttl=ttl)
            check_answer(self._write(store, store.kv.RawPut, request))

        self._on_key(key, send, "RawPut")

    def batch_put(self, pairs: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]], ttl: int = 0) -> None:
        """Write pairs in batches; of equal keys the last counts. Not atomic: after an error some may be written."""
        from tikv_br.formats import columns

        self._check_ttl(ttl)
        rows = sorted(dict(pairs).items())
        keys, values = (columns.from_list([row[at] for row in rows]) for at in (0, 1))
        self.column_writer().put(keys, values, ttl=ttl)

    def column_writer(self, batch_rows: int = BATCH_ITEMS, rate_limit: RateLimit | None = None) -> ColumnWriter:
        """Writes rows of Arrow columns without a Python object per row, at most `batch_rows` per request."""
        from tikv_br.cluster.puts import ColumnWriter

        return ColumnWriter(self._router, self.codec, self._context, self._fence, batch_rows, rate_limit, self.now)

    def delete(self, key: bytes) -> None:
        """Remove one key, if it exists; in V2 this writes a tombstone."""

        def send(store: StoreClient, context: kvrpcpb_pb2.Context, rpc_key: bytes) -> None:
            request = kvrpcpb_pb2.RawDeleteRequest(context=context, key=rpc_key)
            check_answer(self._write(store, store.kv.RawDelete, request))

        self._on_key(key, send, "RawDelete")

    def batch_delete(self, keys: Iterable[bytes]) -> None:
        from tikv_br.formats import columns

        self.column_writer().delete(columns.from_list(sorted(set(keys))))

    def delete_range(self, span: KeyRange) -> None:
        """Remove a range of user keys with all versions, by RawDeleteRange. Change feeds do not see it."""

        def send(store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> None:
            context.max_execution_duration_ms = self._execution_ms
            request = kvrpcpb_pb2.RawDeleteRangeRequest(context=context, start_key=start, end_key=end)
            check_answer(self._write(store, store.kv.RawDeleteRange, request))

        walk = self._walk(self.codec.rpc_range(span))
        while not walk.done:
            _, reached = walk.send_part(send, "RawDeleteRange")
            walk.advance(reached)

    def get_ttl(self, key: bytes) -> int | None:
        """Seconds until a key expires, 0 for never; None when there is no such key.

        Raises `UsageError` on a cluster without TTL: nothing is sent, because such a store would die of the request.
        """
        timed = self.get_timed_ttl(key)
        return None if timed is None else timed.ttl

    def get_timed_ttl(self, key: bytes) -> TimedTtl | None:
        """As `get_ttl`, with the times of the one request that was answered: retries before it do not count."""
        if not self.codec.api_version.has_ttl:
            raise UsageError("this cluster does not support TTLs (API V1 without storage.enable-ttl)")
        timed = self._ttl_with_tombstones(key)
        if timed is not None and timed.ttl == 0 and self.codec.is_v2 and self.get(key) is None:
            return None
        return timed

    def _ttl_with_tombstones(self, key: bytes) -> TimedTtl | None:
        """As `get_timed_ttl`, but a V2 store answers 0 for a deleted key as well: it finds the tombstone."""

        def send(store: StoreClient, context: kvrpcpb_pb2.Context, rpc_key: bytes) -> TimedTtl | None:
            request = kvrpcpb_pb2.RawGetKeyTTLRequest(context=context, key=rpc_key)
            sent = time.monotonic()
            answer = store.raw_get_key_ttl(request, self.codec.api_version)
            received = time.monotonic()
            check_answer(answer)
            return None if answer.not_found else TimedTtl(answer.ttl, sent, received)

        return self._on_key(key, send, "RawGetKeyTTL")

    def has_tombstone(self, key: bytes) -> bool:
        """Return whether the newest version of a key is a delete, which API V2 keeps and which hides older ones."""
        if not self.codec.is_v2 or self.get(key) is not None:
            return False
        timed = self._ttl_with_tombstones(key)
        return timed is not None and timed.ttl == 0

    def checksum(self, span: KeyRange = EVERY_KEY) -> Checksum:
        """The servers' checksum over the live pairs of a range of user keys."""

        def send(store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> Checksum:
            request = kvrpcpb_pb2.RawChecksumRequest(context=context)
            request.ranges.add(start_key=start, end_key=end)
            answer = store.call(store.kv.RawChecksum, request, timeout=store.long_timeout)
            check_answer(answer)
            return Checksum(answer.checksum, answer.total_kvs, answer.total_bytes)

        total = Checksum()
        walk = self._walk(self.codec.rpc_range(span))
        while not walk.done:
            part, reached = walk.send_part(send, "RawChecksum")
            total += part
            walk.advance(reached)
        return total

    def scan_pages(
        self, span: KeyRange, page_rows: int = PAGE_ROWS, *, key_only: bool = False, rate_limit: RateLimit | None = None
    ) -> Iterator[ScanPage]:
        """Pages of RPC keys and user values of the RPC range; see `scan.scan_pages`."""
        from tikv_br.cluster.scan import scan_pages

        pages = scan_pages(self._walk(span), page_rows, key_only=key_only, rate_limit=rate_limit)
        return (page.split() for page in pages)

    def scan_raw_pages(self, span: KeyRange, rate_limit: RateLimit | None = None) -> Iterator[RawPage]:
        """The same pages as they came."""
        from tikv_br.cluster.scan import scan_pages

        return scan_pages(self._walk(span), PAGE_ROWS, rate_limit=rate_limit)

    def first_rpc_key(self, span: KeyRange) -> bytes | None:
        """The first RPC key of an RPC range; None when there is none. Unlike `scan_pages` it loads no kernels."""

        def send(store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> bytes | None:
            return _one_key(store, kvrpcpb_pb2.RawScanRequest(context=context, start_key=start, end_key=end))

        walk = self._walk(span)
        while not walk.done:
            found, reached = walk.send_part(send, "RawScan")
            if found is not None:
                return found
            walk.advance(reached)
        return None

    def last_key(self, span: KeyRange) -> bytes | None:
        """The last key of a range of user keys; None if there is none.

        Servers have no reverse scan from the very end, nor in V2 from the end of the last keyspace: there it begins at `last_key`.
        """

        def send(store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> bytes | None:
            upper = last_key(RAW_MODE) if self.codec.is_v2 and end == RAW_MODE_END else end or last_key()
            request = kvrpcpb_pb2.RawScanRequest(context=context, start_key=upper, end_key=start, reverse=True)
            return _one_key(store, request)

        last: bytes | None = None
        walk = self._walk(self.codec.rpc_range(span))
        while not walk.done:
            found, reached = walk.send_part(send, "RawScan")
            last = last if found is None else found
            walk.advance(reached)
        return None if last is None else self.codec.user_key(last)

    def _walk(self, span: KeyRange) -> RangeWalk:
        return RangeWalk(self._router, self.codec, self.cluster_id, span.start, span.end)

    def _on_key(self, key: bytes, send: Callable[[StoreClient, kvrpcpb_pb2.Context, bytes], T], what: str) -> T:
        rpc_key = self.codec.rpc_key(key)

        def send_to(region: Region, store: StoreClient) -> T:
            return send(store, self._context(region), rpc_key)

        return self._router.call(self.codec.bound(rpc_key), send_to, what, retry_unknown=True)

    def _write(
        self, store: StoreClient, method: grpc.UnaryUnaryMultiCallable[Request, Response], request: Request
    ) -> Response:
        self._fence()
        return store.call(method, request)

    def _check_ttl(self, ttl: int) -> None:
        if ttl and not self.codec.api_version.has_ttl:
            raise UsageError("this cluster does not support TTLs (API V1 without storage.enable-ttl)")
        if ttl < 0:
            raise UsageError(f"the TTL must not be negative, got {ttl} s")


def _one_key(store: StoreClient, request: kvrpcpb_pb2.RawScanRequest) -> bytes | None:
    """The first key that a scan comes to."""
    request.limit, request.key_only = 1, True
    answer = kvrpcpb_pb2.RawScanResponse.FromString(store.raw_scan(request))
    check_region_error(answer)
    check_pairs(answer.kvs)
    return answer.kvs[0].key if answer.kvs else None
