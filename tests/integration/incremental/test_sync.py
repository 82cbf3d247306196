"""A sync as a whole: backup, restore, then ``tikv-br sync`` as a process of its own, stopped and started again."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
from msgspec import structs

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.integration.incremental.conftest import Clusters
from tests.integration.incremental.writer import Writer
from tests.integration.s3_servers import moto_server
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.archive.records import Checkpoint
from tikv_br.backupset.lease import LeaseOwner
from tikv_br.cluster.ingests import Follower
from tikv_br.cluster.pd_http import gc_status
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.errors import ClusterUnfit, SyncRunning, SyncStateDamaged, SyncStateMismatch, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.incremental import handover
from tikv_br.incremental.handover import FromBackup, FromNow, service_id
from tikv_br.incremental.sinks.url import BlackholeTarget, TikvTarget
from tikv_br.incremental.sinks.url import parse as parse_sink
from tikv_br.incremental.sync import SyncOptions, sync
from tikv_br.records import dump, load
from tikv_br.storage.url import parse

V2 = ApiVersion.V2
PATIENCE = 90.0
"""Seconds that a slow machine may take to catch up."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Target of changes."""
    with live_cluster(tmp_path_factory.mktemp("target"), V2, stores=1, regions=3) as live:
        yield live


@pytest.fixture
def pair(clusters: Clusters, target: LiveCluster) -> tuple[LiveCluster, LiveCluster]:
    """Source and target, both empty."""
    source = clusters(V2)
    for live in (source, target):
        live.raw().delete_range(EVERY_KEY)
    return source, target


def flags(source: LiveCluster, sink: str, state: Path | str, *more: str) -> list[str]:
    """A sync with its state in a folder, or on S3."""
    quick = ["--hold-back", "0s", "--status-every", "1s", "--output", "json"]
    return ["sync", "--pd", source.pd, "--sink", sink, "--state-dir", str(state), *quick, *more]


