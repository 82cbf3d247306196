"""A cluster whose backup takes a few tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.backup.conftest import Clusters
from tests.integration.backup.resume.unfinished import V2, fill
from tests.support.live_cluster import LiveCluster


@pytest.fixture(scope="module")
def v2(clusters: Clusters) -> LiveCluster:
    """Return a V2 cluster with a few tasks' worth of regions."""
    live = clusters(V2)
    fill(live)
    return live


@pytest.fixture(autouse=True)
def healed(v2: LiveCluster) -> Iterator[None]:
    """Leave no failpoint and no safe point behind."""
    yield
    v2.heal()
    for name in v2.safe_points():
        v2.cluster.pd.update_service_safe_point(name, 0, 0)
