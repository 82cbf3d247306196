"""Transactions on a playground that runs in a process of its own, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.live_cluster import LiveCluster
from tikv_br.cluster.locks import LockReport, LockResolver
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.region_errors import check_region_error
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode, encode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange

NAMES = [b"a%02d" % number for number in range(40)]
ALIVE = 3_600_000


@dataclass(frozen=True)
class Txns:
    """Plain requests of transactions to a playground; every key goes to its own region."""

    live: LiveCluster
    prefix: bytes
    _pessimistic: list[tuple[bytes, int]] = field(default_factory=list)

    def key(self, name: bytes) -> bytes:
        """The key of a name."""
        return self.prefix + name

    @property
    def span(self) -> KeyRange:
        """The range of all keys."""
        return KeyMode.TXN.keys if self.prefix else EVERY_KEY

    def ts(self) -> int:
        """A fresh timestamp."""
        return self.live.cluster.pd.tso()

    def call(self, rpc: str, key: bytes, request: Any) -> Any:  # noqa: ANN401
        """Send a request about a key."""

        def send(region: Region, store: StoreClient) -> Any:  # noqa: ANN401
            context = region.context(self.live.cluster.api_version, self.live.cluster.cluster_id)
            request.context.CopyFrom(context)
            answer = store.call(getattr(store.kv, rpc), request)
            check_region_error(answer)
            return answer

        return self.live.cluster.router.call(encode(key), send, rpc)

    def prewrite(self, *names: bytes, primary: bytes | None = None, ttl: int = 1, **fields: Any) -> int:  # noqa: ANN401
        """Lock keys with their values, first the primary; the start ts. Fields are of the primary's request, too."""
        start_ts = self.ts()
        for name in names:
            request = kv.PrewriteRequest(
                mutations=[kv.Mutation(op=kv.Put, key=self.key(name), value=b"of %d" % start_ts)],
                primary_lock=self.key(primary or names[0]),
                start_version=start_ts,
                lock_ttl=ttl,
                min_commit_ts=start_ts + 1,
                **fields,
            )
            answer = self.call("KvPrewrite", self.key(name), request)
            assert not answer.errors, answer
        return start_ts

    def async_prewrite(self, *names: bytes, missing: int = 0, ttl: int = 1) -> int:
        """Lock keys for an async commit, all but the last ones."""
        held = names[: len(names) - missing]
        secondaries = [self.key(name) for name in names[1:]]
        return self.prewrite(*held, ttl=ttl, use_async_commit=True, secondaries=secondaries)

    def lock_pessimistically(self, name: bytes, ttl: int = 1) -> int:
        """Lock a key; the start ts."""
        start_ts = self.ts()
        request = kv.PessimisticLockRequest(
            mutations=[kv.Mutation(op=kv.PessimisticLock, key=self.key(name))],
            primary_lock=self.key(name),
            start_version=start_ts,
            lock_ttl=ttl,
            for_update_ts=start_ts,
            is_first_lock=True,
        )
        answer = self.call("KvPessimisticLock", self.key(name), request)
        assert not answer.errors, answer
        self._pessimistic.append((name, start_ts))
        return start_ts

    def commit(self, start_ts: int, *names: bytes) -> int:
        """Commit keys; the commit ts."""
        commit_ts = self.ts()
        for name in names:
            request = kv.CommitRequest(start_version=start_ts, keys=[self.key(name)], commit_version=commit_ts)
            answer = self.call("KvCommit", self.key(name), request)
            assert not answer.HasField("error"), answer
        return commit_ts

    def get(self, name: bytes) -> kv.GetResponse:
        """The rows that a reader of now finds."""
        answer: kv.GetResponse = self.call(
            "KvGet", self.key(name), kv.GetRequest(key=self.key(name), version=self.ts())
        )
        return answer

    def written_by(self, name: bytes) -> int:
        """Start ts of the transaction whose value a reader finds; 0 = there is none. No lock may be in the way."""
        answer = self.get(name)
        assert not answer.HasField("error"), answer
        return 0 if answer.not_found else int(answer.value.removeprefix(b"of "))

    def clear(self) -> None:
        """Remove all rows and locks. Stores keep pessimistic locks in memory, where the deletion of a range leaves them."""
        for name, ts in self._pessimistic:
            back = kv.PessimisticRollbackRequest(start_version=ts, for_update_ts=ts, keys=[self.key(name)])
            self.call("KVPessimisticRollback", self.key(name), back)
        for name in NAMES:
            request = kv.DeleteRangeRequest(start_key=self.key(name), end_key=self.key(name) + b"\0")
            self.call("KvDeleteRange", self.key(name), request)

    def resolve(self, patience: float = 0.0, **fields: Any) -> LockReport:  # noqa: ANN401
        """Resolve all locks up to now."""
        resolver = LockResolver(self.live.cluster, **fields)
        return resolver.resolve(self.span, self.ts(), patience=patience)


def prefix_of(live: LiveCluster, keyspace: str = "DEFAULT") -> bytes:
    """The prefix of keys in the keyspace of this name, which is created unless it exists."""
    is_v2 = live.cluster.api_version is ApiVersion.V2
    return b"x" + live.create_keyspace(keyspace).to_bytes(3, "big") if is_v2 else b""
