"""Fetches the TTLs of keys, with many requests in flight."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import grpc
from msgspec import Struct

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import check_get_ttl
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.errors import ClusterError
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import ScanPage

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.formats.columns import Flags, Numbers

IN_FLIGHT = 256
"""Maximum number of requests in flight; each is a few hundred bytes."""
MIN_IN_FLIGHT = 16
"""Number of requests in flight if stores are slow."""
WAITING_SECONDS = 0.5
"""A request that takes this much longer than the fastest of its page has waited behind others."""
LAST_EXPIRY = (1 << 64) - 1
"""Largest expiry; stores cap the sum of time and TTL there."""
_Answer: TypeAlias = "grpc.Future[kvrpcpb_pb2.RawGetKeyTTLResponse]"


class _TtlRequest(Struct, eq=False):
    """A request in flight."""

    row: int
    key: bytes
    is_retry: bool
    sent: float = 0.0
    """Time of sending, by `time.monotonic`."""
    received: float = 0.0
    """Time of arrival of the answer, which may be long before it is read; 0 = not yet."""
    answer: _Answer | None = None
    """None if the request could not be sent."""

    def mark_received(self, _answer: object) -> None:
        """Callback for gRPC: the answer has arrived."""
        self.received = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.received - self.sent


class _Expiry(NamedTuple):
    """The expiry of a row: the real one is between ``expire_ts`` and ``expire_ts + error``."""

    expire_ts: int
    """Seconds since the epoch; 0 = never."""
    error: int
    """Seconds."""


class PdClock:
    """The cluster's wall clock, read from PD: likely closer to the stores' clocks than this machine's."""

    def __init__(self, fetch_tso: Callable[[], int]) -> None:
        """Read the clock once; the time that takes is the uncertainty."""
        began = time.monotonic()
        physical = physical_ms(fetch_tso()) / 1000
        self._least = physical - time.monotonic()
        self._most = physical - began

    def expiry(self, ttl: int, sent: float, received: float) -> _Expiry:
        """The expiry of a row with this TTL (0 = never), from a request that was in flight from ``sent`` to ``received``.

        The store read its clock in between. Counted from the time of sending, the expiry is never too late. It is capped at
        `LAST_EXPIRY`, as in the store.
        """
        if not ttl:
            return _Expiry(0, 0)
        first, last = int(self._least + sent), int(self._most + received)
        return _Expiry(min(first + ttl, LAST_EXPIRY), last - first)


