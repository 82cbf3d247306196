"""Garbage collection against playgrounds, of a PD with service safe points and of one with GC barriers."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.command import tikv_br
from tests.support.etcd import real_etcd
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import eventually
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_values import Put
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import GC_WORKER, gc_status
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.cluster.txnkv import has_transactions
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import encode
from tikv_br.gc.metrics import WorkerFigures
from tikv_br.gc.status import FOREVER, GcReport, report
from tikv_br.gc.worker import PREFIX, GcWorker, WorkerOptions
from tikv_br.playground.etcd import EtcdServer

HOUR = 3600
LIFE = 60.0
KILLS = 20


@pytest.fixture(params=[False, True], ids=["safe points", "barriers"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveCluster]:
    """One store; PD is as 8.5, or as newer ones."""
    with live_cluster(tmp_path, ApiVersion.V2, stores=1, gc_barriers=request.param) as running:
        yield running


def now(live: LiveCluster) -> GcReport:
    """State that PD reports."""
    return report(gc_status(live.cluster.pd_http), live.cluster.pd.tso())


@pytest.mark.core("gc")
def test_status_of_both_kinds_of_pd(live: LiveCluster) -> None:
    """Services, their ends and GC's own safe point, whether PD keeps safe points or barriers."""
    pd = live.cluster.pd
    tso = pd.tso()
    assert (now(live).lag, now(live).worker_lag, now(live).services) == (None, None, ())
    pd.update_service_safe_point("tikv-br-sync-a", HOUR, minus_seconds(tso, 300))
    pd.update_service_safe_point("pinned", FOREVER, minus_seconds(tso, 10))
    pd.update_service_safe_point(GC_WORKER, FOREVER, minus_seconds(tso, 600))
    found = now(live)
    assert [(each.service, each.safe_point) for each in found.services] == [
        ("tikv-br-sync-a", minus_seconds(tso, 300)),
        ("pinned", minus_seconds(tso, 10)),
    ]
    assert found.services[0].ttl == pytest.approx(HOUR, abs=120)
    assert found.services[1].ttl is None
    assert (found.worker_safe_point, found.safe_point, found.holder) == (minus_seconds(tso, 600), 0, None)


def test_barriers_that_only_grpc_lists(tmp_path: Path) -> None:
    """Global ones stop GC and are named; those of keyspaces are listed. A PD that cannot list them is reported, an older one is not."""
    with live_cluster(tmp_path / "9.0", ApiVersion.V2, stores=1, tikv_version="9.0", gc_barriers=True) as live:
        pd = live.cluster.pd
        tso = pd.tso()
        ask = pd.connection.unary
        for barrier, minutes in (("audit", 20), ("young", 5)):
            ts = minus_seconds(tso, 60 * minutes)
            request = pdpb_pb2.SetGlobalGCBarrierRequest(barrier_id=barrier, barrier_ts=ts, ttl_seconds=HOUR)
            ask(lambda leader: leader.pd.SetGlobalGCBarrier, request)
        own = pdpb_pb2.SetGCBarrierRequest(barrier_id="job", barrier_ts=tso, ttl_seconds=FOREVER)
        own.keyspace_scope.keyspace_id = 7
        ask(lambda leader: leader.pd.SetGCBarrier, own)
        pd.update_service_safe_point("br-1", HOUR, minus_seconds(tso, 600))
        assert pd.update_service_safe_point(GC_WORKER, FOREVER, tso) == minus_seconds(tso, 1200)
        pd.update_gc_safe_point(minus_seconds(tso, 1200))
        reported = tikv_br("gc", "status", "--pd", live.pd, "--warn", "1m", "--output", "json").lines
        assert [(line["service"], line["service_kind"], line["service_name"]) for line in reported[1:]] == [
            ("audit", "global_barrier", "audit"),
            ("br-1", "br", "1"),
            ("young", "global_barrier", "young"),
            ("job", "keyspace_barrier", "7"),
        ]
        assert (reported[0]["holder"], [line["holds_gc"] for line in reported[1:]]) == (
            "audit",
            [True, False, False, False],
        )
        assert "; audit holds GC back" in reported[0]["seen"]
        assert "let the program that has set it remove it" in reported[0]["advice"]
        with live.failing("GetAllKeyspacesGCStates", {"abort": {"code": "UNIMPLEMENTED", "details": "unknown method"}}):
            reported = tikv_br("gc", "status", "--pd", live.pd, "--output", "json").lines
        assert [line["service"] for line in reported[1:]] == ["br-1"]
        assert re.search(
            "global and keyspace-level GC barriers cannot be listed: PD .*: UNIMPLEMENTED: unknown method",
            reported[0]["seen"],
        )
    with live_cluster(tmp_path / "8.5", ApiVersion.V2, stores=1, tikv_version="8.5") as live:
        reported = tikv_br("gc", "status", "--pd", live.pd, "--output", "json").lines
        assert reported[0]["seen"] == "GC has never run"


