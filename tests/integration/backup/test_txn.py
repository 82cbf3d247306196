"""Backups of transactional data: one consistent snapshot beside transactions that live, die and commit, or no backup at all."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.e2e.command import tikv_br
from tests.integration.backup.conftest import Options
from tests.integration.backup.data import when
from tests.integration.backup.reading import rocksdb_rows
from tests.integration.backup.resume.unfinished import files_at
from tests.support.ledgers import read_entries
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.live_txn_backups import delete_range
from tests.support.live_txns import ALIVE, NAMES, Txns, prefix_of
from tikv_br.backup import comparison
from tikv_br.backup.run import backup_txn
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import (
    BackupUnsupported,
    ChecksumMismatch,
    ClusterUnfit,
    LocksRemain,
    NothingMatched,
    RequestRefused,
    SafePointError,
    TikvBrError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec, KeyMode, encode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.mvcc import WriteRecord
from tikv_br.progress_events import Event, Notice, StepFinished, StepStarted
from tikv_br.storage.open import open_store

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
POINT = "backup.region"
LONG = b"long" * 100


@dataclass(frozen=True)
class Source:
    """Transactions in a keyspace of a cluster, and backups of them."""

    txns: Txns
    options: Callable[..., BackupOptions]
    scratch: Path

    @property
    def live(self) -> LiveCluster:
        """The playground."""
        return self.txns.live

    def wanted(self, **changes: Any) -> BackupOptions:  # noqa: ANN401
        """Options of a backup of all of it."""
        is_v2 = self.live.cluster.api_version is V2
        usual: dict[str, Any] = {"engine": "auto", "key_mode": KeyMode.TXN, "keyspaces": ("ks1",) if is_v2 else ()}
        return self.options(self.live, **(usual | changes))

    def put(self, name: bytes, value: bytes) -> int:
        """Write a value; the commit ts."""
        return self.change(name, kv.Mutation(op=kv.Put, key=self.txns.key(name), value=value))

    def delete(self, name: bytes) -> int:
        """Delete a row; the commit ts."""
        return self.change(name, kv.Mutation(op=kv.Del, key=self.txns.key(name)))

    def change(self, name: bytes, mutation: kv.Mutation) -> int:
        """Commit one mutation."""
        start_ts = self.txns.ts()
        request = kv.PrewriteRequest(
            mutations=[mutation], primary_lock=mutation.key, start_version=start_ts, lock_ttl=ALIVE
        )
        answer = self.txns.call("KvPrewrite", mutation.key, request)
        assert not answer.errors, answer
        return self.txns.commit(start_ts, name)

    def rows_at(self, ts: int) -> dict[bytes, bytes]:
        """The rows that a reader at a timestamp finds."""
        found = {}
        for name in NAMES:
            request = kv.GetRequest(key=self.txns.key(name), version=ts)
            answer = self.txns.call("KvGet", self.txns.key(name), request)
            assert not answer.HasField("error"), answer
            if not answer.not_found:
                found[name] = answer.value
        return found

    def check(self, wanted: BackupOptions) -> dict[bytes, bytes]:
        """Compare a backup, read by RocksDB, with the cluster at backup-ts; returns its rows."""
        place = Path(wanted.storage.path)
        kept = BackupSet.open(open_store(wanted.storage), KeyMode.TXN)
        rows = rows_in(place, self.scratch, self.txns.prefix)
        assert rows == self.rows_at(kept.backup_ts)
        assert kept.manifest is not None
        statistics = kept.manifest.statistics
        assert statistics.total_kvs == len(rows)
        assert statistics.total_bytes == sum(len(self.txns.key(name)) + len(value) for name, value in rows.items())
        assert sum(part.total_kvs for part in kept.manifest.regions) == len(rows)
        assert {file.name for file in kept.files} == {str(path.relative_to(place)) for path in place.rglob("*.sst")}
        assert not [path for path in place.rglob("*") if path.is_dir() and not list(path.iterdir())]
        return rows


def rows_in(place: Path, scratch: Path, prefix: bytes) -> dict[bytes, bytes]:
    """Both column families of a backup, joined: names and values."""
    codec, values, rows = KeyCodec(V2), {}, {}
    for key, value in rocksdb_rows(place, scratch, "*_default.sst").items():
        values[codec.parse_storage_key(key[1:])] = value
    for key, value in rocksdb_rows(place, scratch, "*_write.sst").items():
        rpc_key, _ = codec.parse_storage_key(key[1:])
        record = WriteRecord.decode(value)
        assert record.kind == b"P"
        found = values.pop((rpc_key, record.start_ts)) if record.value is None else record.value
        rows[rpc_key.removeprefix(prefix)] = found
    assert not values
    return rows


@pytest.fixture(scope="module", params=[V1, V2], ids=lambda version: version.label)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A playground with regions between the names."""
    with live_cluster(tmp_path_factory.mktemp("txn"), request.param, stores=2) as live:
        prefix = prefix_of(live, "ks1")
        live.split(*(encode(prefix + name) for name in NAMES[5::10]))
        yield live


