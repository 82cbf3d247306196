"""``tikv-br gc`` as a user and as Nagios run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import succeed, tikv_br
from tests.e2e.conftest import Playgrounds
from tests.support.playground_admin import PlaygroundAdmin
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.timestamps import minus_seconds

FOREVER = (1 << 63) - 1
HOUR = 3600


@pytest.mark.core("gc")
def test_status(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """Who holds GC back is told to people, to scripts, to Nagios and to Prometheus, with what PD lists."""
    address, file = playgrounds["v2"], tmp_path / "gc.prom"
    with PdClient(ClusterConfig(pd=(address,))) as pd:
        now = pd.tso()
        for service, hours in (("tikv-br-sync-east", 30), ("tikvcdc", 1)):
            pd.update_service_safe_point(service, 24 * HOUR, minus_seconds(now, hours * HOUR))
        never = succeed("gc", "status", "--pd", address)
        assert "warn: GC has never run" in never.out
        assert pd.update_service_safe_point("gc_worker", FOREVER, minus_seconds(now, 600)) < now
    told = succeed("gc", "status", "--pd", address, "--output", "json").lines
    listed = PlaygroundAdmin(address).get("/pd/api/v1/gc/safepoint")["service_gc_safe_points"]
    assert {line["service"]: line["safe_point"] for line in told[1:]} == {
        each["service_id"]: each["safe_point"] for each in listed if each["service_id"] != "gc_worker"
    }
    assert [(line["service_kind"], line["service_name"], line["holds_gc"]) for line in told[1:]] == [
        ("sync", "east", True),
        ("cdc", "", False),
    ]
    assert told[0]["holder"] == "tikv-br-sync-east"
    assert told[0]["held_seconds"] == pytest.approx(30 * HOUR - 600, abs=1)
    text = succeed("gc", "status", "--pd", address, "--metrics-file", str(file)).out.splitlines()
    assert text[-2].startswith("tikv-br-sync-east  sync, changefeed or log east")
    assert text[-2].endswith("yes")
    assert 'tikv_br_gc_service_holds_back{kind="sync",service="tikv-br-sync-east"} 1.0' in file.read_text()
    plugin = tikv_br("gc", "status", "--pd", address, "--nagios")
    assert (plugin.code, plugin.out.count("\n"), plugin.err) == (1, 1, "")
    assert plugin.out.startswith("TIKV-BR WARNING - gc: GC has never run")


def test_nagios_where_pd_does_not_answer() -> None:
    """Three, and one line; without the flag the usual code."""
    dead = tikv_br("gc", "status", "--nagios", "--pd", "127.0.0.1:1")
    assert (dead.code, dead.err) == (3, "")
    assert dead.out.startswith("TIKV-BR UNKNOWN - ")