def write(live: LiveCluster, key: bytes, operation: kv.Op.ValueType, *, commit: bool) -> None:
    """The two requests of a transaction of one key; the second one only with `commit`."""
    start, bound = live.cluster.pd.tso(), encode(key)

    def prewrite(region: Region, store: StoreClient) -> kv.PrewriteResponse:
        context = region.context(ApiVersion.V2, live.cluster.cluster_id)
        mutations = [kv.Mutation(op=operation, key=key, value=b"" if operation == kv.Del else b"v")]
        request = kv.PrewriteRequest(
            context=context, mutations=mutations, primary_lock=key, start_version=start, lock_ttl=3000
        )
        return store.call(store.kv.KvPrewrite, request)

    def end(region: Region, store: StoreClient) -> kv.CommitResponse:
        context = region.context(ApiVersion.V2, live.cluster.cluster_id)
        request = kv.CommitRequest(
            context=context, start_version=start, keys=[key], commit_version=live.cluster.pd.tso()
        )
        return store.call(store.kv.KvCommit, request)

    assert live.cluster.router.call(bound, prewrite, "KvPrewrite") == kv.PrewriteResponse()
    if commit:
        answer = live.cluster.router.call(bound, end, "KvCommit")
        assert not answer.HasField("error")


@pytest.mark.parametrize(
    ("operation", "commit"), [(kv.Put, True), (kv.Put, False), (kv.Lock, False)], ids=["row", "lock", "lock of no row"]
)
def test_transactional_data_is_found(tmp_path: Path, operation: kv.Op.ValueType, *, commit: bool) -> None:
    """A row, a lock, and a lock that no read meets, in the last of several regions and beside raw rows; nothing else counts."""
    with live_cluster(tmp_path, ApiVersion.V2, stores=1) as live:
        live.raw().put(b"x", b"raw")
        live.split(encode(b"x\0\0\0"), encode(b"x\0\0\5"), encode(b"x\0\1\0"), encode(b"y"))
        assert not has_transactions(live.cluster)
        write(live, b"x\0\1\2key", operation, commit=commit)
        assert has_transactions(live.cluster)
        if commit:
            write(live, b"x\0\1\2key", kv.Del, commit=True)
            assert not has_transactions(live.cluster)
        live.assert_innocent()


def test_gc_run_refuses_transactional_data(tmp_path: Path, server: EtcdServer) -> None:
    """Exit code 5 with what to use instead, and both safe points stay where they are, while another transaction holds one lock."""
    with live_cluster(tmp_path, ApiVersion.V2, stores=1) as live:
        write(live, b"x\0\0\0key", kv.Put, commit=False)
        refused = tikv_br("gc", "run", "--pd", live.pd, "--etcd", server.address, "--life-time", "1s")
        assert refused.code == 5
        assert "transactional data" in refused.err
        assert "--resolve-locks" in refused.err
        assert (now(live).safe_point, now(live).worker_safe_point) == (0, 0)


