"""The playground answers as real servers did: every recorded request, in recorded order, field by field."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from pathlib import Path

import pytest

from tests.golden.wire_cluster import cluster_as_recorded
from tests.golden.wire_replay import Entry, Json, MayDiffer, Outcome, Target, differences, load, replay
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.cluster import open_playground
from tikv_br.playground.region import Peer, Region

OTHERS = ("Backup", "ImportSST")
"""Played in test_wire_replay_sst.py."""
ALWAYS_RECORDED = {
    "HTTP",
    "Keyspace/LoadKeyspace",
    "PD/ScanRegions",
    "PD/Tso",
    "RawGet",
    "RawPut",
    "RawScan",
    "SplitRegion",
}
"""The least that a recording must hold for the comparison to mean anything."""


def close_to(tolerance: int) -> Json:
    """Whether two numbers (as JSON has them: text, or absent for 0) differ by no more."""
    return lambda one, other: abs(int(one or 0) - int(other or 0)) <= tolerance


def same_but_ts_in_key(one: Json, other: Json) -> bool:
    """Whether two V2 storage keys, base64 or within a message, are equal but for the eight bytes of timestamp."""
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    if one.startswith("key "):
        return re.sub(r"[0-9A-F]{16} is", " is", one) == re.sub(r"[0-9A-F]{16} is", " is", other)
    return base64.b64decode(one)[:-8] == base64.b64decode(other)[:-8]


def not_shown(_: Json, other: Json) -> bool:
    """Whether the playground leaves the field out."""
    return other is None


PORTS = "ports and folders are this process's own"
CLOCK = "the clock went on since the recording"
SIZE = "PD's sizes are of its last heartbeat, and an empty region may count as 1 MiB; ours are counted"
SUBSET = "only what tools look at is shown"

RULES = [
    MayDiffer("PD/GetMembers", "*member_id", "drawn by PD at random"),
    MayDiffer("PD/GetMembers", "*_urls", PORTS),
    MayDiffer("PD/Get*Store*", "store*address", PORTS),
    MayDiffer("PD/Get*Store*", "store*deploy_path", PORTS),
    MayDiffer("PD/Get*Store*", "store*start_timestamp", CLOCK),
    MayDiffer("PD/Tso", "timestamp.*", CLOCK),
    MayDiffer(
        "PD/UpdateServiceGCSafePoint", "TTL", "gc_worker's is the time left until the end of time", close_to(10**9)
    ),
    MayDiffer("PD/LoadGlobalConfig", "revision", "etcd's count of all its writes"),
    MayDiffer("Keyspace/*", "keyspace*ed_at", CLOCK),
    MayDiffer("RawGetKeyTTL", "ttl", CLOCK, lambda one, other: None not in (one, other) and close_to(60)(one, other)),
    MayDiffer("Raw*", "region_error.message", "V2 writes name the key with its timestamp", same_but_ts_in_key),
    MayDiffer("Raw*", "region_error.key_not_in_region.key", "likewise", same_but_ts_in_key),
    MayDiffer("BatchCommands", "transport_layer_load", "how busy the server was"),
    MayDiffer("BatchCommands", "health_feedback.feedback_seq_no", "TiKV begins at its start time"),
    MayDiffer("HTTP /pd/*", "*member_id", "drawn by PD at random"),
    MayDiffer("HTTP /pd/*", "*_urls", PORTS),
    MayDiffer("HTTP /pd/*", "*address", PORTS),
    MayDiffer("HTTP /pd/*", "*deploy_path", PORTS),
    MayDiffer("HTTP /pd/*", "*git_hash", "no PD was built from a commit here"),
    MayDiffer("HTTP /pd/*", "*build_ts", "likewise"),
    MayDiffer("HTTP /pd/*", "*start_timestamp", CLOCK),
    MayDiffer("HTTP /pd/*", "*_ts", CLOCK),
    MayDiffer("HTTP /pd/*", "*expired_at", CLOCK),
    MayDiffer("HTTP /pd/*", "*state_name", "PD had not heard of the store yet: Down"),
    MayDiffer("HTTP /pd/*", "*_size", SIZE, close_to(9)),
    MayDiffer("HTTP /pd/*", "*_score", SIZE, close_to(9)),
    MayDiffer("HTTP /pd/*", "*_size.1", SIZE, close_to(9)),
    MayDiffer("HTTP /pd/*", "*_keys", SIZE),
    MayDiffer("HTTP /pd/*", "*_keys.1", SIZE),
    MayDiffer("HTTP /pd/*", "*written_*", "flow is not measured", lambda _, other: other == 0),
    MayDiffer("HTTP /pd/api/v1/config", "*", SUBSET, not_shown),
    MayDiffer("HTTP /pd/api/v1/config", "client-urls", PORTS),
    MayDiffer("HTTP /pd/api/v1/config", "data-dir", PORTS),
    MayDiffer("HTTP /config", "*", SUBSET, not_shown),
    MayDiffer("HTTP /config", "*addr", PORTS),
    MayDiffer("HTTP /config", "storage.data-dir", PORTS),
]


def normalize(entry: Entry, outcome: Outcome) -> Outcome:
    """Put into one order what has none: batched answers, PD's lists of regions and schedulers."""
    messages = outcome.messages
    if entry.rpc == "BatchCommands":
        messages = [_one_batch(messages)]
    elif entry.subject == "HTTP /pd/api/v1/regions":
        messages = [{**messages[0], "regions": sorted(messages[0]["regions"], key=lambda each: each["start_key"])}]
    elif entry.subject == "HTTP /pd/api/v1/schedulers":
        messages = [sorted(messages[0])]
    return Outcome(messages, outcome.status, outcome.details)


