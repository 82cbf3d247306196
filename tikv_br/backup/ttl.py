"""The expiry of scanned rows: RawScan does not tell it, so each key is asked for, many requests at a time.

The row was read before its TTL: a key overwritten between the two gets the old value with the new expiry, and one that
has gone is left out. A change feed from backup-ts on puts that right; without one, stop the writers.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, TypeAlias

import grpc
import numpy as np
import pyarrow as pa

from formats.columns import Flags, Numbers
from formats.errors import DamagedBytes
from tikv_br.cluster import guard
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.regions import Region
from tikv_br.cluster.timestamp import physical_ms
from tikv_br.errors import ClusterError

IN_FLIGHT = 256
"""Requests under way at once; each is a few hundred bytes."""
LAST_EXPIRY = (1 << 64) - 1
"""Of a row whose TTL goes beyond: stores cap the sum there."""

_Answer: TypeAlias = "grpc.Future[kvrpcpb_pb2.RawGetKeyTTLResponse]"


class _Asked(NamedTuple):
    """A request under way."""

    row: int
    key: bytes
    at: int
    """When it was sent, in seconds since the epoch."""
    answer: _Answer | None
    """None when not even its store is known."""


class PdClock:
    """The cluster's wall clock, by PD's: closer to the stores' than this machine's may be."""

    def __init__(self, tso: int) -> None:
        """Begin with a timestamp fetched just now."""
        self._ahead = physical_ms(tso) / 1000 - time.monotonic()

    def now(self) -> int:
        """Seconds since the epoch."""
        return int(self._ahead + time.monotonic())


class TtlFetcher:
    """Asks for the TTLs of ascending keys. For one thread. Refuses (`DangerousRequest`) a cluster without TTL."""

    def __init__(self, cluster: Cluster, raw: RawClient) -> None:
        guard.check_get_ttl(raw.codec.api_version)
        self._cluster = cluster
        self._raw = raw
        self._clock = PdClock(cluster.pd.tso())
        self._region: Region | None = None
        self._region_end = b""

    def fetch(self, keys: pa.LargeBinaryArray) -> tuple[Numbers, Flags]:
        """When each RPC key expires, in seconds since the epoch (0 = never), and whether it is still there.

        Raises `ClusterError` when a key's request fails for good.
        """
        expire_ts, there = np.zeros(len(keys), np.uint64), np.ones(len(keys), np.bool_)
        pending: deque[_Asked] = deque()

        def take_first() -> None:
            asked = pending.popleft()
            expiry = self._expiry(asked)
            there[asked.row] = expiry is not None
            expire_ts[asked.row] = expiry or 0

        for row, key in enumerate(keys.to_pylist()):
            pending.append(_Asked(row, key, self._clock.now(), self._send(key)))
            if len(pending) >= IN_FLIGHT:
                take_first()
        while pending:
            take_first()
        return expire_ts, there

    def _send(self, key: bytes) -> _Answer | None:
        try:
            region = self._region_of(key)
            store = self._cluster.store(region.leader.store_id)
        except ClusterError:
            return None
        context = region.context(self._raw.codec.api_version, self._cluster.cluster_id)
        request = kvrpcpb_pb2.RawGetKeyTTLRequest(context=context, key=key)
        return store.kv.RawGetKeyTTL.future(request, timeout=self._cluster.config.request_timeout)

    def _expiry(self, asked: _Asked) -> int | None:
        """0 for never, None for no such key; asked again, with all the retries, where the first try failed.

        What is left of a TTL counts from the sending: the store read its clock later, so no expiry is ever too late.
        """
        try:
            if asked.answer is not None:
                answer = asked.answer.result()
                if not answer.HasField("region_error") and not answer.error:
                    return None if answer.not_found else _from(asked.at, answer.ttl)
        except grpc.RpcError:
            pass
        self._region = None
        at = self._clock.now()
        left = self._raw.get_ttl(self._raw.codec.user_key(asked.key))
        return None if left is None else _from(at, left)

    def _region_of(self, key: bytes) -> Region:
        """The key's region; asked of the cache only when the keys have left the last one."""
        if self._region is None or (self._region_end and key >= self._region_end):
            codec = self._raw.codec
            self._region = self._cluster.regions.locate(codec.bound(key))
            try:
                self._region_end = codec.from_bound(self._region.end)
            except DamagedBytes:  # a bound that is no key: trust it for this key only
                self._region_end = key + b"\0"
        return self._region


def _from(moment: int, left: int) -> int:
    """Never beyond what a store can hold: of the longest TTLs more may be left by its clock than fits by ours."""
    return min(moment + left, LAST_EXPIRY) if left else 0
