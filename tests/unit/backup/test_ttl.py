"""When a scanned row expires: counted from the sending of the question, whatever the answer's way took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pyarrow as pa
import pytest

from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from tikv_br.backup import ttl
from tikv_br.cluster.pb import kvrpcpb_pb2

NOW = 1_000_000


class Clock:
    """A clock that only what takes time moves."""

    seconds = NOW

    def now(self) -> int:
        """Seconds since the epoch."""
        return self.seconds


class Answer:
    """A future whose answer takes long, or fails."""

    def __init__(self, clock: Clock, response: kvrpcpb_pb2.RawGetKeyTTLResponse | None) -> None:
        self._clock, self._response = clock, response

    def result(self) -> kvrpcpb_pb2.RawGetKeyTTLResponse:
        """Return it five seconds later."""
        self._clock.seconds += 5
        if self._response is None:
            raise grpc.RpcError
        return self._response


def fetcher(clock: Clock, answers: dict[bytes, kvrpcpb_pb2.RawGetKeyTTLResponse | None]) -> ttl.TtlFetcher:
    """Return a fetcher of a cluster of one region; asked again, that answers 50 after seven seconds."""

    def ask_again(_key: bytes) -> int:
        clock.seconds += 7
        return 50

    def future(request: kvrpcpb_pb2.RawGetKeyTTLRequest, **_timeout: float) -> Answer:
        return Answer(clock, answers[request.key])

    region = SimpleNamespace(
        leader=SimpleNamespace(store_id=1), end=b"", context=lambda *_: kvrpcpb_pb2.Context(region_id=1)
    )
    cluster: Any = SimpleNamespace(
        pd=SimpleNamespace(tso=lambda: NOW * 1000 << 18),
        regions=SimpleNamespace(locate=lambda _key: region),
        store=lambda _id: SimpleNamespace(kv=SimpleNamespace(RawGetKeyTTL=SimpleNamespace(future=future))),
        config=SimpleNamespace(request_timeout=1.0),
        cluster_id=1,
    )
    raw: Any = SimpleNamespace(codec=KeyCodec(ApiVersion.V1TTL), get_ttl=ask_again)
    return ttl.TtlFetcher(cluster, raw)


def test_expiry_counts_from_the_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests sent together the last is read much later: its row must not live longer for that. 0 stays never."""
    clock = Clock()
    monkeypatch.setattr(ttl, "PdClock", lambda _tso: clock)
    response = kvrpcpb_pb2.RawGetKeyTTLResponse
    answers = {
        b"a": response(ttl=100),
        b"b": response(ttl=100),
        b"c": response(),
        b"d": response(not_found=True),
        b"e": None,
    }
    expire_ts, there = fetcher(clock, answers).fetch(pa.array(sorted(answers), pa.large_binary()))
    assert there.tolist() == [True, True, True, False, True]
    asked_again = NOW + 5 * 5
    assert expire_ts.tolist() == [NOW + 100, NOW + 100, 0, 0, asked_again + 50]


def test_the_longest_ttls_end_where_an_expiry_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a store's clock that is behind PD's more is left than can be added here: the row keeps the last expiry there is."""
    clock = Clock()
    monkeypatch.setattr(ttl, "PdClock", lambda _tso: clock)
    answers = {b"a": kvrpcpb_pb2.RawGetKeyTTLResponse(ttl=ttl.LAST_EXPIRY - NOW + 3)}
    expire_ts, _ = fetcher(clock, dict(answers)).fetch(pa.array([b"a"], pa.large_binary()))
    assert expire_ts.tolist() == [ttl.LAST_EXPIRY]
