"""Recorded feeds, replayed through the whole feed, end in the recorded state of the cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.golden.cdc_replay import Recording, load
from tests.unit.cluster.fakes import FakeCluster, with_leader
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import cdcpb_pb2, metapb_pb2, pdpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.feed.events import FeedOptions, Resolved, Rows
from tikv_br.incremental.feed.feed import Feed

CODEC = KeyCodec(ApiVersion.V2)
QUIET_POLLS = 3
"""Polls of a second without anything, after which a replay is over that has given out all it has."""
MOST_QUIET_POLLS = 60

State = dict[bytes, tuple[int, bytes, int, bool]]
"""ts, value, expiry and whether it is a tombstone, by RPC key."""


class Replay:
    """Answers registrations with the frames of a recording, under the request ids that it meets."""

    def __init__(self, recording: Recording, fake: FakeCluster) -> None:
        self._recording = recording
        self._frames = list(recording.frames)
        self._ids: dict[int, int] = {}  # recorded request id -> ours
        self.asked: list[tuple[int, int]] = []
        """Region and checkpoint of each registration."""
        fake.stores[1].script(f"/cdcpb.ChangeData/{recording.method}", self._answer)
        fake.regions = self._regions()

    @property
    def has_more(self) -> bool:
        """Whether there are frames that no registration has been given yet."""
        return bool(self._frames)

    def _regions(self) -> list[pdpb_pb2.Region]:
        """The regions as they were before the first answer."""
        return [
            with_leader(
                metapb_pb2.Region(
                    id=request.region_id,
                    start_key=request.start_key,
                    end_key=request.end_key,
                    region_epoch=request.region_epoch,
                    peers=[metapb_pb2.Peer(id=request.region_id + 1, store_id=1)],
                )
            )
            for offset, request in self._recording.requests
            if offset < self._frames[0][0]
        ]

    def _answer(self, data: bytes) -> Sequence[cdcpb_pb2.ChangeDataEvent]:
        """Note whose request this is, and give out what was recorded before the next one."""
        request = cdcpb_pb2.ChangeDataRequest.FromString(data)
        requests = self._recording.requests
        recorded = next(
            each for _, each in requests if each.region_id == request.region_id and each.request_id not in self._ids
        )
        self._ids[recorded.request_id] = request.request_id
        self.asked.append((request.region_id, request.checkpoint_ts))
        count = len(self._ids)
        until = requests[count][0] if count < len(requests) else float("inf")
        due = [frame for offset, frame in self._frames if offset < until]
        self._frames = self._frames[len(due) :]
        return [self._ours(frame) for frame in due]

    def _ours(self, frame: cdcpb_pb2.ChangeDataEvent) -> cdcpb_pb2.ChangeDataEvent:
        message = cdcpb_pb2.ChangeDataEvent.FromString(frame.SerializeToString())
        for event in message.events:
            event.request_id = self._ids[event.request_id]
        if message.resolved_ts.request_id:
            message.resolved_ts.request_id = self._ids[message.resolved_ts.request_id]
        return message


def run(feed: Feed, script: Replay) -> tuple[State, int]:
    """The last row of each key, and the last resolved-ts, until the feed is quiet."""
    newest: State = {}
    resolved = quiet = 0
    while quiet < (MOST_QUIET_POLLS if script.has_more else QUIET_POLLS):
        event = feed.poll(1.0)
        quiet = quiet + 1 if event is None else 0
        match event:
            case Rows(batch):
                for row in batch.to_pylist():
                    key = CODEC.rpc_key(row["key"])
                    if key not in newest or row["ts"] >= newest[key][0]:
                        newest[key] = (row["ts"], row["value"], row["expire_ts"], row["deleted"])
            case Resolved(ts):
                assert ts > resolved
                resolved = ts
            case None:
                pass
    return newest, resolved


def replay(recording: Recording) -> tuple[State, int, Replay]:
    """Output of the feed for a whole recording."""
    fake = FakeCluster()
    requests = [request for _, request in recording.requests]
    span = KeyRange(
        CODEC.from_bound(min(request.start_key for request in requests)),
        CODEC.from_bound(max(request.end_key for request in requests)),
    )
    options = FeedOptions(hold_back=0)
    try:
        script = Replay(recording, fake)
        with (
            Cluster.connect(fake.config()) as cluster,
            Feed(cluster, CODEC, span, requests[0].checkpoint_ts, options) as feed,
        ):
            return *run(feed, script), script
    finally:
        fake.close()


def states(folder: Path, newest: State) -> tuple[dict[bytes, bytes | None], dict[bytes, bytes | None]]:
    """Value of each key of the feed, None without one: by the feed, and in the cluster afterwards."""
    expected = json.loads((folder / "final_state.json").read_text())
    final = {bytes.fromhex(row["key"]): bytes.fromhex(row["value"]) for row in expected["rows"]}
    by_feed = {
        key: None if deleted or (expire and expire <= expected["wall"]) else value
        for key, (_, value, expire, deleted) in newest.items()
    }
    return by_feed, {key: final.get(key) for key in by_feed}


@pytest.mark.parametrize("name", ["a_scan_and_live_EventFeed", "a_scan_and_live_EventFeedV2", "b_split"])
def test_a_replayed_feed_ends_in_the_recorded_state(name: str, golden: Path) -> None:
    """Scan, live changes and, in one, a split in the middle: every key that was touched ends as the cluster had it."""
    recording = load(golden / "cdc" / name)
    newest, resolved, script = replay(recording)
    by_feed, in_cluster = states(golden / "cdc" / name, newest)
    assert by_feed
    assert by_feed == in_cluster
    asked = [(request.region_id, request.checkpoint_ts) for _, request in recording.requests]
    assert script.asked == asked
    assert resolved > asked[0][1]


def test_a_range_that_was_deleted_is_not_in_the_feed(golden: Path) -> None:
    """DeleteRange is invisible: after it the feed's state is not the cluster's."""
    folder = golden / "cdc" / "d_delete_range"
    newest, _, _ = replay(load(folder))
    by_feed, in_cluster = states(folder, newest)
    assert by_feed != in_cluster
