"""The playground writes backups and takes SSTs in as real servers did: recorded requests, in order, field by field."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from pathlib import Path

import pytest

from tests.golden.wire_cluster import SCAN_OF_A_REGION, cluster_as_recorded
from tests.golden.wire_replay import Entry, Json, MayDiffer, Outcome, Target, differences, load, play
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.cluster import Playground, open_playground
from tikv_br.playground.encoding import encoding_of

MINE = ("Backup", "ImportSST")
AFTERWARDS = "rows after the ingests"
ALWAYS_RECORDED = {"Backup", "ImportSST/Download", "ImportSST/Ingest", "ImportSST/MultiIngest", "RawScan"}
"""The least that a recording must hold for the comparison to mean anything."""
JUNK = b"junk" * 100
BYTES = "another RocksDB wrote the same rows, without TiKV's user properties: other bytes"
RULES = [
    MayDiffer("Backup", "files.sha256", BYTES),
    MayDiffer("Backup", "files.size", BYTES),
    MayDiffer("Backup", "files.cipher_iv", "drawn at random"),
    MayDiffer("Backup", "files.of_other_rows*", "values of rows that were not recorded"),
    MayDiffer(
        "ImportSST/Download",
        "range.*",
        "the timestamps in outermost V2 keys are of our writes",
        lambda one, other: base64.b64decode(one)[:-8] == base64.b64decode(other)[:-8],
    ),
]


class Files:
    """Names and places of the recording's files here."""

    def __init__(self, playground: Playground, folder: Path, entries: list[Entry]) -> None:
        self._folder = folder
        region = next(entry for entry in entries if entry.fields.get("condition") == SCAN_OF_A_REGION)
        context = region.fields["request"]["context"]
        self._first_region = f"{context['peer']['store_id']}/{context['region_id']}_"
        """Prefix of files of the one region whose values are all recorded. Others have values of our own."""
        self._import = str(playground.nodes[1].data_dir / "import")
        self._first: Json = None

    def prepare(self, entry: Entry, requests: list[Json]) -> list[Json]:
        """Put our paths, names and sizes into a request."""
        for request in requests:
            backend = getattr(request, "storage_backend", None)
            if backend is not None and backend.local.path == "/BACKUP_DIR":
                backend.local.path = str(self._folder)
            if entry.rpc == "ImportSST/Download":
                if request.name.startswith(self._first_region):
                    request.name = self._first["name"]
                if request.sst.length and request.name != "junk.sst":
                    extra = 7 if entry.fields["condition"] == "length mismatch" else 0  # as in the recording
                    request.sst.length = int(self._first["size"]) + extra
        return requests

    def check(self, entry: Entry, got: Outcome) -> None:
        """Compare a written file's facts with its bytes; the first one is the file of Download entries."""
        for file in [file for message in got.messages for file in message.get("files", [])]:
            assert len(base64.b64decode(file["cipher_iv"])) == 16
            if "noop" in entry.fields["condition"]:
                continue
            data = (self._folder / file["name"]).read_bytes()
            assert len(data) == int(file["size"])
            assert hashlib.sha256(data).digest() == base64.b64decode(file["sha256"])
            if self._first is None and file["name"].startswith(self._first_region):
                self._first = file
                self._spoil(data)

    def normalize(self, entry: Entry, outcome: Outcome) -> Outcome:
        """Bring names and numbers that cannot be the same into one form."""
        text = json.dumps(outcome.messages)
        text = text.replace(f"local://{self._folder}", "local:///BACKUP_DIR")
        text = text.replace(self._import, "/DATA/kv0/import")
        text = re.sub(r"_\d{13}_", "_TIME_", text)
        text = re.sub(r"size \d+, expected \d+", "size N, expected N + 7", text)
        text = re.sub(r"stored = \d+, computed = \d+", "stored = A, computed = B", text)
        text = re.sub(r"offset 0 size \d+", "offset 0 size S", text)
        messages = json.loads(text)
        if entry.rpc == "Backup":
            # Regions are backed up by several threads: they come in any order.
            messages.sort(key=lambda each: base64.b64decode(each.get("start_key", "")))
            for file in [file for message in messages for file in message.get("files", [])]:
                if not re.match(self._first_region.replace("/", "[/_]"), file["name"]):
                    file["of_other_rows"] = [file.pop("crc64xor", "0"), file.pop("total_bytes")]
        return Outcome(messages, outcome.status, outcome.details)

    def _spoil(self, sound: bytes) -> None:
        """Lay out the files that the recorded Download requests find damaged."""
        (self._folder / "bad.sst").write_bytes(sound[:100] + bytes([sound[100] ^ 1]) + sound[101:])
        (self._folder / "junk.sst").write_bytes(JUNK)
        (self._folder / "empty.sst").write_bytes(b"")


@pytest.mark.parametrize("api_version", ["v1", "v1ttl", "v2"])
def test_recorded_backups_and_ingests(golden: Path, tmp_path: Path, api_version: str) -> None:
    """All Backup and ImportSST answers, and what is read afterwards, equal the real servers' but for fields in RULES."""
    entries = load(golden / "wire" / api_version)
    folder = tmp_path / "backup"
    folder.mkdir()
    found = {}
    with cluster_as_recorded(entries, ApiVersion.from_label(api_version), tmp_path / "data") as (playground, target):
        files = Files(playground, folder, entries)
        for entry in entries:
            got = play(entry, target, files.prepare)
            if entry.rpc.startswith(MINE) or entry.fields.get("condition") == AFTERWARDS:
                files.check(entry, got)
                recorded = files.normalize(entry, entry.outcome())
                found[entry.name] = list(differences(entry, recorded, files.normalize(entry, got), RULES))
        fatal_requests = playground.fatal_requests.all()
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert {entry.rpc for entry in entries if entry.name in found} >= ALWAYS_RECORDED
    assert fatal_requests == []


def test_a_store_that_leads_nothing_answers_nothing(golden: Path, tmp_path: Path) -> None:
    """A backup asked of a follower's store is an empty stream, as recorded, though the leader's store has a file."""
    entries = load(golden / "wire" / "v2_3replicas")
    [entry] = [entry for entry in entries if entry.rpc == "Backup"]
    playground = open_playground(tmp_path, api_version=ApiVersion.V2.value, balance=False, keyspace_split_delay=60.0)
    playground.start()
    try:
        key = b"r\0\0\0k01500"  # inside the recorded range
        playground.engine.write([encoding_of(ApiVersion.V2).put(key, b"v", 0, 1)])
        leader = playground.regions.locate(b"").leader_store
        answers = {}
        for store_id, node in playground.nodes.items():
            with contextlib.closing(Target(playground.state.address, node.address, node.status_address)) as target:
                answers[store_id] = play(entry, target)
    finally:
        playground.stop()
    assert entry.outcome() == Outcome([])
    assert len(answers.pop(leader).messages[0]["files"]) == 1
    assert list(answers.values()) == [entry.outcome()] * 2
