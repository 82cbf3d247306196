"""Tasks of a backup of transactional data send what stores have answered, and understand the recorded answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from tests.support.one_store import OneStore
from tests.unit.dataflow.samples import options
from tikv_br.backup.store import TxnRequests, run_store_task
from tikv_br.backupset.ledger import LedgerEntry, read_entry
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.pb import brpb_pb2, coprocessor_pb2, tipb_pb2
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.write import BackupJob, Snapshot
from tikv_br.errors import RequestRefused
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import SharedObjects, TaskContext


@pytest.fixture(params=["v1", "v2"])
def folder(request: pytest.FixtureRequest, golden: Path) -> Path:
    """The recording of an API version."""
    return golden / "txn" / str(request.param)


def recorded_request(folder: Path) -> brpb_pb2.BackupRequest:
    """The request that was recorded, without its storage."""
    found = brpb_pb2.BackupRequest.FromString((folder / "request.pb").read_bytes())
    found.ClearField("storage_backend")
    found.DiscardUnknownFields()
    return found


def recorded_answers(folder: Path) -> list[brpb_pb2.BackupResponse]:
    """The answers in their order."""
    paths = sorted(folder.glob("response-*.pb"), key=lambda path: int(path.stem.partition("-")[2]))
    return [brpb_pb2.BackupResponse.FromString(path.read_bytes()) for path in paths]


def recorded_sums(folder: Path) -> Checksum:
    """The sums that the stores computed at the same timestamp."""
    total = Checksum()
    for path in folder.glob("checksum-response-*.pb"):
        sums = tipb_pb2.ChecksumResponse.FromString(coprocessor_pb2.Response.FromString(path.read_bytes()).data)
        total += Checksum(sums.checksum, sums.total_kvs, sums.total_bytes)
    return total


def job_of(folder: Path, ts: int, wanted: BackupOptions) -> BackupJob:
    """The job of a backup at a timestamp, in the recording's API version."""
    version = ApiVersion.V1 if folder.name == "v1" else ApiVersion.V2
    conversion = Conversion(version, version, mode=KeyMode.TXN)
    return BackupJob("run", wanted, conversion, snapshot=Snapshot(ts, frozenset({5, 3})))


@pytest.mark.parametrize("name", ["full", "full-later", "gc-fence", "locked"])
def test_requests(folder: Path, name: str) -> None:
    """Byte by byte, but for the compression, which the recording left open, and the locks to ignore."""
    recorded = recorded_request(folder / name)
    span = KeyRange(recorded.start_key, recorded.end_key)
    wanted = options(key_mode=KeyMode.TXN, concurrency=recorded.concurrency)
    job = job_of(folder, recorded.end_version, wanted)
    cluster: Any = SimpleNamespace(
        cluster_id=recorded.cluster_id, api_version=job.conversion.source, router=None, pd=SimpleNamespace(tso=None)
    )
    assert job.snapshot is not None
    sent = TxnRequests(job, cluster, job.conversion.of(span).target, job.snapshot).message(span)
    assert (sent.compression_type, list(sent.context.resolved_locks)) == (brpb_pb2.ZSTD, [3, 5])
    sent.ClearField("compression_type")
    sent.ClearField("context")
    assert sent.SerializeToString() == recorded.SerializeToString()


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[KeyRange]:
    """The ranges whose locks were cleared; each time one transaction more was pushed."""
    spans: list[KeyRange] = []

    def clear(locks: SnapshotLocks, span: KeyRange) -> int:
        spans.append(span)
        locks.resolved.add(7)
        return 0

    monkeypatch.setattr(SnapshotLocks, "clear", clear)
    return spans


class Replay:
    """A task whose store gives recorded answers, round by round, and writes the recorded files."""

    def __init__(self, folder: Path, name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._files = folder / name / "files"
        locked = [each for each in recorded_answers(folder / "locked") if each.HasField("error")]
        self.rounds = [locked, recorded_answers(folder / name)]
        self.cluster = OneStore(self._answer)
        self.cluster.api_version = ApiVersion.V1 if folder.name == "v1" else ApiVersion.V2
        monkeypatch.setattr(Cluster, "connect", lambda _config: self.cluster)
        self.recorded = recorded_request(folder / name)
        self.span = KeyRange(self.recorded.start_key, self.recorded.end_key)
        self._wanted = options(key_mode=KeyMode.TXN)
        self._wanted = structs.replace(self._wanted, storage=StorageLocation("local", str(place)))
        self._job = job_of(folder, self.recorded.end_version, self._wanted)

    def _answer(self, request: brpb_pb2.BackupRequest) -> list[brpb_pb2.BackupResponse]:
        shutil.copytree(self._files, request.storage_backend.local.path, dirs_exist_ok=True)
        return self.rounds.pop(0)

    def run(self) -> LedgerEntry:
        """Run the task; the entry that it leaves."""
        context = TaskContext(0, 0, lambda _: None, None, SharedObjects([ClusterPool()]))
        done = run_store_task(self._job, self.span, context)
        return read_entry(open_store(self._wanted.storage), done.finished)


@pytest.mark.parametrize("name", ["full", "full-later", "gc-fence"])
def test_answers(
    folder: Path, name: str, cleared: list[KeyRange], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A locked region is requested again; the ledger then has both column families and the stores' checksum."""
    replay = Replay(folder, name, tmp_path, monkeypatch)
    entry = replay.run()
    assert cleared == [replay.span]
    assert [list(each.context.resolved_locks) for each in replay.cluster.requests] == [[3, 5], [3, 5, 7]]
    recorded = [file for answer in recorded_answers(folder / name) for file in answer.files]
    assert [(file.cf, file.sha256) for file in entry.files] == [(file.cf, file.sha256) for file in recorded]
    assert entry.source == recorded_sums(folder / name)
    rows = json.loads((folder / name / "rows.json").read_text())["rows"]
    assert sum(part.total_kvs for part in entry.regions) == len(rows) == entry.source.total_kvs
    assert set(tmp_path.rglob("*.sst")) == {tmp_path / file.name for file in entry.files}


def test_a_timestamp_ahead_of_pd(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is no passing error of the storage: the task ends at once."""
    replay = Replay(folder, "full", tmp_path, monkeypatch)
    replay.rounds = [recorded_answers(folder / "end-version-ahead")]
    with pytest.raises(RequestRefused, match="ahead of PD's timestamps"):
        replay.run()
    assert not list(tmp_path.rglob("*.sst"))