def _one_batch(messages: list[Json]) -> dict[str, Json]:
    """Answers of a batch come in any order and in any number of messages; ordered by request they are one."""
    answers = [pair for each in messages for pair in zip(each["request_ids"], each["responses"], strict=True)]
    answers.sort(key=lambda pair: int(pair[0]))
    return {**messages[0], "request_ids": [one for one, _ in answers], "responses": [other for _, other in answers]}


@pytest.mark.parametrize("api_version", ["v1", "v1ttl", "v2"])
def test_recorded_conversation(golden: Path, tmp_path: Path, api_version: str) -> None:
    """All RawKV, PD, keyspace and HTTP answers equal the real servers', but for the fields listed in RULES."""
    entries = load(golden / "wire" / api_version)
    mine = [entry for entry in entries if not entry.rpc.startswith(OTHERS)]
    with cluster_as_recorded(entries, ApiVersion.from_label(api_version), tmp_path) as (playground, target):
        found = replay(mine, target, RULES, normalize=normalize)
        fatal_requests = playground.fatal_requests.all()
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(found) == len(mine)
    assert {entry.rpc for entry in mine} >= ALWAYS_RECORDED
    assert fatal_requests == []


def test_a_difference_is_found(golden: Path) -> None:
    """The comparison does not let just anything pass: a changed value, a missing field and a status are reported."""
    entry = next(entry for entry in load(golden / "wire" / "v1") if entry.fields.get("condition") == "limit 2")
    recorded = entry.outcome()
    [message] = recorded.messages
    changed = {"kvs": [{**message["kvs"][0], "value": "AAAA"}, message["kvs"][1]]}
    assert list(differences(entry, recorded, recorded, RULES)) == []
    assert len(list(differences(entry, recorded, Outcome([changed]), RULES))) == 1
    assert len(list(differences(entry, recorded, Outcome([{"kvs": message["kvs"][:1]}]), RULES))) == 2
    assert list(differences(entry, recorded, Outcome([message], "UNAVAILABLE"), RULES))


def test_followers_refuse_as_recorded(golden: Path, tmp_path: Path) -> None:
    """Reads, writes, splits and ingests sent to a follower are refused in a real follower's words."""
    entries = [entry for entry in load(golden / "wire" / "v2_3replicas") if "follower" in entry.fields["condition"]]
    hint = recorded_leader(entries[0])
    playground = open_playground(tmp_path, api_version=ApiVersion.V2.value, balance=False)
    playground.start()
    try:
        region = playground.regions.locate(b"r\0\0\0k015")
        follower = next(peer for peer in region.peers if peer != region.leader)
        node = playground.nodes[follower.store_id]
        with contextlib.closing(Target(playground.state.address, node.address, node.status_address)) as target:
            found = replay(
                entries,
                target,
                [],
                prepare=lambda _, requests: [_readdressed(request, region, follower) for request in requests],
                normalize=lambda _, outcome: _renumbered(outcome, region, hint),
            )
    finally:
        playground.stop()
    assert {entry.rpc for entry in entries} >= {"RawGet", "RawPut", "RawScan", "SplitRegion", "ImportSST/Ingest"}
    assert {name: lines for name, lines in found.items() if lines} == {}


def _readdressed(request: Json, region: Region, follower: Peer) -> Json:
    """The recorded request, meant for a follower of ours."""
    request.context.region_id = region.id
    request.context.region_epoch.CopyFrom(region.to_pb().region_epoch)
    request.context.peer.CopyFrom(follower.to_pb())
    return request


def recorded_leader(entry: Entry) -> tuple[str, str, str]:
    """Region id, and its leader's peer id and store id, as a recorded refusal names them."""
    hint = entry.outcome().messages[0]["region_error"]["not_leader"]
    return hint["region_id"], hint["leader"]["id"], hint["leader"]["store_id"]


def _renumbered(outcome: Outcome, region: Region, recorded: tuple[str, str, str]) -> Outcome:
    """Replace our region, peer and store ids by the recorded ones."""
    leader = region.leader
    region_id, peer_id, store_id = recorded
    ours = f"region {region.id}, leader may Some(id: {leader.id} store_id: {leader.store_id})"
    theirs = f"region {region_id}, leader may Some(id: {peer_id} store_id: {store_id})"
    text = json.dumps(outcome.messages).replace(ours, theirs)
    text = text.replace(f'"region_id": "{region.id}"', f'"region_id": "{region_id}"')
    text = text.replace(
        json.dumps({"id": str(leader.id), "store_id": str(leader.store_id)}),
        json.dumps({"id": peer_id, "store_id": store_id}),
    )
    return Outcome(json.loads(text), outcome.status, outcome.details)