@pytest.mark.parametrize("flags", [(), ("--resolve-locks",)])
def test_gc_run_refuses_a_cluster_of_tidb(tmp_path: Path, server: EtcdServer, flags: tuple[str, ...]) -> None:
    """Exit code 5, also if TiDB's data are of API V1, where no look for mode x finds them."""
    with live_cluster(tmp_path, ApiVersion.V2, stores=1) as live:
        run = ("gc", "run", "--pd", live.pd, "--etcd", server.address, "--life-time", "1s", *flags)
        live.cluster.pd_etcd.transact([], [Put("/tidb/server/info/5c4a", b"{}")])
        refused = tikv_br(*run)
        assert (refused.code, "TiDB uses the cluster" in refused.err) == (5, True)
        assert (now(live).safe_point, now(live).worker_safe_point) == (0, 0)


def test_gc_run_refuses_beside_another_gc(tmp_path: Path, server: EtcdServer) -> None:
    """Exit code 5 with --resolve-locks, if the safe point was moved as JuiceFS does it, without a service safe point."""
    with live_cluster(tmp_path, ApiVersion.V2, stores=1) as live:
        moved = minus_seconds(live.cluster.pd.tso(), HOUR)
        live.cluster.pd.update_gc_safe_point(moved)
        run = ("gc", "run", "--pd", live.pd, "--etcd", server.address, "--life-time", "1s", "--resolve-locks")
        refused = tikv_br(*run)
        assert (refused.code, f"another program does GC: it moved the GC safe point to {moved}" in refused.err) == (
            5,
            True,
        )
        assert (now(live).safe_point, now(live).worker_safe_point) == (moved, 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A running etcd."""
    with real_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def work(pd: str, etcd: str, log: str, life_time: float = LIFE) -> int:
    """A candidate until it is killed or stopped; appends a line to `log` for each round, when it has happened."""
    options = WorkerOptions(life_time, interval=0.05, lease=2)
    name = str(os.getpid())

    def show(found: GcReport | None, figures: WorkerFigures) -> None:
        if found is not None:
            line = f"{name} {found.safe_point} {figures.revision}\n"
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, line.encode())
            os.close(descriptor)

    with PdClient(options.hurry(ClusterConfig(pd=tuple(pd.split(","))))) as client, Etcd.connect([etcd]) as connected:
        GcWorker(connected, client, options, show).run(threading.Event())
    return 0


def rounds(log: Path) -> list[tuple[str, int, int]]:
    """Process, GC safe point, and revision of etcd at which that process joined, of each round in order."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(words[0], int(words[1]), int(words[2])) for words in map(str.split, lines)]


def goes_on(log: Path) -> None:
    """Wait for two more rounds."""
    seen = len(rounds(log))
    eventually(lambda: len(rounds(log)) > seen + 1)


def leads(log: Path, name: str) -> bool:
    """Whether that process did the last round."""
    return rounds(log)[-1][0] == name


def is_at(live: LiveCluster, safe_point: int) -> bool:
    """Whether GC has come that far."""
    return live.cluster.pd.gc_safe_point() == safe_point


def strikes(live: LiveCluster, failpoint: int) -> bool:
    """Whether a failpoint has struck twice."""
    return live.hits(failpoint) > 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_leaders(tmp_path: Path, server: EtcdServer) -> None:
    """Twenty times the leader of two candidates is killed: the other one goes on, GC never passes a service, and never steps back.

    A safe point that moves is there all the time, registered before and while leaders die.
    """
    log = tmp_path / "rounds"
    modules = ("tikv_br.gc.worker", "tikv_br.cluster.cluster", __name__)
    with (
        live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1) as live,
        Forks(*modules) as one,
        Forks(*modules) as two,
    ):
        pd, task = live.cluster.pd, partial(work, live.pd, server.address, str(log))
        safe_point = minus_seconds(pd.tso(), LIFE + 60)
        pd.update_service_safe_point("held", HOUR, safe_point)  # before GC may pass it
        forks = {str(each.start(task)): each for each in (one, two)}
        last, killed = 0, 0
        while killed < KILLS:
            goes_on(log)
            leader = rounds(log)[-1][0]
            assert leader in forks
            os.kill(int(leader), signal.SIGKILL)
            killed += 1
            fork = forks.pop(leader)
            assert fork.wait() == -signal.SIGKILL
            (waiting,) = forks
            eventually(partial(leads, log, waiting))
            reached = pd.gc_safe_point()
            assert last <= reached <= safe_point
            last = reached
            forks[str(fork.start(task))] = fork
            safe_point += 1000 << 18
            assert pd.update_service_safe_point("held", HOUR, safe_point) <= safe_point
            eventually(partial(is_at, live, safe_point))
        found = rounds(log)
        assert [ts for _, ts, _ in found] == sorted(ts for _, ts, _ in found)
        # A leader that had been followed by a later one did no round again.
        revisions = [revision for _, _, revision in found]
        assert revisions == sorted(revisions)
        assert len(set(revisions)) > KILLS


