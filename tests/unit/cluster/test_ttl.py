"""When a scanned row expires: counted from the sending of its own request, and known as exactly as that is short."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pyarrow as pa
import pytest

from tikv_br.cluster import ttl
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.rawkv import TimedTtl
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec

NOW = 1_000_000


class Clock:
    """A monotonic clock that only what takes time moves; it shows the seconds since the epoch."""

    def __init__(self) -> None:
        self.seconds = float(NOW)

    def monotonic(self) -> float:
        """As `time.monotonic`."""
        return self.seconds


class Answer:
    """A future whose answer takes long, or fails."""

    def __init__(self, clock: Clock, response: kvrpcpb_pb2.RawGetKeyTTLResponse | None, seconds: float) -> None:
        self._clock, self._response, self._seconds = clock, response, seconds
        self._on_done: Callable[[object], None] = lambda _answer: None

    def add_done_callback(self, on_done: Callable[[object], None]) -> None:
        """As gRPC's."""
        self._on_done = on_done

    def result(self) -> kvrpcpb_pb2.RawGetKeyTTLResponse:
        """Return it that much later."""
        self._clock.seconds += self._seconds
        self._on_done(self)
        if self._response is None:
            raise grpc.RpcError
        return self._response


def fetcher(
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[bytes, kvrpcpb_pb2.RawGetKeyTTLResponse | None],
    *,
    seconds: float = 5,
    tso_seconds: float = 0,
) -> ttl.TtlFetcher:
    """Return a fetcher of a cluster of one region; asked again, that answers 50 after 20 s of retries and a request of 7 s."""
    clock = Clock()
    monkeypatch.setattr(ttl, "time", clock)

    def ask_again(_key: bytes) -> TimedTtl:
        sent = clock.seconds + 20
        clock.seconds = sent + 7
        return TimedTtl(50, sent, clock.seconds)

    def tso() -> int:
        clock.seconds += tso_seconds
        return NOW * 1000 << 18

    def future(request: kvrpcpb_pb2.RawGetKeyTTLRequest, **_timeout: float) -> Answer:
        return Answer(clock, answers[request.key], seconds)

    region = SimpleNamespace(
        leader=SimpleNamespace(store_id=1), end=b"", context=lambda *_: kvrpcpb_pb2.Context(region_id=1)
    )
    cluster: Any = SimpleNamespace(
        pd=SimpleNamespace(tso=tso),
        regions=SimpleNamespace(locate=lambda _key: region),
        store=lambda _id: SimpleNamespace(kv=SimpleNamespace(RawGetKeyTTL=SimpleNamespace(future=future))),
        config=SimpleNamespace(request_timeout=1.0),
        cluster_id=1,
    )
    raw: Any = SimpleNamespace(codec=KeyCodec(ApiVersion.V1TTL), get_timed_ttl=ask_again)
    return ttl.TtlFetcher(cluster, raw)


def test_expiry_counts_from_the_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer read late must not prolong the row's life; 0 stays never."""
    response = kvrpcpb_pb2.RawGetKeyTTLResponse
    answers = {
        b"a": response(ttl=100),
        b"b": response(ttl=100),
        b"c": response(),
        b"d": response(not_found=True),
        b"e": None,
    }
    asked = fetcher(monkeypatch, answers)
    expire_ts, there = asked.fetch(pa.array(sorted(answers), pa.large_binary()))
    assert there.tolist() == [True, True, True, False, True]
    asked_again = NOW + 5 * 5 + 20
    assert expire_ts.tolist() == [NOW + 100, NOW + 100, 0, 0, asked_again + 50]
    assert asked.error_seconds == 10


def test_retries_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 20 s of retries the request that is answered takes 7 s: the expiry is that exact."""
    asked = fetcher(monkeypatch, {b"a": None})
    asked.fetch(pa.array([b"a"], pa.large_binary()))
    assert asked.error_seconds == 7


def test_the_clock_is_as_exact_as_its_timestamp_came_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """PD answers after 3 s: its clock may be that much later than it says, and no row must live longer."""
    asked = fetcher(monkeypatch, {b"a": kvrpcpb_pb2.RawGetKeyTTLResponse(ttl=100)}, seconds=0, tso_seconds=3)
    expire_ts, _ = asked.fetch(pa.array([b"a"], pa.large_binary()))
    assert expire_ts.tolist() == [NOW + 100]
    assert asked.error_seconds == 3


def test_rows_without_expiry_have_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never is exact, however long the answer takes."""
    asked = fetcher(monkeypatch, {b"a": kvrpcpb_pb2.RawGetKeyTTLResponse()})
    expire_ts, _ = asked.fetch(pa.array([b"a"], pa.large_binary()))
    assert (expire_ts.tolist(), asked.error_seconds) == ([0], 0)


def test_the_longest_ttls_end_where_an_expiry_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a store's clock that is behind PD's more is left than can be added here: the row keeps the last expiry there is."""
    answers = {b"a": kvrpcpb_pb2.RawGetKeyTTLResponse(ttl=ttl.LAST_EXPIRY - NOW + 3)}
    expire_ts, _ = fetcher(monkeypatch, dict(answers)).fetch(pa.array([b"a"], pa.large_binary()))
    assert expire_ts.tolist() == [ttl.LAST_EXPIRY]