@pytest.fixture
def source(shared: LiveCluster, options: Options, tmp_path: Path) -> Iterator[Source]:
    """Without rows and locks before."""
    made = Source(Txns(shared, prefix_of(shared, "ks1")), options, tmp_path)
    yield made
    shared.heal()
    delete_range(shared, int.from_bytes(made.txns.prefix[1:]))
    for service in shared.safe_points():
        shared.cluster.pd.update_service_safe_point(service, 0, 0)


@pytest.mark.core("backup")
def test_a_snapshot_beside_locks_of_every_kind(source: Source) -> None:
    """Ended transactions are in it as a whole or not at all; one that lives commits afterwards, and is not in it."""
    txns = source.txns
    source.put(NAMES[30], b"")
    source.put(NAMES[31], LONG)
    source.put(NAMES[32], b"old")
    source.put(NAMES[32], b"new")
    source.put(NAMES[33], LONG)
    source.delete(NAMES[33])
    txns.prewrite(*NAMES[0:10:4])  # died before its commit
    committed = txns.prewrite(NAMES[1], NAMES[11], NAMES[21])
    txns.commit(committed, NAMES[1])
    complete = txns.async_prewrite(NAMES[2], NAMES[12], NAMES[22])
    txns.async_prewrite(NAMES[3], NAMES[13], NAMES[23], missing=1)
    txns.prewrite(NAMES[14], primary=NAMES[24])
    txns.lock_pessimistically(NAMES[15], ttl=ALIVE)
    time.sleep(0.01)
    alive = txns.prewrite(NAMES[6], NAMES[16], ttl=ALIVE)
    wanted = source.wanted(checksum=True)
    summary = backup_txn(wanted).summary
    assert (summary.compared_ranges, summary.changed_ranges) == (1, 0)
    txns.commit(alive, NAMES[6], NAMES[16])
    source.put(NAMES[30], b"later")
    rows = source.check(wanted)
    of = {
        name: b"of %d" % start_ts
        for start_ts, names in ((committed, (1, 11, 21)), (complete, (2, 12, 22)))
        for name in names
    }
    assert rows == {NAMES[30]: b"", NAMES[31]: LONG, NAMES[32]: b"new"} | {NAMES[at]: value for at, value in of.items()}
    assert (summary.engine, summary.executor, summary.key_mode) == ("store", "driver", "txn")
    assert summary.backup_ts < alive << 1
    assert txns.written_by(NAMES[6]) == alive
    with pytest.raises(BackupUnsupported):
        BackupSet.open(open_store(wanted.storage), KeyMode.RAW)


def test_a_lock_that_appears_after_they_were_resolved(source: Source) -> None:
    """It is below backup-ts: the task that meets it resolves it, and asks for the region again."""
    for name in NAMES[::3]:
        source.put(name, LONG)
    began: list[int] = []

    def lock(event: Event) -> None:
        if isinstance(event, StepStarted) and event.name == "choose backup-ts":
            began.extend([source.txns.ts(), source.txns.ts()])
        if isinstance(event, StepFinished) and event.name == "resolve locks":
            for start_ts, name, ttl in zip(began, (NAMES[1], NAMES[17]), (1, ALIVE), strict=True):
                mutation = kv.Mutation(op=kv.Put, key=source.txns.key(name), value=b"late")
                request = kv.PrewriteRequest(
                    mutations=[mutation],
                    primary_lock=mutation.key,
                    start_version=start_ts,
                    lock_ttl=ttl,
                    min_commit_ts=start_ts + 1,
                )
                assert not source.txns.call("KvPrewrite", mutation.key, request).errors

    wanted = source.wanted()
    backup_txn(wanted, lock)
    source.txns.commit(began[1], NAMES[17])
    assert source.check(wanted).keys() == set(NAMES[::3])


def test_a_live_async_commit(source: Source) -> None:
    """It may still commit below backup-ts, so that it is waited for: until it ends, or in vain."""
    source.put(NAMES[0], b"row")
    alive = source.txns.async_prewrite(NAMES[7], NAMES[17], ttl=ALIVE)
    wanted = source.wanted(lock_patience=0.3)
    with pytest.raises(LocksRemain) as raised:
        backup_txn(wanted)
    assert raised.value.exit_code == 17
    assert files_at(wanted) == set()
    assert not source.live.safe_points()
    committer = threading.Timer(0.5, lambda: source.txns.commit(alive, NAMES[7], NAMES[17]))
    committer.start()
    patient = source.wanted(lock_patience=60.0)
    backup_txn(patient)
    committer.join()
    assert NAMES[0] in source.check(patient)


