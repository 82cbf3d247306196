"""``tikv-br gc`` as a user and as Nagios run it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.e2e.conftest import Playgrounds
from tests.support.etcd import real_etcd
from tests.support.playground_admin import PlaygroundAdmin
from tests.support.waiting import eventually
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.safepoint import SafePointKeeper
from tikv_br.cluster.timestamps import minus_seconds

FOREVER = (1 << 63) - 1
HOUR = 3600
SECONDS_TO_STOP = 10


@pytest.mark.core("gc")
def test_status(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """The console, JSON, Nagios and Prometheus show the service that limits GC, with PD's list."""
    address, file = playgrounds["v1ttl"], tmp_path / "gc.prom"
    with PdClient(ClusterConfig(pd=(address,))) as pd:
        now = pd.tso()
        for service, hours in (("tikv-br-sync-east", 30), ("tikvcdc", 1)):
            pd.update_service_safe_point(service, 24 * HOUR, minus_seconds(now, hours * HOUR))
        never = succeed("gc", "status", "--pd", address)
        assert "ok: GC has never run, and need not" in never.out
        assert "gc run" not in never.out
        assert pd.update_service_safe_point("gc_worker", FOREVER, minus_seconds(now, 600)) < now
    reported = succeed("gc", "status", "--pd", address, "--output", "json").lines
    listed = PlaygroundAdmin(address).get("/pd/api/v1/gc/safepoint")["service_gc_safe_points"]
    assert {line["service"]: line["safe_point"] for line in reported[1:]} == {
        each["service_id"]: each["safe_point"] for each in listed if each["service_id"] != "gc_worker"
    }
    assert [(line["service_kind"], line["service_name"], line["holds_gc"]) for line in reported[1:]] == [
        ("sync", "east", True),
        ("cdc", "", False),
    ]
    assert reported[0]["holder"] == "tikv-br-sync-east"
    assert reported[0]["held_seconds"] == pytest.approx(30 * HOUR - 600, abs=1)
    text = succeed("gc", "status", "--pd", address, "--metrics-file", str(file)).out.splitlines()
    assert text[-2].startswith("tikv-br-sync-east  sync, changefeed or log east")
    assert text[-2].endswith("yes")
    assert 'tikv_br_gc_service_holds_back{kind="sync",service="tikv-br-sync-east"} 1.0' in file.read_text()
    plugin = tikv_br("gc", "status", "--pd", address, "--nagios")
    assert (plugin.code, plugin.out.count("\n"), plugin.err) == (0, 1, "")
    assert plugin.out.startswith("TIKV-BR OK - 1 ok")
    with PdClient(ClusterConfig(pd=(address,))) as pd:
        pd.update_gc_safe_point(minus_seconds(now, 30 * HOUR))
    for limits, code, word in (
        (("--warn", "31h"), 0, "OK"),
        ((), 1, "WARNING"),
        (("--warn", "1h", "--critical", "29h"), 2, "CRITICAL"),
    ):
        plugin = tikv_br("gc", "status", "--pd", address, "--nagios", *limits)
        assert (plugin.code, plugin.err) == (code, "")
        assert re.match(rf"TIKV-BR {word} - .*\| 'services'=2 'held_back'=\d+s 'gc_age'=1080\d\ds;", plugin.out)


def test_nagios_where_pd_does_not_answer() -> None:
    """Three, and one line; without the flag the usual code."""
    dead = tikv_br("gc", "status", "--nagios", "--pd", "127.0.0.1:1")
    assert (dead.code, dead.err) == (3, "")
    assert dead.out.startswith("TIKV-BR UNKNOWN - ")


