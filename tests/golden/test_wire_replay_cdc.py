"""The playground's change feed behaves as real stores: every recorded exchange, event by event, field by field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from tests.golden.cdc_replay import (
    Frame,
    KnownTimestamps,
    Recording,
    ScriptedClock,
    Writer,
    broken_promises,
    first_regions,
    load,
    outcome,
    play,
    region_ids,
)
from tests.golden.wire_cluster import adopt_regions
from tests.golden.wire_replay import Entry, MayDiffer, Outcome, differences
from tikv_br.cluster.pb import cdcpb_pb2, tikvpb_pb2_grpc
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.cluster import Playground, open_playground
from tikv_br.playground.node import StoreNode

INTERVAL = 0.05
"""Seconds between resolved-ts here; the recording's second is not waited for."""
SCENARIOS = [
    "a_scan_and_live_EventFeed",
    "a_scan_and_live_EventFeedV2",
    "a2_checkpoint_now_subspan",
    "a3_duplicate_request",
    "a4_duplicate_request_v1",
    "b_split",
    "c_epoch_old",
    "c_epoch_new",
    "c_epoch_confver",
    "c_unknown_region",
    "c_wrong_cluster",
    "c_wrong_cluster_oldver",
    "c_version_1_1_1",
    "c_version_empty",
    "c_version_garbage",
    "c_version_old_V2",
    "c_version_4_0_7",
    "c_feature_unknown",
    "c_feature_missing",
    "c_kv_api_tidb",
    "c_kv_api_txn",
    "c_empty_span",
    "c_ts_zero",
    "c_ts_future",
    "c_ts_max",
    "d_delete_range",
    "c_v1_store",
]
"""In the order of their recording."""


def a_second_apart(one: object, other: object) -> bool:
    """Whether two moments (as JSON has them) are the same but for a second that ended between."""
    return abs(int(str(one or 0)) - int(str(other or 0))) <= 1


RULES = [
    MayDiffer("EventFeed*", "events.index", "Raft's log index; the playground counts a region's writes"),
    MayDiffer(
        "EventFeed*", "events.entries.entries.expire_ts_unix_secs", "the script has no moment of expiry", a_second_apart
    ),
]
"""Messages are taken apart first, for how events are packed into them depends on the moment. Scans are compared with
their cuts. Of resolved-ts, the form and the regions in it are compared; the timestamps by `broken_promises`."""


@dataclass(frozen=True)
class Played:
    """A recording and what the playground made of it."""

    recording: Recording
    frames: list[Frame]
    got: Outcome

    def entry(self) -> Entry:
        """Key of the rules."""
        return Entry(0, {"rpc": self.recording.method, "condition": self.recording.name}, Path())

    def recorded(self) -> Outcome:
        """Answer of the real store."""
        expected = self.recording
        return outcome(expected.events(), expected.last_resolved(), expected.status, expected.details)


@pytest.fixture(scope="module")
def played(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Played]:
    """Return all scenarios, played one after the other, as each meets the data that the ones before it left."""
    *on_v2, on_v1 = [load(golden / "cdc" / name) for name in SCENARIOS]
    results = play_all(on_v2, tmp_path_factory.mktemp("v2"))
    with cluster(tmp_path_factory.mktemp("v1"), [on_v1], ApiVersion.V1) as (_, channel):
        results[on_v1.name] = result(on_v1, channel, None, set())
    return results


def play_all(recordings: Sequence[Recording], folder: Path) -> dict[str, Played]:
    """Play scenarios of the recorded V2 cluster, in order, against one playground."""
    results = {}
    with cluster(folder, recordings, ApiVersion.V2) as (playground, channel):
        clock = ScriptedClock(playground.changes)
        playground.nodes[1].causal = clock  # type: ignore[assignment]
        stub = tikvpb_pb2_grpc.TikvStub(channel)
        writer = Writer(playground, stub, KnownTimestamps(recordings), clock, region_ids(recordings))
        done: set[float] = set()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StoreNode, "now", lambda _: int(writer.now))
            for recording in recordings:
                results[recording.name] = result(recording, channel, writer, done)
    return results


def result(recording: Recording, channel: grpc.Channel, writer: Writer | None, done: set[float]) -> Played:
    """Play one scenario."""
    listener = play(recording, channel, writer, done)
    got = outcome(listener.events(), listener.resolved(), listener.status, listener.details)
    return Played(recording, list(listener.frames), got)