@pytest.mark.parametrize("command", ["split", "transfer-leader"])
def test_a_region_that_moves_before_it_is_written(source: Source, command: str) -> None:
    """Parts that a store does not answer for are requested again, and no row is lost or there twice."""
    for name in NAMES:
        source.put(name, LONG if name[-1] % 2 else b"short")
    bound = encode(source.txns.key(NAMES[7]))
    region = next(
        each
        for each in source.live.regions()
        if bytes.fromhex(each["start"]) <= bound and (not each["end"] or bound < bytes.fromhex(each["end"]))
    )
    other = next(each for each in source.live.store_ids if each != region["leader_store"])
    arguments: dict[str, Any] = {"keys": [encode(source.txns.key(NAMES[number])).hex() for number in (7, 8)]}
    if command != "split":
        arguments = {"region_id": region["id"], "store_id": other}
    moving = source.live.fail(POINT, {"command": {"name": command, "arguments": arguments}}, region_id=region["id"])
    wanted = source.wanted()
    backup_txn(wanted)
    assert source.live.hits(moving) == 1
    assert source.check(wanted).keys() == set(NAMES)


def test_gc_that_is_moved_by_hand(source: Source) -> None:
    """PD accepts it whatever the service safe point is, and stores do not notice: the run fails, and nothing is left."""
    source.put(NAMES[0], b"row")
    pd, wanted = source.live.cluster.pd, source.wanted()
    with pytest.raises(SafePointError, match="has passed") as raised:
        backup_txn(wanted, when(StepFinished, "copy", lambda: pd.update_gc_safe_point(pd.tso())))
    assert "JuiceFS" in raised.value.hint
    assert files_at(wanted) == set()
    backup_txn(wanted)
    assert source.check(wanted).keys() == {NAMES[0]}


