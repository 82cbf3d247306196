"""The feed resumes each region from its resolved-ts after every error that a store may send."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from tests.support.scripted_grpc import fail
from tests.unit.cluster.fakes import CLUSTER_ID, FakeCluster, with_leader
from tests.unit.incremental.feed.fakes import (
    CODEC,
    MS,
    START,
    V1,
    Answer,
    Request,
    ScriptedFeeds,
    bound,
    epoch_not_match,
    failure,
    not_leader,
    region,
    resolved,
    rows,
    until_resolved,
)
from tikv_br.cluster import store
from tikv_br.cluster.channel import to_cluster_error
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import TlsFiles
from tikv_br.cluster.pb import cdcpb_pb2, errorpb_pb2
from tikv_br.errors import ClusterError, ClusterTlsError, ClusterUnfit, RetryBudgetExhausted, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.feed.events import Event, FeedOptions, Resolved, Rows, Scanned
from tikv_br.incremental.feed.feed import Feed, JoinedFeeds


@pytest.fixture
def feeds(fake_cluster: Callable[..., FakeCluster]) -> ScriptedFeeds:
    """Two stores with EventFeedV2; region 1 holds all keys, its leader is on store 1."""
    fake = fake_cluster(2)
    fake.regions = [with_leader(region(1, b"", b"", stores=(1, 2)))]
    return ScriptedFeeds(fake)


def all_of(*changes: tuple[bytes, int], at: int) -> Answer:
    """A successful subscription: the changes after its checkpoint, then a resolved-ts."""

    def answer(request: Request) -> list[cdcpb_pb2.ChangeDataEvent]:
        asked = (request.checkpoint_ts - START) // MS
        new = [change for change in changes if change[1] > asked]
        return [rows(request, *new, initialized=True), resolved(request, at)]

    return answer


def ends_with(error: cdcpb_pb2.Error, *changes: tuple[bytes, int], at: int) -> Answer:
    """As `all_of`, and then the subscription ends with an error."""

    def answer(request: Request) -> list[cdcpb_pb2.ChangeDataEvent]:
        return [*all_of(*changes, at=at)(request), failure(request, error)]  # type: ignore[misc]

    return answer


def test_rows_come_before_the_resolved_ts_that_covers_them(feeds: ScriptedFeeds) -> None:
    """The request has cluster, version, range, and checkpoint; the rows are yielded, then the resolved-ts."""
    feeds.script(1, all_of((b"b", 5), (b"c", 7), at=10))
    with feeds.feed(b"b", b"d") as feed:
        assert until_resolved(feed, 10) == ([(b"b", 5), (b"c", 7)], [10])
        status = feed.status
    assert (status.regions, status.holes, status.stores, status.rows, status.late_rows) == (1, 0, 1, 2, 0)
    ((store_id, request),) = feeds.registered(1)
    assert (store_id, request.checkpoint_ts) == (1, START)
    assert (request.start_key, request.end_key) == (bound(b"b"), bound(b"d"))
    assert (request.header.cluster_id, request.header.ticdc_version) == (CLUSTER_ID, "6.2.0")
    assert (request.region_epoch.version, request.region_epoch.conf_ver, request.kv_api) == (1, 1, Request.RawKV)


def test_rows_outside_the_span_are_left_out(feeds: ScriptedFeeds) -> None:
    """Scans send the whole region, including other keyspaces; rows outside of the range are dropped."""
    feeds.script(1, all_of((b"a", 5), (b"b", 6), (b"czz", 7), (b"d", 8), at=10))
    with feeds.feed(b"b", b"d") as feed:
        assert until_resolved(feed, 10)[0] == [(b"b", 6), (b"czz", 7)]


def test_joined_feeds_have_rpc_keys_and_the_lowest_resolved_ts(feeds: ScriptedFeeds) -> None:
    """Each range is subscribed to for itself, rows say which keyspace they are of, and nothing between the ranges is yielded."""
    feeds.script(
        1, lambda request: all_of((b"b", 5), (b"m", 6), (b"n", 7), at=10 if b"b" in request.start_key else 8)(request)
    )
    spans = [CODEC.rpc_range(KeyRange(*ends)) for ends in ((b"b", b"d"), (b"n", b"p"))]
    with (
        Cluster.connect(feeds.fake.config()) as cluster,
        contextlib.closing(JoinedFeeds(cluster, spans, START, FeedOptions(hold_back=0.0))) as feed,
    ):
        found, said = until_resolved(feed, 8)
        assert (sorted(found), said) == ([(b"r\0\0\0b", 5), (b"r\0\0\0n", 7)], [8])
        assert (feed.status.regions, feed.status.rows, feed.status.resolved_ts) == (2, 2, START + 8 * MS)
        assert feed.poll(0.05) is None
    assert sorted(request.start_key for _, request in feeds.registered(1)) == [bound(b"b"), bound(b"n")]


def test_the_hold_back_is_subtracted_from_every_resolved_ts(
    feeds: ScriptedFeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resolved-ts of the range lags by the hold-back, and so does the checkpoint of a resubscription."""
    monkeypatch.setattr(Cluster, "timestamp_age", 3.0)
    feeds.script(1, ends_with(cdcpb_pb2.Error(), (b"b", 4500), at=5000), all_of(at=8000))
    with feeds.feed(hold_back=3.0) as feed:
        assert until_resolved(feed, 5000)[1] == [2000, 5000]
    assert [request.checkpoint_ts for _, request in feeds.registered(1)] == [START, START + 2000 * MS]


