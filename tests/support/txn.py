"""Transactions as plain requests to a playground, each with the timestamps that a test chooses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.integration.playground.clients import Client
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.keys import codec
from tikv_br.playground.region import Region

Message: TypeAlias = Any
TTL = 3000


@dataclass(frozen=True)
class TxnClient:
    """Sends requests to the leader of their key, in the form of every command."""

    client: Client

    def region(self, key: bytes) -> Region:
        """The region of a key."""
        return self.client.playground.regions.locate(codec.encode(key) if key else b"")

    def call(self, rpc: str, key: bytes, request: Message) -> Message:
        """Any request about a key."""
        request.context.MergeFrom(self.client.context(self.region(key)))
        answer = getattr(self.client.store(self.region(key).leader_store), rpc)(request, timeout=60)
        assert not answer.HasField("region_error"), answer
        return answer

    def ts(self) -> int:
        """A fresh timestamp of PD."""
        return self.client.playground.tso.next()

    def prewrite(
        self,
        start_ts: int,
        mutations: Iterable[kv.Mutation],
        primary: bytes | None = None,
        **fields: Any,  # noqa: ANN401 - those of the request
    ) -> kv.PrewriteResponse:
        """Prewrite mutations of one region; the first key is the primary unless named."""
        mutations = list(mutations)
        fields = {"lock_ttl": TTL, "txn_size": len(mutations), "min_commit_ts": start_ts + 1} | fields
        request = kv.PrewriteRequest(
            mutations=mutations, start_version=start_ts, primary_lock=primary or mutations[0].key, **fields
        )
        answer: kv.PrewriteResponse = self.call("KvPrewrite", mutations[0].key, request)
        return answer

    def commit(self, start_ts: int, commit_ts: int, *keys: bytes) -> kv.KeyError | None:
        """Commit keys of one region; the error, None if there is none."""
        request = kv.CommitRequest(start_version=start_ts, commit_version=commit_ts, keys=keys)
        answer = self.call("KvCommit", keys[0], request)
        return answer.error if answer.HasField("error") else None

    def write(self, *mutations: kv.Mutation) -> int:
        """Prewrite and commit each on its own; the last commit ts."""
        commit_ts = 0
        for mutation in mutations:
            start_ts = self.ts()
            assert self.prewrite(start_ts, [mutation]) == kv.PrewriteResponse()
            commit_ts = self.ts()
            assert self.commit(start_ts, commit_ts, mutation.key) is None
        return commit_ts

    def get(self, key: bytes, ts: int | None = None, **context: Any) -> kv.GetResponse:  # noqa: ANN401
        """Read a key, by default at a fresh timestamp."""
        request = kv.GetRequest(key=key, version=ts or self.ts(), context=kv.Context(**context))
        answer: kv.GetResponse = self.call("KvGet", key, request)
        return answer

    def scan(self, start: bytes, end: bytes, ts: int, **fields: Any) -> list[kv.KvPair]:  # noqa: ANN401
        """All pairs of a range, region by region."""
        fields = {"limit": 10_240} | fields
        pairs: list[kv.KvPair] = []
        for first in self._parts(start, end):
            request = kv.ScanRequest(start_key=start, end_key=end, version=ts, **fields)
            pairs += self.call("KvScan", first, request).pairs
        return pairs

    def _parts(self, start: bytes, end: bytes) -> Iterator[bytes]:
        last = codec.encode(end) if end else b""
        for region in self.client.playground.regions.overlapping(codec.encode(start) if start else b"", last):
            yield start if region.contains(codec.encode(start)) else codec.decode(region.start)[0]


def put(key: bytes, value: bytes = b"v", **fields: Any) -> kv.Mutation:  # noqa: ANN401
    """A put."""
    return kv.Mutation(op=kv.Put, key=key, value=value, **fields)


def delete(key: bytes) -> kv.Mutation:
    """A delete."""
    return kv.Mutation(op=kv.Del, key=key)