def test_a_copy_that_differs(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once more. Still different, it is an error: of the copy, or of GC that has passed backup-ts."""
    for name in NAMES[:20]:
        source.put(name, LONG)

    def destroy() -> None:
        request = kv.DeleteRangeRequest(start_key=source.txns.key(NAMES[3]), end_key=source.txns.key(NAMES[4]))
        source.txns.call("KvDeleteRange", source.txns.key(NAMES[3]), request)

    wanted = source.wanted(checksum=True)
    backup_txn(wanted, when(StepFinished, "copy", destroy))
    assert source.check(wanted).keys() == {*NAMES[:3], *NAMES[4:20]}
    monkeypatch.setattr(comparison, "txn_checksum", lambda *_asked: Checksum())
    wanted = source.wanted(checksum=True)
    with pytest.raises(ChecksumMismatch, match="copied twice"):
        backup_txn(wanted)
    assert not list(Path(wanted.storage.path).rglob("*.sst"))
    pd = source.live.cluster.pd
    with pytest.raises(SafePointError):
        backup_txn(
            source.wanted(checksum=True), when(StepFinished, "check GC", lambda: pd.update_gc_safe_point(pd.tso()))
        )


def fail_in(step: str) -> Callable[[Event], None]:
    """A reporter that breaks the run off at a step."""

    def stop() -> None:
        raise RequestRefused("on purpose")

    return when(StepStarted, step, stop)


def test_a_resumed_run_keeps_its_snapshot(source: Source) -> None:
    """Rows of later transactions are not in it, though the locks of some are met again."""
    source.put(NAMES[0], b"before")
    source.put(NAMES[20], LONG)
    wanted = source.wanted()
    with pytest.raises(RequestRefused):
        backup_txn(wanted, fail_in("verify coverage"))
    (entry,) = read_entries(open_store(wanted.storage))
    assert entry.source.total_kvs == 2
    source.put(NAMES[0], b"after")
    source.put(NAMES[1], b"new")
    with pytest.raises(TikvBrError):
        backup_txn(structs.replace(wanted, key_mode=KeyMode.RAW))
    summary = backup_txn(wanted).summary
    assert summary.resumed_ranges == 1
    assert source.check(wanted) == {NAMES[0]: b"before", NAMES[20]: LONG}


def test_gc_that_passes_between_two_runs(source: Source) -> None:
    """The finished part cannot be completed; without it the backup starts over."""
    source.put(NAMES[0], b"before")
    wanted, pd = source.wanted(), source.live.cluster.pd
    with pytest.raises(RequestRefused):
        backup_txn(wanted, fail_in("verify coverage"))
    pd.update_gc_safe_point(pd.tso())
    with pytest.raises(SafePointError) as raised:
        backup_txn(wanted)
    assert "--no-resume" in raised.value.hint
    again = structs.replace(wanted, no_resume=True)
    backup_txn(again)
    assert source.check(again) == {NAMES[0]: b"before"}


def test_ranges_and_keyspaces(source: Source) -> None:
    """All keyspaces with transactions are backed up, also those without a name in PD; a range without a row is refused."""
    for name in NAMES[:20]:
        source.put(name, b"row")
    part = (KeyRange(NAMES[3], NAMES[5]), KeyRange(NAMES[10], NAMES[12]))
    wanted = source.wanted(ranges=part)
    assert backup_txn(wanted).summary.total_kvs == 4
    with pytest.raises(NothingMatched):
        backup_txn(source.wanted(ranges=(KeyRange(NAMES[30], NAMES[35]),)))
    if source.txns.prefix:
        events: list[Event] = []
        with pytest.raises(NothingMatched, match="in keyspace 0"):
            backup_txn(source.wanted(keyspaces=(), dry_run=True), events.append)
        warnings = [event.message for event in events if isinstance(event, Notice) and event.warning]
        keyspace = source.live.create_keyspace("ks1")
        assert any(re.search(rf"leaves out: ks1 \({keyspace}\);.*--keyspace selects", each) for each in warnings)
        other = replace(source, txns=Txns(source.live, KeyCodec(V2, 0xABCDE, KeyMode.TXN).prefix))
        other.put(NAMES[0], b"other")
        everything = source.wanted(keyspaces=("all",))
        assert backup_txn(everything).summary.total_kvs == 21
        kept = BackupSet.open(open_store(everything.storage), KeyMode.TXN)
        assert kept.manifest is not None
        assert kept.manifest.description.keyspaces == (keyspace, 0xABCDE)
        other.delete(NAMES[0])


def test_a_dry_run_and_the_command(source: Source, tmp_path: Path) -> None:
    """The plan writes nothing; the command makes an encrypted backup, with a summary."""
    for number in (0, 15, 30):
        source.put(NAMES[number], LONG)
    planned = source.wanted(dry_run=True)
    assert backup_txn(planned).plan
    assert files_at(planned) == set()
    keyspace = ["--keyspace", "ks1"] if source.txns.prefix else []
    place = tmp_path / "by command"
    ran = tikv_br(
        "backup", "txn", "--pd", source.live.pd, "--storage", f"local://{place}", "--crypter.key", "ab" * 16,
        "--prefix", "a0", "--range", "a3:a31", "--output", "json", "--executor", "driver", *keyspace,
        "--report", str(tmp_path / "report.html"),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    summary = ran.last
    assert (summary["key_mode"], summary["total_kvs"]) == ("txn", 2)
    assert "still below backup-ts" in (tmp_path / "report.html").read_text()
    assert not any(LONG in path.read_bytes() for path in place.rglob("*.sst"))


def test_raw_data_beside_transactions(options: Options, tmp_path: Path) -> None:
    """In API V1 a raw bound in the range is refused by name before anything is written; outside of it, it is no obstacle."""
    with live_cluster(tmp_path / "cluster", V1, stores=1) as live:
        source = Source(Txns(live, b""), options, tmp_path)
        live.raw().put(b"raw-5", b"raw")
        source.put(NAMES[0], b"row")
        live.split(b"raw-5")
        wanted = source.wanted()
        with pytest.raises(ClusterUnfit, match="raw-5"):
            backup_txn(wanted)
        assert files_at(wanted) == set()
        beside = source.wanted(ranges=(KeyRange(b"a", b"b"),))
        backup_txn(beside)
        assert source.check(beside) == {NAMES[0]: b"row"}


def test_stores_that_do_not_pass_locks(options: Options, tmp_path: Path) -> None:
    """Stores of older versions wait for a live transaction until it ends, or until the patience ends."""
    with live_cluster(tmp_path / "cluster", V1, stores=1, tikv_version="8.5.0") as live:
        source = Source(Txns(live, b""), options, tmp_path)
        source.put(NAMES[0], b"row")
        alive = source.txns.prewrite(NAMES[1], NAMES[2], ttl=ALIVE)
        with pytest.raises(LocksRemain, match="has locked 613032"):
            backup_txn(source.wanted(lock_patience=0.5))
        committer = threading.Timer(0.5, lambda: source.txns.commit(alive, *NAMES[1:3]))
        committer.start()
        patient = source.wanted(lock_patience=60.0)
        backup_txn(patient)
        committer.join()
        assert source.check(patient) == {NAMES[0]: b"row"}


def test_a_cluster_with_ttl(options: Options, tmp_path: Path) -> None:
    """Its stores refuse transactions."""
    with live_cluster(tmp_path / "cluster", V1TTL, stores=1) as live, pytest.raises(ClusterUnfit, match="v1ttl"):
        backup_txn(options(live, key_mode=KeyMode.TXN, engine="auto"))