def test_the_hold_back_follows_the_settings_of_the_stores(
    feeds: ScriptedFeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, it is as long as stores use timestamps, and at least 3 s; a shorter one is refused, 0 is none."""
    feeds.script(1, ends_with(cdcpb_pb2.Error(), (b"b", 45_000), at=50_000), all_of(at=80_000))
    monkeypatch.setattr(Cluster, "timestamp_age", 10.0)
    with feeds.feed(hold_back=None) as feed:
        assert until_resolved(feed, 50_000)[1] == [40_000, 70_000]
    with pytest.raises(UsageError, match=r"hold-back of 9\.5 s is too short: stores use timestamps up to 10 s old"):
        feeds.feed(hold_back=9.5).__enter__()
    with feeds.feed(hold_back=0.0) as feed:
        assert until_resolved(feed, 80_000)[1][-1] == 80_000
    monkeypatch.setattr(Cluster, "timestamp_age", 0.1)
    with feeds.feed(hold_back=None) as feed:
        assert until_resolved(feed, 77_000)[1] == [77_000]


def test_a_resolved_ts_before_the_end_of_the_scan_is_ignored(feeds: ScriptedFeeds) -> None:
    """A resolved-ts before INITIALIZED belongs to an older subscription and is ignored."""

    def answer(request: Request) -> list[cdcpb_pb2.ChangeDataEvent]:
        late = [rows(request, (b"b", 5), initialized=True), resolved(request, 10)]
        return [resolved(request, 9), *late]

    feeds.script(1, answer)
    with feeds.feed() as feed:
        assert until_resolved(feed, 10) == ([(b"b", 5)], [10])


def test_events_of_ended_subscriptions_are_ignored(feeds: ScriptedFeeds) -> None:
    """Rows, errors and resolved-ts with the request id of an ended subscription have no effect."""

    def answer(request: Request) -> list[cdcpb_pb2.ChangeDataEvent]:
        other = Request(region_id=1, request_id=request.request_id + 99)
        strange = [rows(other, (b"x", 1)), resolved(other, 50), failure(other, cdcpb_pb2.Error())]
        return [*all_of((b"b", 5), at=10)(request), *strange, resolved(request, 12)]  # type: ignore[misc]

    feeds.script(1, answer)
    with feeds.feed() as feed:
        delivered, (*_, last) = until_resolved(feed, 12)
        assert (delivered, last) == ([(b"b", 5)], 12)
    assert len(feeds.registered(1)) == 1


TRANSIENT = {
    "not_leader": not_leader(),
    "region_not_found": cdcpb_pb2.Error(region_not_found=errorpb_pb2.RegionNotFound(region_id=1)),
    "epoch_not_match": epoch_not_match(region(1, b"", b"", stores=(1, 2))),
    "duplicate_request": cdcpb_pb2.Error(duplicate_request=cdcpb_pb2.DuplicateRequest(region_id=1)),
    "server_is_busy": cdcpb_pb2.Error(server_is_busy=errorpb_pb2.ServerIsBusy(reason="too many scans")),
    "congested": cdcpb_pb2.Error(congested=cdcpb_pb2.Congested(region_id=1)),
    "unknown": cdcpb_pb2.Error(),
}
FATAL = {
    "compatibility": cdcpb_pb2.Error(compatibility=cdcpb_pb2.Compatibility(required_version="6.2.0")),
    "cluster_id_mismatch": cdcpb_pb2.Error(cluster_id_mismatch=cdcpb_pb2.ClusterIDMismatch(current=1, request=2)),
}


def test_every_kind_of_error_has_a_test() -> None:
    """The tests below cover every field of ``cdcpb.Error``; a new field fails this test."""
    assert {*TRANSIENT, *FATAL} == {field.name for field in cdcpb_pb2.Error.DESCRIPTOR.fields} | {"unknown"}


@pytest.mark.parametrize("kind", TRANSIENT)
def test_a_region_resumes_from_its_resolved_ts_after(kind: str, feeds: ScriptedFeeds) -> None:
    """After a transient error, the region is resubscribed from its resolved-ts, and no change is lost."""
    feeds.script(1, ends_with(TRANSIENT[kind], (b"b", 5), (b"c", 12), at=10), all_of((b"b", 5), (b"c", 12), at=20))
    with feeds.feed() as feed:
        found, said = until_resolved(feed, 20)
        assert feed.status.errors[kind] == 1
    assert found == [(b"b", 5), (b"c", 12), (b"c", 12)]
    assert said == [10, 20]
    assert [request.checkpoint_ts for _, request in feeds.registered(1)] == [START, START + 10 * MS]


@pytest.mark.parametrize("kind", FATAL)
def test_the_feed_ends_with(kind: str, feeds: ScriptedFeeds) -> None:
    """A store without RawKV feeds, or of another cluster, ends the feed with that error."""
    feeds.script(1, lambda request: [failure(request, FATAL[kind])])
    with feeds.feed() as feed, pytest.raises(ClusterUnfit, match=kind):
        until_resolved(feed, 1)


def test_a_named_leader_is_followed_to_its_store(feeds: ScriptedFeeds) -> None:
    """After a leader transfer the subscription moves to the new leader's store."""
    feeds.script(1, ends_with(not_leader(2), (b"b", 5), at=10), all_of(at=20))
    with feeds.feed() as feed:
        assert until_resolved(feed, 20)[1] == [10, 20]
    assert [store_id for store_id, _ in feeds.registered(1)] == [1, 2]


def test_a_split_leaves_no_gap(feeds: ScriptedFeeds) -> None:
    """Both halves resume from the region's resolved-ts; the resolved-ts of the range is that of the slower half."""
    halves = [region(2, b"", b"m", 2), region(1, b"m", b"", 2)]
    feeds.script(1, ends_with(epoch_not_match(*halves), (b"b", 5), at=10), all_of((b"x", 15), at=30))
    feeds.script(2, all_of((b"c", 14), at=20))
    feeds.fake.regions = [with_leader(region(1, b"", b""))]
    with feeds.feed() as feed:
        found, said = until_resolved(feed, 20)
        assert feed.status.regions == 2
    assert sorted(found) == [(b"b", 5), (b"c", 14), (b"x", 15)]
    assert said == [10, 20]
    (_, left), (_, _), (_, right) = sorted(
        [*feeds.registered(1), *feeds.registered(2)], key=lambda each: (each[1].start_key, -each[1].region_id)
    )
    assert (left.start_key, left.end_key, left.checkpoint_ts) == (bound(b"a"), bound(b"m"), START + 10 * MS)
    assert (right.start_key, right.end_key, right.checkpoint_ts) == (bound(b"m"), bound(b"z"), START + 10 * MS)


def test_a_merge_resumes_from_the_slower_half(feeds: ScriptedFeeds) -> None:
    """The merged region is one subscription, from the lower resolved-ts of its parts."""
    merged = region(2, b"", b"", 2)
    error = epoch_not_match(merged)
    feeds.fake.regions = [with_leader(region(1, b"", b"m")), with_leader(region(2, b"m", b""))]
    feeds.script(1, ends_with(error, (b"b", 5), at=10))
    changes = ((b"b", 5), (b"x", 5), (b"b", 14), (b"x", 15))
    feeds.script(2, ends_with(error, (b"x", 5), at=12), all_of(*changes, at=20))
    with feeds.feed() as feed:
        found, said = until_resolved(feed, 20)
        assert feed.status.regions == 1
    assert set(found) == set(changes)
    assert said[-1] == 20
    last = feeds.registered(2)[-1][1]
    assert (last.region_id, last.start_key, last.end_key) == (2, bound(b"a"), bound(b"z"))
    assert last.checkpoint_ts <= START + 10 * MS


def test_a_lost_stream_is_reopened(feeds: ScriptedFeeds) -> None:
    """When a store restarts, all its regions are resubscribed."""
    feeds.script(1, lambda _: fail("UNAVAILABLE"), lambda _: fail("UNKNOWN", "cancelled"), all_of((b"b", 5), at=20))
    with feeds.feed() as feed:
        assert until_resolved(feed, 20) == ([(b"b", 5)], [20])
        assert feed.status.errors == {"stream": 2}
    assert [request.checkpoint_ts for _, request in feeds.registered(1)] == [START] * 3


@pytest.fixture
def broken_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report calls that fail with "handshake" as TLS errors, as a channel with TLS does."""

    def explain(error: grpc.RpcError, who: str, tls: TlsFiles) -> ClusterError:
        known = to_cluster_error(error, who, tls)
        return ClusterTlsError(known.message) if "handshake" in known.message else known

    monkeypatch.setattr(store, "to_cluster_error", explain)


@pytest.mark.usefixtures("broken_handshakes")
def test_tls_errors_are_retried_once_tls_has_worked(feeds: ScriptedFeeds) -> None:
    """A broken handshake ends the feed only if no message has arrived before."""
    broken = fail("UNAVAILABLE", "Ssl handshake failed")
    feeds.script(1, ends_with(not_leader(), (b"b", 5), at=10), lambda _: broken, all_of((b"b", 5), at=20))
    with feeds.feed() as feed:
        assert until_resolved(feed, 20) == ([(b"b", 5)], [10, 20])
        assert feed.status.errors["stream"] == 1
    feeds.script(1, lambda _: broken)
    with feeds.feed() as feed, pytest.raises(ClusterTlsError, match="handshake"):
        until_resolved(feed, 20)


def test_stores_without_event_feed_v2_get_event_feed(fake_cluster: Callable[..., FakeCluster]) -> None:
    """The feed falls back to EventFeed, whose resolved-ts has region ids, but no request id."""
    feeds = ScriptedFeeds(fake_cluster(), method=V1)

    def answer(request: Request) -> list[cdcpb_pb2.ChangeDataEvent]:
        anyone = Request(region_id=request.region_id)
        return [rows(request, (b"b", 5), initialized=True), resolved(anyone, 10)]

    feeds.script(1, answer)
    with feeds.feed() as feed:
        assert until_resolved(feed, 10) == ([(b"b", 5)], [10])


def test_a_store_without_any_feed_ends_it(fake_cluster: Callable[..., FakeCluster]) -> None:
    """A store that supports neither call is a permanent error."""
    feeds = ScriptedFeeds(fake_cluster(), method="/nothing/Here")
    with feeds.feed() as feed, pytest.raises(ClusterUnfit, match="UNIMPLEMENTED"):
        until_resolved(feed, 1)


def test_damaged_messages_reopen_the_stream(feeds: ScriptedFeeds) -> None:
    """A message that does not decode is an error of the stream: nothing of it is yielded, and no change is lost."""
    good = all_of((b"b", 5), at=20)
    damaged: Answer = lambda _: [b"\x0a\xff"]  # type: ignore[list-item]  # noqa: E731
    feeds.script(1, damaged, good)
    with feeds.feed() as feed:
        assert until_resolved(feed, 20) == ([(b"b", 5)], [20])


def test_patience_has_an_end(
    feeds: ScriptedFeeds, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that keeps failing ends the feed with its last error; until then the status and one log line report it."""
    monkeypatch.setattr("tikv_br.incremental.feed.feed.REPORT_SECONDS", 0.05)
    feeds.script(1, lambda request: [failure(request, not_leader())])
    with feeds.feed(patience=2.0) as feed:  # much longer, or no failure of a busy machine falls in between
        with pytest.raises(RetryBudgetExhausted, match="region 1: not_leader"):
            until_resolved(feed, 1)
        assert feed.status.failing_seconds > 2.0
        assert feed.status.last_error == "region 1: not_leader"
    assert len([each for each in caplog.messages if "has had no subscription for" in each]) == 1


def test_a_slow_consumer_slows_the_stores(feeds: ScriptedFeeds) -> None:
    """The size of queued messages is bounded; all messages arrive in the end."""
    key = b"k" * 1000

    def answer(request: Request) -> list[cdcpb_pb2.ChangeDataEvent]:
        many = [rows(request, *[(key, ms)] * 50) for ms in range(1, 101)]
        return [*many, rows(request, initialized=True), resolved(request, 200)]

    feeds.script(1, answer)
    limit = 250_000
    with feeds.feed(queue_bytes=limit) as feed:
        found = 0
        while not isinstance(event := feed.poll(60.0), Resolved):
            while not found and feed.status.queued_bytes < limit - 100_000:
                time.sleep(0.01)  # let the store fill the queue
            assert feed.status.queued_bytes <= limit
            found += event.batch.num_rows if isinstance(event, Rows) else 0
    assert found == 5000


def test_a_scan_with_rows_is_reported(feeds: ScriptedFeeds) -> None:
    """It delivers only the newest version of each key; one without rows has left nothing out."""
    feeds.script(1, all_of((b"b", 3), (b"c", 2), at=9))
    with feeds.feed() as feed:
        events: list[Event] = []
        while not events or not isinstance(events[-1], Resolved):
            event = feed.poll(60.0)
            assert event is not None
            if not isinstance(event, Rows):
                events.append(event)
    assert events[0] == Scanned(CODEC.rpc_range(KeyRange(b"a", b"z")), START, START + 3 * MS)
    feeds.script(1, all_of(at=9))
    with feeds.feed() as feed:
        assert isinstance(feed.poll(60.0), Resolved)


def test_a_stalled_region_is_resubscribed(feeds: ScriptedFeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a region's resolved-ts stops advancing, the feed resubscribes: the store may not be its leader any more."""
    monkeypatch.setattr("tikv_br.incremental.feed.feed.CHECK_SECONDS", 0.1)
    feeds.script(1, all_of((b"b", 5), at=10), all_of(at=20))
    with feeds.feed() as feed:
        assert until_resolved(feed, 10)[1] == [10]
        feed._subscriptions._options = replace(
            feed._subscriptions._options, stall=0.5
        )  # not before: a slow store would count as stalled
        assert until_resolved(feed, 20)[1] == [20]
    assert any(request.HasField("deregister") for _, request in feeds.requests)


def test_a_stalled_region_reopens_the_stream_of_a_store_before_7_3(fake_cluster: Callable[..., FakeCluster]) -> None:
    """Such a store takes a Deregister for a Register: none is sent, and its other regions resume from their resolved-ts."""
    feeds = ScriptedFeeds(fake_cluster(), method=V1)
    feeds.fake.regions = [with_leader(region(1, b"", b"m")), with_leader(region(2, b"m", b""))]
    feeds.script(1, all_of((b"b", 5), at=10), all_of(at=20))
    feeds.script(2, all_of((b"n", 5), at=10), all_of(at=20))
    with feeds.feed() as feed:
        assert until_resolved(feed, 10)[1] == [10]
        (stream,) = feed._subscriptions._streams.values()
        (stalled,) = (each for each in stream.subscriptions if each.region.id == 1)
        stalled.advanced_at -= feed._subscriptions._options.stall
        feed._subscriptions._end_stalled(time.monotonic())
        assert until_resolved(feed, 20)[1] == [20]
        assert list(feed._subscriptions._streams.values()) != [stream]
    assert not any(request.HasField("deregister") for _, request in feeds.requests)
    for region_id in (1, 2):
        assert [request.checkpoint_ts for _, request in feeds.registered(region_id)] == [START, START + 10 * MS]


def test_scanning_again_reopens_the_stream_of_a_store_before_7_3(fake_cluster: Callable[..., FakeCluster]) -> None:
    """The rows of an ingest are scanned from the earlier timestamp; the store's other region resumes from its resolved-ts."""
    feeds = ScriptedFeeds(fake_cluster(), method=V1)
    feeds.fake.regions = [with_leader(region(1, b"", b"m")), with_leader(region(2, b"m", b""))]
    for region_id in (1, 2):
        feeds.script(region_id, all_of(at=10), all_of(at=20))
    with feeds.feed() as feed:
        assert until_resolved(feed, 10)[1] == [10]
        feed._subscriptions.scan_again(b"", CODEC.bound(CODEC.rpc_key(b"m")), START + 5 * MS)
        assert until_resolved(feed, 20)[1] == [20]
    assert not any(request.HasField("deregister") for _, request in feeds.requests)
    assert [request.checkpoint_ts for _, request in feeds.registered(1)] == [START, START + 5 * MS]
    assert [request.checkpoint_ts for _, request in feeds.registered(2)] == [START, START + 10 * MS]


def test_a_stalled_scan_is_resubscribed(feeds: ScriptedFeeds) -> None:
    """If a store ends no incremental scan, the feed resubscribes from the same checkpoint."""
    feeds.script(1, lambda request: [rows(request, (b"b", 5)), resolved(request, 8)], all_of((b"b", 5), at=20))
    with feeds.feed(scan_stall=100.0) as feed:
        assert isinstance(feed.poll(60.0), Rows)
        assert feed.status.scanning == 1
        feed._subscriptions._end_stalled(time.monotonic() + 100.1)
        assert until_resolved(feed, 20) == ([(b"b", 5)], [20])
        assert (feed.status.scanning, feed.status.errors) == (0, {"stalled": 1})
    assert [request.checkpoint_ts for _, request in feeds.registered(1)] == [START] * 2


def test_a_queued_scan_is_not_stalled(feeds: ScriptedFeeds) -> None:
    """A region in its store's queue of scans is not resubscribed while the store ends other scans."""
    feeds.fake.regions = [with_leader(region(1, b"", b"m")), with_leader(region(2, b"m", b""))]

    def later(request: Request) -> list[cdcpb_pb2.ChangeDataEvent]:
        time.sleep(0.2)
        return [rows(request, initialized=True)]

    feeds.script(1, lambda _: [])
    feeds.script(2, later)
    with feeds.feed(scan_stall=100.0) as feed:
        while feed.status.scanning != 1 or feed.status.regions != 2:
            feed.poll(0.05)
        (stream,) = feed._subscriptions._streams.values()
        waiting = next(each for each in stream.subscriptions if not each.initialized)
        assert stream.scan_ended_at - waiting.advanced_at > 0.1
        feed._subscriptions._end_stalled(waiting.advanced_at + 100.1)
        assert not feed.status.errors
        feed._subscriptions._end_stalled(stream.scan_ended_at + 100.1)
        assert feed.status.errors == {"stalled": 1}


def test_closing_ends_a_poll(feeds: ScriptedFeeds) -> None:
    """Closing from another thread ends the wait of a consumer."""
    feeds.script(1, all_of(at=10))
    with feeds.feed() as feed:
        until_resolved(feed, 10)
        closer = threading.Timer(0.2, feed.close)
        closer.start()
        assert feed.poll(60.0) is None
        closer.join()


def test_invalid_ranges_and_clusters_are_refused(fake_cluster: Callable[..., FakeCluster]) -> None:
    """The cluster must have API V2; the range must be in the codec's keyspace, and not empty."""
    with Cluster.connect(fake_cluster().config()) as cluster:
        with pytest.raises(ClusterUnfit, match="no timestamps"):
            Feed(cluster, KeyCodec(ApiVersion.V1), KeyRange(b"a", b"b"), START)
        for start, end in [(b"b", b"a"), (b"a", b"a")]:
            with pytest.raises(UsageError, match="is not a range of keyspace 0, or is empty"):
                Feed(cluster, CODEC, KeyRange(CODEC.rpc_key(start), CODEC.rpc_key(end)), START)
        with pytest.raises(UsageError, match="keyspace 0"):
            Feed(cluster, CODEC, KeyCodec(ApiVersion.V2, 1).rpc_range(), START)