@contextlib.contextmanager
def syncing(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running sync, killed at the end if it still runs."""
    command = [str(PROGRAM), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(), cwd="/") as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_equal(source: LiveCluster, target: LiveCluster, process: subprocess.Popen[str]) -> None:
    """Wait for the target to hold what the source holds; writes have stopped."""
    wanted = contents(source)
    until = time.monotonic() + PATIENCE
    while contents(target) != wanted:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "the target does not catch up"
        time.sleep(0.2)


def stop(process: subprocess.Popen[str]) -> str:
    """Have it end by SIGTERM; its standard output."""
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert '"message_type":"summary"' in out
    return out


class SafePointWatch(threading.Thread):
    """Notes all the while which safe points PD holds for services other than GC itself."""

    def __init__(self, live: LiveCluster) -> None:
        super().__init__(name="safe-points", daemon=True)
        self._live = live
        self._enough = threading.Event()
        self.seen: list[dict[str, int]] = []

    def run(self) -> None:
        """Look until the end of the block."""
        while not self._enough.wait(0.01):
            self._look()
        self._look()  # once more: what happened last has happened by now

    def _look(self) -> None:
        points = self._live.get("/pd/api/v1/gc/safepoint")["service_gc_safe_points"]
        self.seen.append({p["service_id"]: int(p["safe_point"]) for p in points if p["service_id"] != "gc_worker"})

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self.join()

    def assert_held(self, ts: int, name: str) -> None:
        """Fail if GC could have passed a backup-ts before the sync of that name had."""
        guarded = [any(point <= ts - 1 for point in points.values()) or name in points for points in self.seen]
        assert guarded[guarded.index(True) :].count(False) == 0
        assert any(len(points) > 1 and points.get(name) == ts - 1 for points in self.seen), "no moment with both"


def wait_for_checkpoint(process: subprocess.Popen[str], ts: int) -> None:
    """Read its status lines until the checkpoint has passed this."""
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("checkpoint_ts", 0) > ts:  # it has none before it has begun
            return
    pytest.fail(f"it ended: {process.communicate()}")


@pytest.mark.timeout(600)
@pytest.mark.core("sync")
def test_from_backup_to_equal(pair: tuple[LiveCluster, LiveCluster], tmp_path: Path) -> None:
    """Load, backup to S3 under writes, restore, sync with its state on S3, stopped once: `diff` finds nothing."""
    source, target = pair
    with moto_server() as s3, SafePointWatch(source) as points:
        place = s3.url("backup")
        succeed("raw", "import", "--pd", source.pd, "--count", "2000", "--value-size", "50", "--seed", "1")
        asked = flags(source, f"tikv://{target.pd}", s3.url("state"), "--id", "whole", "--from-backup", place)
        with Writer(source, 1), Writer(source, 2):
            backup = ["--storage", place, "--safe-interval", "2s", "--executor", "driver", "--output", "json"]
            ts = succeed("backup", "raw", "--pd", source.pd, *backup).last["backup_ts"]
            succeed("restore", "raw", "--pd", target.pd, "--storage", place, "--executor", "driver")
            with syncing(*asked) as process:
                wait_for_checkpoint(process, ts)
                first = json.loads(stop(process).splitlines()[-2])["checkpoint_ts"]
        with syncing(*asked) as process:
            wait_until_equal(source, target, process)
            last = json.loads(stop(process).splitlines()[-2])["checkpoint_ts"]
        assert last > first > ts
    points.assert_held(ts, service_id("whole"))
    assert points.seen[-1][service_id("whole")] == last - 1
    succeed("diff", "--pd", source.pd, "--other-pd", target.pd, "--exact", "--executor", "driver")


def test_wrong_starts_have_their_exit_codes(
    pair: tuple[LiveCluster, LiveCluster], clusters: Clusters, tmp_path: Path
) -> None:
    """Each wrong start has its exit code, and none leaves a state behind."""
    source, target = pair
    state, sink = tmp_path / "state", f"tikv://{target.pd}"
    for more, code in (
        ([], 2),
        (["--start-ts", "now", "--from-backup-ts", "7"], 2),
        (["--from-backup-ts", str(1 << 62)], 2),
        (["--start-ts", "now", "--hold-back", "2.9s"], 2),
        (["--from-backup", str(tmp_path)], 31),
    ):
        done = tikv_br(*flags(source, sink, state, *more))
        assert done.code == code, done.out + done.err
    assert tikv_br(*flags(source, f"tikv://{source.pd}", state, "--start-ts", "now")).code == 2
    mixed = tikv_br(*flags(source, "-", state, "--start-ts", "now"))
    assert (mixed.code, mixed.last["name"]) == (2, "UsageError")
    assert tikv_br(*flags(clusters(ApiVersion.V1), sink, state, "--start-ts", "now")).code == 5
    assert not state.exists() or not list(state.rglob("*.json"))


def test_the_way_back_is_refused_while_a_sync_runs(
    pair: tuple[LiveCluster, LiveCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same rows, by a sync or a changefeed; other ranges and keyspaces, and a sync that has ended or died, do not matter."""
    a, b = pair
    there = flags(a, f"tikv://{b.pd}", tmp_path / "there", "--start-ts", "now", "--start", "k", "--end", "m")
    back = flags(b, f"tikv://{a.pd}", tmp_path / "back", "--start-ts", "now")
    for live in pair:
        live.create_keyspace("aside")
    with syncing(*there) as process:
        wait_for_checkpoint(process, 0)
        for more in ([], ["--start", "l"], ["--end", "k\\x00"]):
            refused = tikv_br(*back, *more)
            assert refused.code == 78, refused.out + refused.err
            assert "copy each change in a circle" in refused.last["message"]
        for number, more in enumerate((["--end", "k"], ["--start", "m"], ["--keyspace", "aside"])):
            sink = f"tikv://{a.pd}" + ("?keyspace=aside" if "aside" in more else "")
            beside = flags(b, sink, tmp_path / f"beside-{number}", "--start-ts", "now", "--id", f"n{number}", *more)
            with syncing(*beside) as other:
                wait_for_checkpoint(other, 0)
                stop(other)
        stop(process)
    with syncing(*back) as process:
        wait_for_checkpoint(process, 0)
        stop(process)
    monkeypatch.setattr(handover, "RENEWAL_SEEN_SECONDS", 2.0)
    owner = structs.replace(LeaseOwner.this_process(), machine="elsewhere")
    ours = Follower("s", owner, b.cluster.cluster_id, (0, 0), (EVERY_KEY,))
    killed = structs.replace(ours, target=a.cluster.cluster_id)
    service = service_id("killed")
    b.cluster.pd.update_service_safe_point(service, 600, b.cluster.pd.tso())
    b.cluster.ingests.register_follower(service, killed)
    handover.check_no_return(b.cluster, a.cluster.cluster_id, ours, lambda: None)
    b.cluster.ingests.register_follower(service, structs.replace(killed, owner=LeaseOwner.this_process()))
    with pytest.raises(SyncRunning, match="killed copies the same rows"):
        handover.check_no_return(b.cluster, a.cluster.cluster_id, ours, lambda: None)
    b.cluster.ingests.register_follower(service, structs.replace(killed, has_ended=True))
    b.cluster.pd.update_service_safe_point(service, 0, 0)


def test_a_sync_after_the_other_direction(pair: tuple[LiveCluster, LiveCluster], tmp_path: Path) -> None:
    """Resumed, it would overwrite what clients have written to its target since; a new one, and one in a state of its own, may run."""
    a, b = pair
    there = flags(a, f"tikv://{b.pd}", tmp_path / "there", "--start-ts", "now", "--start", "k", "--end", "m")
    back = flags(b, f"tikv://{a.pd}", tmp_path / "back", "--start-ts", "now")
    for command in (there, there, back, back):  # each resumes once
        with syncing(*command) as process:
            wait_for_checkpoint(process, 0)
            stop(process)
    b.raw().put(b"k1", b"newer")
    refused = tikv_br(*there)
    assert refused.code == 71, refused.out + refused.err
    assert "has copied rows from its target back" in refused.last["message"]
    assert b.raw().get(b"k1") == b"newer"
    new, later = [*there, "--id", "new"], [*back, "--id", "later"]
    for command in (new, new, later):
        with syncing(*command) as process:
            wait_for_checkpoint(process, 0)
            stop(process)
    assert tikv_br(*new).code == 71


@pytest.mark.parametrize("waits_for", ["the way back", "another one with the id"])
def test_now_is_when_the_command_starts(
    pair: tuple[LiveCluster, LiveCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    """A write while it waits to see whether another sync runs, which was killed elsewhere, is copied."""
    a, b = pair
    monkeypatch.setattr(handover, "RENEWAL_SEEN_SECONDS", 3.0)
    is_back = waits_for == "the way back"
    of, target = (b, a) if is_back else (a, b)
    owner = structs.replace(LeaseOwner.this_process(), machine="elsewhere")
    killed = Follower("s", owner, target.cluster.cluster_id, (0, 0), (EVERY_KEY,))
    service = service_id("killed" if is_back else "now")
    of.cluster.pd.update_service_safe_point(service, 600, of.cluster.pd.tso())
    of.cluster.ingests.register_follower(service, killed)
    options = SyncOptions(
        changefeed_id="now",
        source=a.config,
        target=parse_sink(f"tikv://{b.pd}"),
        state=parse(str(tmp_path)),
        scratch=tmp_path,
        start=FromNow(safe_interval=0.0),
    )
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sync, options, stop, lambda _: None)
        try:
            time.sleep(1.5)
            a.raw().put(b"beside the wait", b"value")
            eventually(lambda: running.done() or b.raw().get(b"beside the wait"))
        finally:
            stop.set()
        running.result()
    assert b.raw().get(b"beside the wait") == b"value"
    for live, name in ((of, service), (a, service_id("now"))):
        live.cluster.ingests.register_follower(name, structs.replace(killed, has_ended=True))
        live.cluster.pd.update_service_safe_point(name, 0, 0)


def test_a_state_of_another_sync_is_refused(pair: tuple[LiveCluster, LiveCluster], tmp_path: Path) -> None:
    """The same name with another range is no restart."""
    source, target = pair
    asked = flags(source, f"tikv://{target.pd}", tmp_path / "state", "--start-ts", "now")
    source.raw().put(b"before", b"start")
    with syncing(*asked) as process:
        until = time.monotonic() + PATIENCE
        while contents(target).get(b"after") is None:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            source.raw().put(b"after", b"start")
            time.sleep(0.2)
        stop(process)
    assert tikv_br(*asked, "--start", "b").code == 71


def test_a_second_one_is_refused_unless_it_takes_over(pair: tuple[LiveCluster, LiveCluster], tmp_path: Path) -> None:
    """Started twice under one name, the second is refused; with --take-over the first ends, and the second continues."""
    source, target = pair
    asked = flags(source, f"tikv://{target.pd}", tmp_path / "state", "--start-ts", "now")
    with Writer(source, 5), syncing(*asked) as first:
        wait_for_checkpoint(first, 0)
        refused = tikv_br(*asked[:-2])
        assert refused.code == SyncRunning.exit_code, refused.err
        assert first.poll() is None
        with syncing(*asked[:-2], "--take-over") as second:
            out, err = first.communicate(timeout=PATIENCE)
            assert first.returncode == 70, err
            assert json.loads(out.splitlines()[-1])["name"] == "SyncFenced"
            wait_for_checkpoint(second, 0)
            stop(second)


def replay(log: str) -> dict[bytes, bytes]:
    """The live rows that a change log leaves."""
    rows: dict[bytes, bytes] = {}
    for line in log.splitlines():
        change = json.loads(line)
        if change["op"] == "put":
            rows[bytes.fromhex(change["key"])] = bytes.fromhex(change["value"])
        else:
            rows.pop(bytes.fromhex(change["key"]), None)
    return rows


def test_changes_as_json_lines(pair: tuple[LiveCluster, LiveCluster], tmp_path: Path) -> None:
    """A file of JSON lines, through a kill, replays to what the source holds; standard output has the same lines."""
    source, _ = pair
    place = tmp_path / "changes.jsonl"
    since = minus_seconds(source.cluster.pd.tso(), 10)  # a slow machine takes long to begin, and "now" is then
    asked = flags(source, f"file://{place}", tmp_path / "state", "--from-backup-ts", str(since))
    until = time.monotonic() + PATIENCE
    with Writer(source, 3), syncing(*asked) as process:
        while not place.exists() or not place.stat().st_size:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.1)
    with place.open("a") as file:
        file.write('{"op": "put", "key": "torn')  # by a kill
    until = time.monotonic() + PATIENCE
    with syncing(*asked) as process:
        wanted = contents(source)
        # One read: between two, the sync may have written a part of a line.
        while not (log := place.read_text()).endswith("\n") or replay(log) != wanted:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.2)
        stop(process)
    to_stdout = ["sync", "--pd", source.pd, "--sink", "-", "--state-dir", str(tmp_path / "state"), "--id", "stdout"]
    with Writer(source, 4), syncing(*to_stdout, "--start-ts", "now") as process:
        assert process.stdout is not None
        assert any(bytes.fromhex(json.loads(line)["key"]).startswith(b"4") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] is not None
        assert process.returncode == 143


