"""Sources that are servers: a playground's PD, a status page, a directory, and some that are not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.live_cluster import live_cluster
from tests.support.waiting import eventually
from tests.unit.drill.samples import failed
from tests.unit.incremental.statuses import WHOLE, status
from tests.unit.serve.samples import entry
from tikv_br.archive.log import LogSource
from tikv_br.backupset.index import Index
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.drill.history import past_drill_of
from tikv_br.drill.report import write_json
from tikv_br.formats.api_version import ApiVersion
from tikv_br.incremental.watch.server import serve
from tikv_br.incremental.watch.status import NamedStatus
from tikv_br.serve.findings import OverviewLimits
from tikv_br.serve.sources import ArchiveSource, BackupsSource, DrillSource, GcSource, StatusSource
from tikv_br.serve.watcher import Sources, Watcher
from tikv_br.storage.crypter import SecretText
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.web.address import Address

KEY = SecretText("a-key-of-the-test")
HOUR = 3600


@pytest.mark.core("serve")
def test_all_kinds_of_sources(tmp_path: Path) -> None:
    """Each section shows its servers' state; unreachable ones are marked, and changes appear."""
    root = parse(str(tmp_path / "backups"))
    Index(open_store(root)).add(entry("monday", 1.0))
    report = replace(failed(), trend=(past_drill_of(failed().to_json()),))
    write_json(open_store(parse(str(tmp_path / "drills"))), report)
    found = [NamedStatus("east", status(feed=WHOLE))]
    with (
        live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1) as live,
        serve(Address("127.0.0.1", 0), lambda: found, key=KEY) as address,
    ):
        with PdClient(live.config) as pd:
            now = pd.tso()
            pd.update_service_safe_point("tikv-br-sync-east", 24 * HOUR, minus_seconds(now, 30 * HOUR))
            pd.update_service_safe_point("gc_worker", (1 << 63) - 1, minus_seconds(now, 600))
        sources = Sources(
            backups=(BackupsSource(root, windows=True),),
            logs=(ArchiveSource(LogSource(root, "default")),),
            syncs=(StatusSource(f"http://{address}", KEY), StatusSource("http://127.0.0.1:1", KEY)),
            drills=(DrillSource(parse(str(tmp_path / "drills"))),),
            gc=(GcSource(live.config), GcSource(ClusterConfig(pd=("127.0.0.1:1",)))),
        )
        with Watcher(sources, 0.2, OverviewLimits()) as watcher:
            first = watcher.overview(120.0)
            assert [each.path for each in first.backups] == ["monday"]
            assert "there is no log default" in first.archives[0].source.error
            assert [(each.name, each.checkpoint_lag) for each in first.status_pages[0].syncs] == [("east", 3.0)]
            assert "refused" in first.status_pages[1].source.error
            assert [each.id for each in first.drills[0].drills] == [failed().id]
            assert (first.gc[0].holder, first.gc[0].services[0].owner) == (
                "tikv-br-sync-east",
                "sync, changefeed or log east",
            )
            assert first.gc[1].source.error
            assert {each.section for each in first.findings} == {"backups", "logs", "syncs", "drills", "gc"}
            Index(open_store(root)).add(entry("tuesday", 0.5))
            found[0] = NamedStatus("east", None, error="the safe point is lost")
            eventually(lambda: [each.path for each in watcher.overview().backups] == ["tuesday", "monday"], 60)
            eventually(lambda: watcher.overview().status_pages[0].syncs[0].trouble == "the safe point is lost", 60)