@pytest.mark.slow
def test_one_that_was_suspended_does_no_harm(tmp_path: Path, server: EtcdServer) -> None:
    """A leader that was stopped while another one took over does no round when it wakes up, and takes part again."""
    log = tmp_path / "rounds"
    modules = ("tikv_br.gc.worker", "tikv_br.cluster.cluster", __name__)
    with (
        live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1) as live,
        Forks(*modules) as one,
        Forks(*modules) as two,
        Etcd.connect([server.address]) as etcd,
    ):
        task = partial(work, live.pd, server.address, str(log))
        first = one.start(task)
        eventually(lambda: rounds(log))
        second = two.start(task)
        os.kill(first, signal.SIGSTOP)
        eventually(lambda: rounds(log)[-1][0] == str(second))
        seen = len(rounds(log))
        os.kill(first, signal.SIGCONT)
        eventually(lambda: len(etcd.range(PREFIX).items) == 2)
        eventually(lambda: len(rounds(log)) > seen + 10)
        revisions = [revision for _, _, revision in rounds(log)]
        assert revisions == sorted(revisions)


@pytest.mark.slow
def test_pd_leaders_that_change(tmp_path: Path, server: EtcdServer) -> None:
    """Rounds go on with each new leader of PD, there and back; nothing is passed, and nothing steps back."""
    log = tmp_path / "rounds"
    with (
        live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1, pd_members=2) as live,
        Forks("tikv_br.gc.worker", "tikv_br.cluster.cluster", __name__) as fork,
    ):
        pd = live.cluster.pd
        held = minus_seconds(pd.tso(), LIFE / 2)
        pd.update_service_safe_point("held", HOUR, held)
        fork.start(partial(work, live.pd, server.address, str(log), life_time=1.0))
        goes_on(log)
        led = set()
        for _change in range(2):
            led.add(pd.connection.leader.address)
            live.move_pd_leader(seconds=1)
            goes_on(log)
            assert pd.gc_safe_point() == held
        assert len(led) == 2
        pd.update_service_safe_point("held", 0, 0)
        eventually(lambda: pd.gc_safe_point() > held)
        assert [ts for _, ts, _ in rounds(log)] == sorted(ts for _, ts, _ in rounds(log))


@pytest.mark.slow
def test_pd_and_etcd_that_go_away(tmp_path: Path) -> None:
    """A PD that refuses, has no leader or does not answer, and an etcd that restarts, stop GC for as long, and no longer."""
    with (
        live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1) as live,
        real_etcd(tmp_path / "etcd") as server,
        Forks("tikv_br.gc.worker", "tikv_br.cluster.cluster", __name__) as fork,
    ):
        log = tmp_path / "rounds"
        fork.start(partial(work, live.pd, server.address, str(log)))
        goes_on(log)
        for rpc in ("Tso", "UpdateServiceGCSafePoint", "UpdateGCSafePoint"):
            for action in ({"abort": {"code": "UNAVAILABLE", "details": "not leader"}}, {"delay": {"seconds": 3}}):
                with live.failing(rpc, action, count=-1, store_id=0) as failpoint:
                    eventually(partial(strikes, live, failpoint))
                goes_on(log)
        server.stop()
        before = live.cluster.pd.gc_safe_point()
        server.start()
        goes_on(log)
        assert live.cluster.pd.gc_safe_point() > before