def test_a_sync_of_the_former_default_name_is_continued(
    clusters: Clusters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only if source, range and sink are the same, and nothing is stored under the present name; its safe point is kept."""
    source, stopped, state = clusters(V2), threading.Event(), tmp_path / "state"
    stopped.set()
    caplog.set_level("INFO")
    former = SyncOptions(
        changefeed_id="default",
        source=source.config,
        target=BlackholeTarget(),
        state=parse(f"local://{state}"),
        scratch=tmp_path,
        start=FromNow(),
    )
    present = replace(former, changefeed_id="sync", former_id="default", start=None)

    def epochs() -> dict[str, int]:
        return {path.name: len(list(path.glob("checkpoint-*"))) for path in state.iterdir()}

    def forget_safe_points() -> None:
        for name in ("default", "sync"):
            source.cluster.pd.update_service_safe_point(service_id(name), 0, 0)

    def safe_points() -> set[str]:
        found = {each.service for each in gc_status(source.cluster.pd_http).services}
        return found & {service_id("default"), service_id("sync")}

    forget_safe_points()
    sync(former, stopped, lambda _: None)
    watched: list[str] = []
    sync(present, stopped, lambda replicator: watched.append(replicator.changefeed_id))
    assert watched == ["default"]
    assert (list(epochs()), safe_points()) == (["default"], {service_id("default")})
    assert (state / "default" / "checkpoint-0000000002.json").exists()
    with pytest.raises(UsageError, match="no checkpoint"):
        sync(replace(present, span=KeyRange(b"b", b"")), stopped, lambda _: None)
    sync(replace(present, span=KeyRange(b"b", b""), start=FromNow()), stopped, lambda _: None)
    assert not [text for text in caplog.messages if "already has a safe point" in text]
    assert (set(epochs()), len(safe_points())) == ({"default", "sync"}, 2)
    with pytest.raises(SyncStateMismatch, match="cannot resume sync sync"):
        sync(present, stopped, lambda _: None)
    forget_safe_points()


@pytest.mark.parametrize("reached", [0, 1 << 62, (1 << 64) - 1])
def test_a_checkpoint_that_the_cluster_cannot_have_reached(clusters: Clusters, tmp_path: Path, reached: int) -> None:
    """Changes are not skipped for it, and no safe point of PD moves there."""
    source, stopped = clusters(V2), threading.Event()
    stopped.set()
    options = SyncOptions(
        source=source.config,
        target=BlackholeTarget(),
        changefeed_id="ahead",
        state=parse(str(tmp_path)),
        scratch=tmp_path,
        start=FromNow(),
    )
    sync(options, stopped, lambda _: None)
    [saved] = (tmp_path / "ahead").glob("checkpoint-*.json")
    forged = structs.replace(load(Checkpoint, saved.read_bytes(), saved.name), checkpoint_ts=reached)
    saved.write_bytes(dump(forged))
    before = gc_status(source.cluster.pd_http).services
    with pytest.raises(SyncStateDamaged, match="is not of this cluster: PD is at"):
        sync(options, stopped, lambda _: None)
    assert [(each.service, each.safe_point) for each in gc_status(source.cluster.pd_http).services] == [
        (each.service, each.safe_point) for each in before
    ]


def test_a_log_and_a_sync_have_safe_points_of_their_own_by_default(
    pair: tuple[LiveCluster, LiveCluster], tmp_path: Path
) -> None:
    """Both run on one cluster without a name, even with their states in one place."""
    source, target = pair
    state = ["--state-dir", str(tmp_path / "state"), "--start-ts", "now", "--hold-back", "0s"]
    log = [
        "log",
        "start",
        "--pd",
        source.pd,
        "-s",
        str(tmp_path / "log"),
        "--flush-interval",
        "1s",
        "--output",
        "json",
        *state,
    ]
    with syncing(*log) as archiving, syncing(*flags(source, f"tikv://{target.pd}", *state[1:])) as process:
        until = time.monotonic() + PATIENCE
        while len(list((tmp_path / "state").glob("*/checkpoint-*"))) < 2:
            assert (archiving.poll(), process.poll()) == (None, None), (archiving.communicate(), process.communicate())
            assert time.monotonic() < until
            time.sleep(0.2)
        source.raw().put(b"key", b"value")
        wait_until_equal(source, target, process)
        services = {each.service for each in gc_status(source.cluster.pd_http).services}
        assert {service_id("default"), service_id("sync")} <= services
        stop(process)
        stop(archiving)
    for name in ("default", "sync"):
        source.cluster.pd.update_service_safe_point(service_id(name), 0, 0)


def test_a_sink_without_the_backup_is_refused(pair: tuple[LiveCluster, LiveCluster], tmp_path: Path) -> None:
    """A sync after a backup does not copy it: the sink must have its rows, unless it is said to lack them, or resumed."""
    source, target = pair
    source.raw().batch_put({b"key%d" % number: b"value" for number in range(9)})
    source.raw().put(b"gone", b"value", ttl=1)
    place = tmp_path / "backup"
    succeed("backup", "raw", "--pd", source.pd, "-s", str(place), "--executor", "driver", "--safe-interval", "0s")
    stopped = threading.Event()
    stopped.set()

    def start(state: str, *, meant: bool = False) -> None:
        asked = SyncOptions(
            changefeed_id=f"unrestored-{state}",
            source=source.config,
            target=TikvTarget(target.config.pd),
            state=parse(f"local://{tmp_path}/{state}"),
            scratch=tmp_path,
            start=FromBackup(parse(f"local://{place}")),
            allow_incomplete=meant,
        )
        sync(asked, stopped, lambda _: None)
        source.cluster.pd.update_service_safe_point(service_id(asked.changefeed_id), 0, 0)

    with pytest.raises(ClusterUnfit, match="is empty"):
        start("a")
    target.raw().batch_put({b"other%d" % number: b"value" for number in range(9)})
    with pytest.raises(ClusterUnfit, match="has other rows"):
        start("a")
    start("a", meant=True)
    start("a")
    target.raw().batch_put({b"key%d" % number: b"changed since" for number in range(5)})
    start("b")


def test_a_name_that_another_sync_has_is_warned_of(
    clusters: Clusters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two syncs of one name share a safe point, wherever their states are: the second gets a warning, a resumed one does not."""
    source, stopped = clusters(V2), threading.Event()
    stopped.set()
    said = []
    for state in ("a", "a", "b"):
        asked = namesake(source, "warned", tmp_path / state)
        caplog.clear()
        sync(asked, stopped, lambda _: None)
        said.append([each for each in caplog.messages if "already has a safe point tikv-br-sync-warned" in each])
    assert [len(each) for each in said] == [0, 0, 1]
    source.cluster.pd.update_service_safe_point(service_id("warned"), 0, 0)


def test_two_syncs_of_one_name_do_not_run_at_once(
    clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With another state the second is refused while the first one runs; after its end it starts at once."""
    monkeypatch.setattr(handover, "RENEW_SECONDS", 1.0)
    source, stopped = clusters(V2), threading.Event()
    stopped.set()
    stop = threading.Event()
    unrefused = threading.Timer(PATIENCE, stop.set)
    unrefused.start()
    with running(namesake(source, "alone", tmp_path / "a")) as first:
        refused = pytest.raises(
            SyncRunning,
            match=rf"another sync with --id alone is running \(process .*\), with its state at local://{tmp_path}/a on ",
        )
        with refused:
            sync(namesake(source, "alone", tmp_path / "b"), stop, lambda _: None)
        with refused:
            handover.check_runs_alone(source.cluster, "alone", handover.CHANGEFEED_STATE, stop)
        assert first.is_alive()
    unrefused.cancel()
    caplog.clear()
    sync(namesake(source, "alone", tmp_path / "b"), stopped, lambda _: None)
    assert not [each for each in caplog.messages if "to see whether it runs" in each]


def test_a_killed_sync_does_not_keep_its_name(
    clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On its machine the next one starts at once; elsewhere it waits until the safe point was not renewed for long enough."""
    monkeypatch.setattr(handover, "RENEWAL_SEEN_SECONDS", 3.0)
    source, stopped = clusters(V2), threading.Event()
    stopped.set()
    asked = namesake(source, "killed", tmp_path / "a")
    sync(asked, stopped, lambda _: None)
    us = LeaseOwner.this_process()
    here, elsewhere = structs.replace(us, started=us.started - 1), structs.replace(us, machine="elsewhere")
    waited: list[list[str]] = []
    said: list[str] = []
    for owner, state in ((here, "a"), (here, "b"), (elsewhere, "a"), (elsewhere, "b")):
        killed = Follower(handover.state_name(asked.state), owner)
        source.cluster.ingests.register_follower(service_id("killed"), killed)
        caplog.clear()
        with running(namesake(source, "killed", tmp_path / state), said.append):
            assert said[-1] == ""
        waited.append([each for each in caplog.messages if "to see whether it runs" in each])
    assert list(map(len, waited)) == [0, 0, 1, 1]
    assert [each for each in said if each] == waited[2] + waited[3]
    source.cluster.pd.update_service_safe_point(service_id("killed"), 0, 0)


def namesake(source: LiveCluster, name: str, state: Path) -> SyncOptions:
    """A sync into nothing, from now. Each test uses its own name: safe points stay."""
    return SyncOptions(
        changefeed_id=name,
        source=source.config,
        target=BlackholeTarget(),
        state=parse(f"local://{state}"),
        scratch=state.parent,
        start=FromNow(),
    )


@contextlib.contextmanager
def running(asked: SyncOptions, wait: Callable[[str], object] = handover.unsaid) -> Iterator[threading.Thread]:
    """A sync in a thread, which has begun; it is stopped at the end."""
    begun, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=sync, args=(asked, stop, lambda _: begun.set(), wait))
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        yield thread
    finally:
        stop.set()
        thread.join(PATIENCE)
