"""Stores that answer subscriptions from a script, and what they say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.support.scripted_grpc import Failure
from tests.unit.cluster.fakes import FakeCluster
from tests.unit.cluster.fakes import region as physical_region
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import cdcpb_pb2, errorpb_pb2, metapb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.feed.events import FeedOptions, Resolved, Rows
from tikv_br.incremental.feed.feed import Feed, JoinedFeeds

CODEC = KeyCodec(ApiVersion.V2)
V1, V2 = "/cdcpb.ChangeData/EventFeed", "/cdcpb.ChangeData/EventFeedV2"
LogType, OpType = cdcpb_pb2.Event.LogType, cdcpb_pb2.Event.Row.OpType
MS = 1 << 18
START = 1_000_000 * MS
"""Start-ts of feeds."""

Request = cdcpb_pb2.ChangeDataRequest
Answer = Callable[[Request], "Sequence[cdcpb_pb2.ChangeDataEvent] | Failure"]


def bound(user: bytes) -> bytes:
    """The region bound of a user key."""
    return CODEC.bound(CODEC.rpc_key(user))


def region(
    region_id: int, start: bytes, end: bytes, version: int = 1, stores: Sequence[int] = (1,)
) -> metapb_pb2.Region:
    """A region of these user keys; an empty end is no end."""
    return physical_region(region_id, bound(start) if start else b"", bound(end) if end else b"", stores, version)


def rows(request: Request, *rows: tuple[bytes, int], initialized: bool = False) -> cdcpb_pb2.ChangeDataEvent:
    """Puts of these user keys at these ms after `START`, each with its key as value, and perhaps the end of the scan."""
    message = cdcpb_pb2.ChangeDataEvent()
    event = message.events.add(region_id=request.region_id, request_id=request.request_id)
    event.entries.SetInParent()
    for key, ms in rows:
        ts = START + ms * MS
        row = event.entries.entries.add(start_ts=ts, commit_ts=ts, type=LogType.COMMITTED, op_type=OpType.PUT)
        row.key, row.value = CODEC.rpc_key(key), key
    if initialized:
        event.entries.entries.add(type=LogType.INITIALIZED)
    return message


def resolved(request: Request, ms: int) -> cdcpb_pb2.ChangeDataEvent:
    """The resolved-ts of a subscription, in ms after `START`."""
    said = cdcpb_pb2.ResolvedTs(regions=[request.region_id], ts=START + ms * MS, request_id=request.request_id)
    return cdcpb_pb2.ChangeDataEvent(resolved_ts=said)


def failure(request: Request, error: cdcpb_pb2.Error) -> cdcpb_pb2.ChangeDataEvent:
    """An error that ends a subscription."""
    event = cdcpb_pb2.Event(region_id=request.region_id, request_id=request.request_id, error=error)
    return cdcpb_pb2.ChangeDataEvent(events=[event])


def not_leader(store_id: int | None = None) -> cdcpb_pb2.Error:
    """The region's leader is elsewhere: on a store, or unknown."""
    error = errorpb_pb2.NotLeader(region_id=1)
    if store_id is not None:
        error.leader.id, error.leader.store_id = 10 + store_id, store_id
    return cdcpb_pb2.Error(not_leader=error)


def epoch_not_match(*current: metapb_pb2.Region) -> cdcpb_pb2.Error:
    """The region has split or merged, into these."""
    return cdcpb_pb2.Error(epoch_not_match=errorpb_pb2.EpochNotMatch(current_regions=current))


class ScriptedFeeds:
    """The feeds of a scripted cluster: each subscription of a region is answered by the next of its entries.

    The last entry stays. Requests are kept in `requests`, registrations of a region in `registered`.
    """

    def __init__(self, fake: FakeCluster, *, method: str = V2) -> None:
        self.fake = fake
        self.requests: list[tuple[int, Request]] = []
        self.answers: dict[int, list[Answer]] = {}
        for store_id, server in fake.stores.items():
            server.script(method, self._of(store_id))

    def script(self, region_id: int, *answers: Answer) -> None:
        """Answer subscriptions of a region by these, in order."""
        self.answers[region_id] = list(answers)

    def registered(self, region_id: int) -> list[tuple[int, Request]]:
        """Store and request of each registration of a region so far."""
        return [
            (store_id, request)
            for store_id, request in self.requests
            if request.region_id == region_id and request.HasField("register")
        ]

    @contextmanager
    def feed(
        self, start: bytes = b"a", end: bytes = b"z", *, start_ts: int = START, **options: float | None
    ) -> Iterator[Feed]:
        """A feed of these user keys, with a hold-back of 0 unless said otherwise."""
        settings = FeedOptions(**{"hold_back": 0.0, **options})  # type: ignore[arg-type]
        span = CODEC.rpc_range(KeyRange(start, end))
        with Cluster.connect(self.fake.config()) as cluster, Feed(cluster, CODEC, span, start_ts, settings) as feed:
            yield feed

    def _of(self, store_id: int) -> Callable[[bytes], Sequence[cdcpb_pb2.ChangeDataEvent] | Failure]:
        def answer(data: bytes) -> Sequence[cdcpb_pb2.ChangeDataEvent] | Failure:
            request = Request.FromString(data)
            self.requests.append((store_id, request))
            if not request.HasField("register"):
                return []
            script = self.answers[request.region_id]
            return (script.pop(0) if len(script) > 1 else script[0])(request)

        return answer


def until_resolved(
    feed: Feed | JoinedFeeds, ms: int, seconds: float = 60.0
) -> tuple[list[tuple[bytes, int]], list[int]]:
    """Keys and times of all rows, and all resolved-ts, in ms after `START`, until the span is resolved up to `ms`.

    Checks on the way that no row comes at or below a resolved-ts that was said before it.
    """
    found: list[tuple[bytes, int]] = []
    said: list[int] = []
    deadline = time.monotonic() + seconds
    while not said or said[-1] < ms:
        assert time.monotonic() < deadline, (found, said, feed.status)
        match feed.poll(0.5):
            case Rows(batch):
                new = [(row["key"], (row["ts"] - START) // MS) for row in batch.to_pylist()]
                assert not said or all(at > said[-1] for _, at in new)
                found += new
            case Resolved(ts):
                assert not said or (ts - START) // MS > said[-1]
                said.append((ts - START) // MS)
            case None:
                pass
    return found, said