class TtlFetcher:
    """Fetches the TTLs of ascending keys. For one thread. Raises `DangerousRequest` for a cluster without TTLs.

    An expiry may be too early by the duration of its request and the uncertainty of PD's clock. If requests queue at a slow store, fewer are kept in flight, and
    those that queued are sent once more.
    """

    def __init__(self, cluster: Cluster, raw: RawClient) -> None:
        check_get_ttl(raw.codec.api_version)
        self._cluster = cluster
        self._raw = raw
        self._clock = PdClock(cluster.pd.tso)
        self._region: Region | None = None
        self._region_end = b""
        self._window = float(MIN_IN_FLIGHT)
        self._fastest = math.inf
        self._outdated = 0
        """Outstanding answers to requests that were sent before the window last shrank: they say nothing about the new one."""
        self.error_seconds = 0
        """Maximum number of seconds by which an expiry so far may be too early."""
        self.vanished = 0
        """Rows that no longer existed when their TTL was read."""

    def live_rows(self, page: ScanPage) -> tuple[ScanPage, Numbers]:
        """The rows of a page that still exist, and the expiry of each, in seconds since the epoch (0 = never); see `fetch`."""
        import pyarrow as pa

        expire_ts, there = self.fetch(page.keys)
        mask = pa.array(there)
        self.vanished += len(there) - int(there.sum())
        return ScanPage(page.keys.filter(mask), page.values.filter(mask)), expire_ts[there]

    def fetch(self, keys: pa.LargeBinaryArray) -> tuple[Numbers, Flags]:
        """The expiry of each RPC key, in seconds since the epoch (0 = never), and whether the key still exists.

        Raises `ClusterError` if a key's request fails after its retries.
        """
        import numpy as np

        expiries: list[_Expiry | None] = [None] * len(keys)
        pending: deque[_TtlRequest] = deque()
        self._fastest = math.inf

        def receive_first() -> None:
            request = pending.popleft()
            expiry = self._expiry(request)
            earlier = expiries[request.row]
            if expiry is not None and earlier is not None:
                expiry = min(expiry, earlier, key=lambda each: each.error)
            expiries[request.row] = expiry
            waited = self._adapt(request, len(pending))
            if waited and not request.is_retry and expiry is not None and expiry.error:
                pending.append(self._send(request.row, request.key, is_retry=True))

        for row, key in enumerate(keys.to_pylist()):
            while len(pending) >= int(self._window):
                receive_first()
            pending.append(self._send(row, key))
        while pending:
            receive_first()
        found = [each for each in expiries if each is not None]
        self.error_seconds = max(self.error_seconds, max((each.error for each in found), default=0))
        there = np.array([each is not None for each in expiries], np.bool_)
        expire_ts = np.array([0 if each is None else each.expire_ts for each in expiries], np.uint64)
        if self._raw.codec.is_v2 and not expire_ts.all():
            there &= self._still_there(keys)
        return expire_ts, there

    def _still_there(self, keys: pa.LargeBinaryArray) -> Flags:
        """Return whether each key still has a row: to a request for the TTL of a deleted one, V2 answers that it has none."""
        import pyarrow as pa
        import pyarrow.compute as pc

        first, last = keys[0].as_py(), keys[-1].as_py()
        pages = [page.keys for page in self._raw.scan_pages(KeyRange(first, last + b"\0"), key_only=True)]
        found: Flags = pc.is_in(keys, pa.chunked_array(pages, keys.type)).to_numpy(zero_copy_only=False)
        return found

    def _adapt(self, request: _TtlRequest, pending: int) -> bool:
        """Adapt the window to the duration of a request while ``pending`` others are in flight; returns whether it has queued."""
        if not request.received:  # it failed
            return False
        self._fastest = min(self._fastest, request.seconds)
        waited = request.seconds > self._fastest + WAITING_SECONDS
        if self._outdated:
            self._outdated -= 1
        elif waited:
            self._window = max(self._window / 2, MIN_IN_FLIGHT)
            self._outdated = pending
        else:
            self._window = min(self._window + 1, IN_FLIGHT)
        return waited

    def _send(self, row: int, key: bytes, *, is_retry: bool = False) -> _TtlRequest:
        request = _TtlRequest(row, key, is_retry)
        try:
            region = self._region_of(key)
            store = self._cluster.store(region.leader.store_id)
        except ClusterError:
            return request
        context = region.context(self._raw.codec.api_version, self._cluster.cluster_id)
        message = kvrpcpb_pb2.RawGetKeyTTLRequest(context=context, key=key)
        request.sent = time.monotonic()
        request.answer = store.kv.RawGetKeyTTL.future(message, timeout=self._cluster.config.request_timeout)
        request.answer.add_done_callback(request.mark_received)
        return request

    def _expiry(self, request: _TtlRequest) -> _Expiry | None:
        """The expiry from the answer; None if the key does not exist. Repeats a failed request, with retries."""
        try:
            if request.answer is not None:
                answer = request.answer.result()
                if not answer.HasField("region_error") and not answer.error:
                    request.received = request.received or time.monotonic()
                    return None if answer.not_found else self._clock.expiry(answer.ttl, request.sent, request.received)
        except grpc.RpcError:
            pass
        self._region, request.received = None, 0.0
        left = self._raw.get_timed_ttl(self._raw.codec.user_key(request.key))
        return None if left is None else self._clock.expiry(*left)

    def _region_of(self, key: bytes) -> Region:
        """The key's region; looked up only if the key is beyond the last one."""
        if self._region is None or (self._region_end and key >= self._region_end):
            codec = self._raw.codec
            self._region = self._cluster.regions.locate(codec.bound(key))
            try:
                self._region_end = codec.from_bound(self._region.end)
            except DamagedBytes:  # a bound that is not an encoded key: use the region for this key only
                self._region_end = key + b"\0"
        return self._region
