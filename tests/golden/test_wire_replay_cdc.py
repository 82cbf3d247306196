"""The playground's change feed tells what real stores told: every recorded exchange, event by event, field by field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from formats import mce
from formats.api_version import ApiVersion
from tests.golden.cdc_replay import (
    Frame,
    KnownTimestamps,
    Recording,
    ScriptedClock,
    Writer,
    broken_promises,
    load,
    outcome,
    play,
)
from tests.golden.wire_replay import Entry, MayDiffer, Outcome, differences
from tikv_br.cluster.pb import cdcpb_pb2, tikvpb_pb2_grpc
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
        """What rules go by."""
        return Entry(0, {"rpc": self.recording.method, "condition": self.recording.name}, Path())

    def recorded(self) -> Outcome:
        """What the real store told."""
        told = self.recording
        return outcome(told.events(), told.last_resolved(), told.status, told.details)


@pytest.fixture(scope="module")
def played(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Played]:
    """Return all scenarios, played one after the other, as each meets the data that the ones before it left."""
    recordings = [load(golden / "cdc" / name) for name in SCENARIOS]
    *on_v2, on_v1 = recordings
    results = {}
    with cluster(tmp_path_factory.mktemp("v2"), on_v2[0], ApiVersion.V2) as (playground, channel):
        regions = playground.regions
        for key in (b"r\0\0\0k", b"r\0\0\0t"):
            regions.split(regions.locate(mce.encode(key)).id, [mce.encode(key)])
        clock = ScriptedClock()
        playground.nodes[1].causal = clock
        writer = Writer(playground, tikvpb_pb2_grpc.TikvStub(channel), KnownTimestamps(on_v2), clock)
        done: set[float] = set()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StoreNode, "now", lambda _: int(writer.now))
            for recording in on_v2:
                results[recording.name] = result(recording, channel, writer, done)
    with cluster(tmp_path_factory.mktemp("v1"), on_v1, ApiVersion.V1) as (_, channel):
        results[on_v1.name] = result(on_v1, channel, None, set())
    return results


def result(recording: Recording, channel: grpc.Channel, writer: Writer | None, done: set[float]) -> Played:
    """Play one scenario."""
    listener = play(recording, channel, writer, done)
    got = outcome(listener.events(), listener.resolved(), listener.status, listener.details)
    return Played(recording, list(listener.frames), got)


@contextlib.contextmanager
def cluster(folder: Path, recording: Recording, api_version: ApiVersion) -> Iterator[tuple[Playground, grpc.Channel]]:
    """One store with the recorded cluster's id, and so the same ids everywhere."""
    playground = open_playground(
        folder,
        api_version=api_version.value,
        stores=1,
        cluster_id=recording.requests[0][1].header.cluster_id,
        keyspace_split_delay=0.0,
        resolved_ts_interval=INTERVAL,
    )
    playground.start()
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


def test_nothing_recorded_is_left_out(golden: Path, played: Mapping[str, Played]) -> None:
    """Every folder of the recording is played, and most of its rows are compared."""
    folders = {folder.name for folder in (golden / "cdc").iterdir() if folder.is_dir()}
    assert folders == set(SCENARIOS)
    rows = sum(len(event.entries.entries) for one in played.values() for event in one.recording.events())
    assert rows > 1500


def test_a_difference_is_found(played: Mapping[str, Played]) -> None:
    """The comparison does not let just anything pass: a changed value, a lost event, a region without resolved-ts."""
    one = played["a_scan_and_live_EventFeed"]
    events, resolved = one.recording.events(), one.recording.last_resolved()
    changed = cdcpb_pb2.Event()
    changed.CopyFrom(events[3])
    changed.entries.entries[0].value += b"!"
    assert resolved
    less = [cdcpb_pb2.ChangeDataEvent(resolved_ts=cdcpb_pb2.ResolvedTs(regions=[12], ts=1))]
    for other in (
        outcome([*events[:3], changed, *events[4:]], resolved, "OK", ""),
        outcome(events[:-1], resolved, "OK", ""),
        outcome(events, less, "OK", ""),
        outcome(events, resolved, "UNAVAILABLE", ""),
    ):
        assert list(differences(one.entry(), one.recorded(), other, RULES))
    live = [frame for _, frame in one.recording.frames]
    assert list(broken_promises([live[3], *live[:3], *live[-5:], *live[4:]]))