def test_run_until_stopped(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """Rounds are JSON lines and in the metrics file; GC advances in PD; SIGTERM ends it with its code, and leaves the election."""
    address, file = playgrounds["v2"], tmp_path / "gc.prom"
    with real_etcd(tmp_path / "etcd") as server, Etcd.connect([server.address]) as etcd:
        command = ["gc", "run", "--pd", address, "--etcd", server.address, "--life-time", "1s", "--interval", "1s"]
        options = ["--output", "json", "--metrics-file", str(file)]
        with subprocess.Popen(
            [str(PROGRAM), *command, *options], stdout=subprocess.PIPE, text=True, env=environment(), cwd="/"
        ) as process:
            assert process.stdout is not None
            reported = [json.loads(process.stdout.readline()) for _ in range(2)]
            with PdClient(ClusterConfig(pd=(address,))) as pd:
                assert reported[0]["safe_point"] < reported[1]["safe_point"] <= pd.gc_safe_point() < pd.tso()
            assert re.search(r"^tikv_br_gc_leader 1.0$", file.read_text(), re.MULTILINE)
            assert len(etcd.range("/gc-worker/election/").items) == 1
            process.terminate()
            rest = process.stdout.read().splitlines()
            assert process.wait(60) == 143
        assert json.loads(rest[-1])["name"] == "Terminated"
        assert {line["message_type"] for line in reported} == {"gc"}
        assert not etcd.range("/gc-worker/election/").items
        assert re.search(r"^tikv_br_gc_leader 0.0$", file.read_text(), re.MULTILINE)


STORE_IS_AWAY: dict[str, dict[str, Any]] = {
    "refuses": {"abort": {"code": "UNAVAILABLE", "details": "gone"}},
    "hangs": {"delay": {"seconds": 30.0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("store", STORE_IS_AWAY)
def test_run_is_stopped_while_a_store_is_away(playgrounds: Playgrounds, tmp_path: Path, store: str) -> None:
    """SIGTERM ends the retries of a request for locks, and one that is not answered; GC has not advanced."""
    address = playgrounds["v2"]
    admin = PlaygroundAdmin(address)
    with (
        real_etcd(tmp_path / "etcd") as server,
        Etcd.connect([server.address]) as etcd,
        PdClient(ClusterConfig(pd=(address,))) as pd,
        admin.failing("KvScanLock", STORE_IS_AWAY[store], count=-1) as failpoint,
    ):
        before = pd.gc_safe_point()
        command = ["gc", "run", "--resolve-locks", "--pd", address, "--etcd", server.address, "--life-time", "1s"]
        with subprocess.Popen([str(PROGRAM), *command], env=environment(), cwd="/") as process:
            eventually(lambda: admin.hits(failpoint))
            process.terminate()
            assert process.wait(SECONDS_TO_STOP) == 143
        assert not etcd.range("/gc-worker/election/").items
        assert pd.gc_safe_point() == before


@pytest.mark.slow
def test_run_serves_its_status(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """The leader and the worker that waits serve status, metrics and health, behind a key; without etcd they are degraded."""
    address, key = playgrounds["v2"], tmp_path / "key"
    key.write_text("0123456789abcdef")
    with real_etcd(tmp_path / "etcd") as server, contextlib.ExitStack() as stack:
        command = ["gc", "run", "--pd", address, "--etcd", server.address, "--life-time", "1s"]
        options = ["--status-addr", "0", "--status-key-file", str(key), "--output", "json"]
        urls, names = [], []
        for _worker in range(2):
            process = stack.enter_context(
                subprocess.Popen(
                    [str(PROGRAM), *command, *options], stdout=subprocess.PIPE, text=True, env=environment(), cwd="/"
                )
            )
            stack.callback(process.terminate)
            assert process.stdout is not None
            reported = json.loads(process.stdout.readline())
            assert (reported["message_type"], reported["key_file"]) == ("listening", str(key))
            urls.append(reported["url"])
            eventually(partial(is_well, reported["url"]))
            names.append(status_of(urls[-1])["name"])
        assert get(f"{urls[0]}status")[0] == get(f"{urls[0]}metrics")[0] == 401
        leader, waiting = map(status_of, urls)
        assert (leader["leads"], leader["healthy"], waiting["leads"], waiting["waits_for"]) == (
            True,
            True,
            False,
            names[0],
        )
        with PdClient(ClusterConfig(pd=(address,))) as pd:
            assert leader["gc"]["safe_point"] == pd.gc_safe_point()
        assert (waiting["gc"], waiting["services"]) == (None, [])
        assert re.search(r"^tikv_br_gc_leader 1.0$", get(f"{urls[0]}metrics", key.read_text())[1], re.MULTILINE)
        assert re.search(r"^tikv_br_gc_leader 0.0$", get(f"{urls[1]}metrics", key.read_text())[1], re.MULTILINE)
        server.stop()
        for url in urls:
            eventually(partial(is_out, url, key.read_text()))
        server.start()
        for url in urls:
            eventually(partial(is_well, url))


def get(url: str, key: str = "") -> tuple[int, str]:
    """Code and body."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def is_well(url: str) -> bool:
    """Whether the worker is healthy."""
    return get(f"{url}healthz") == (200, "ok\n")


def is_out(url: str, key: str) -> bool:
    """Return whether the worker reports that it is in no election."""
    return get(f"{url}healthz", key)[1].startswith("degraded\nnot in the election")


def status_of(url: str) -> dict[str, Any]:
    """Result of /status, with the key of the test."""
    reported: dict[str, Any] = json.loads(get(f"{url}status", "0123456789abcdef")[1])
    return reported


def test_an_address_that_cannot_be_used(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """It is refused before the worker takes part in the election."""
    with real_etcd(tmp_path / "etcd") as server, Etcd.connect([server.address]) as etcd:
        busy = server.address.rpartition(":")[2]
        refused = tikv_br("gc", "run", "--pd", playgrounds["v2"], "--etcd", server.address, "--status-addr", busy)
        assert (refused.code, "cannot listen on --status-addr" in refused.err) == (2, True)
        assert not etcd.range("/gc-worker/election/").items


def test_run_refuses_clusters_without_versions(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """Clusters of API V1 without --resolve-locks, and of V1TTL, which has no transactions: exit code 5, and PD's safe points stay."""
    with real_etcd(tmp_path / "etcd") as server:
        for version, flags in (("v1", []), ("v1ttl", ["--resolve-locks"])):
            before = PlaygroundAdmin(playgrounds[version]).get("/pd/api/v1/gc/safepoint")["gc_safe_point"]
            refused = tikv_br("gc", "run", "--pd", playgrounds[version], "--etcd", server.address, *flags)
            assert (refused.code, f"API {version}" in refused.err) == (5, True)
            assert ("pass --resolve-locks" in refused.err) == (version == "v1")
            assert PlaygroundAdmin(playgrounds[version]).get("/pd/api/v1/gc/safepoint")["gc_safe_point"] == before


def test_a_metrics_file_that_cannot_be_written(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """It is refused before anything is done."""
    with real_etcd(tmp_path / "etcd") as server:
        common = ("--pd", playgrounds["v2"], "--metrics-file", str(tmp_path / "none" / "gc.prom"))
        refused = tikv_br("gc", "run", "--etcd", server.address, *common)
    assert (refused.code, tikv_br("gc", "status", *common).code) == (2, 2)
    assert "--metrics-file" in refused.err


def test_release(playgrounds: Playgrounds) -> None:
    """Without --yes nothing happens where nobody can be asked; with it a forgotten safe point goes, one of a living run stays."""
    address = playgrounds["v2"]
    place = ("--pd", address, "--output", "json")

    def listed() -> set[str]:
        return {each["service"] for each in succeed("gc", "status", *place).lines[1:]}

    with PdClient(ClusterConfig(pd=(address,))) as pd:
        safe_point = pd.tso()
        pd.update_service_safe_point("tikv-br-sync-old", 24 * HOUR, safe_point)
        refused = tikv_br("gc", "release", "tikv-br-sync-old", *place)
        assert (refused.code, "tikv-br-sync-old" in listed()) == (2, True)
        with SafePointKeeper(pd, "tikv-br-sync-live", safe_point, 24 * HOUR, renew_every=0.3):
            in_use = tikv_br("gc", "release", "tikv-br-sync-live", "--yes", "--watch", "60s", *place)
            assert (in_use.code, in_use.last["name"]) == (14, "SafePointInUse")
            assert "tikv-br-sync-live" in listed()
            done = succeed("gc", "release", "tikv-br-sync-old", "--yes", "--watch", "2s", *place).last
        assert (done["service"], done["safe_point"]) == ("tikv-br-sync-old", safe_point)
        assert not {"tikv-br-sync-old", "tikv-br-sync-live"} & listed()
    assert tikv_br("gc", "release", "tikv-br-sync-old", "--yes", *place).code == 2
    assert tikv_br("gc", "release", "gc_worker", "--yes", *place).code == 2
