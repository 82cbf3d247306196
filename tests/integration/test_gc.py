"""Garbage collection against playgrounds, of a PD with service safe points and of one with GC barriers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from formats.api_version import ApiVersion
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.cluster.pd_http import gc_status
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.gc.status import FOREVER, GC_WORKER, GcReport, report

HOUR = 3600


@pytest.fixture(params=[False, True], ids=["safe points", "barriers"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveCluster]:
    """One store; PD is as 8.5, or as newer ones."""
    with live_cluster(tmp_path, ApiVersion.V2, stores=1, gc_barriers=request.param) as running:
        yield running


def now(live: LiveCluster) -> GcReport:
    """What PD reports."""
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