@contextlib.contextmanager
def cluster(
    folder: Path, recordings: Sequence[Recording], api_version: ApiVersion
) -> Iterator[tuple[Playground, grpc.Channel]]:
    """One store with the recorded cluster's id and regions."""
    playground = open_playground(
        folder,
        api_version=api_version.value,
        stores=1,
        cluster_id=recordings[0].requests[0][1].header.cluster_id,
        keyspace_split_delay=60.0,
        resolved_ts_interval=INTERVAL,
    )
    playground.start()
    adopt_regions(playground.regions, first_regions(recordings))
    try:
        with grpc.insecure_channel(playground.nodes[1].address) as channel:
            yield playground, channel
    finally:
        playground.stop()


@pytest.mark.parametrize("name", SCENARIOS)
def test_recorded_exchange(played: Mapping[str, Played], name: str) -> None:
    """Events, errors and the end of the stream equal the real store's, and its promises are kept as there."""
    one = played[name]
    assert list(differences(one.entry(), one.recorded(), one.got, RULES)) == []
    assert list(broken_promises([frame for _, frame in one.recording.frames])) == []
    assert list(broken_promises(one.frames)) == []


def test_a_recording_with_other_region_ids(golden: Path, tmp_path: Path) -> None:
    """The scenarios until after the split, renumbered as PD might have numbered: the playground takes the ids over."""
    names = SCENARIOS[: SCENARIOS.index("c_epoch_new")]
    recordings = [renumbered(load(golden / "cdc" / name)) for name in names]
    for one in play_all(recordings, tmp_path).values():
        assert list(differences(one.entry(), one.recorded(), one.got, RULES)) == [], one.recording.name


def renumbered(recording: Recording) -> Recording:
    """Return a recording whose region and peer ids are other ones, in another order."""
    requests, frames = [], []
    for offset, sent in recording.requests:
        request = cdcpb_pb2.ChangeDataRequest.FromString(sent.SerializeToString())
        request.region_id = other_id(request.region_id)
        requests.append((offset, request))
    for offset, came in recording.frames:
        frame = cdcpb_pb2.ChangeDataEvent.FromString(came.SerializeToString())
        frame.resolved_ts.regions[:] = map(other_id, frame.resolved_ts.regions)
        if not came.HasField("resolved_ts"):
            frame.ClearField("resolved_ts")
        for event in frame.events:
            event.region_id = other_id(event.region_id)
            for kind in ("region_not_found", "duplicate_request", "not_leader"):
                if event.HasField("error") and event.error.HasField(kind):
                    error = getattr(event.error, kind)
                    error.region_id = other_id(error.region_id)
            if event.HasField("error") and event.error.HasField("epoch_not_match"):
                for region in event.error.epoch_not_match.current_regions:
                    region.id = other_id(region.id)
                    region.peers[0].id = other_id(region.peers[0].id)
        frames.append((offset, frame))
    return replace(recording, requests=requests, frames=frames)


def other_id(recorded: int) -> int:
    """Return another id for each; some are those that the playground gives to other regions."""
    return 40 - recorded if recorded < 40 else recorded


def test_the_whole_recording_is_replayed(golden: Path, played: Mapping[str, Played]) -> None:
    """Every folder of the recording is played, and rows are compared."""
    folders = {folder.name for folder in (golden / "cdc").iterdir() if folder.is_dir()}
    assert folders == set(SCENARIOS)
    assert any(event.entries.entries for one in played.values() for event in one.recording.events())


def test_a_difference_is_found(played: Mapping[str, Played]) -> None:
    """The comparison does not let just anything pass: a changed value, a lost event, a region without resolved-ts."""
    one = played["a_scan_and_live_EventFeed"]
    events, resolved = one.recording.events(), one.recording.last_resolved()
    changed = cdcpb_pb2.Event()
    changed.CopyFrom(events[3])
    changed.entries.entries[0].value += b"!"
    assert resolved
    less = [
        cdcpb_pb2.ChangeDataEvent(
            resolved_ts=cdcpb_pb2.ResolvedTs(regions=[one.recording.requests[0][1].region_id], ts=1)
        )
    ]
    for other in (
        outcome([*events[:3], changed, *events[4:]], resolved, "OK", ""),
        outcome(events[:-1], resolved, "OK", ""),
        outcome(events, less, "OK", ""),
        outcome(events, resolved, "UNAVAILABLE", ""),
    ):
        assert list(differences(one.entry(), one.recorded(), other, RULES))
    live = [frame for _, frame in one.recording.frames]
    assert list(broken_promises([live[3], *live[:3], *live[-5:], *live[4:]]))
