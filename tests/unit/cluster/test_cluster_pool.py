"""Connections that an operation shares."""

from __future__ import annotations

import pytest

from tests.unit.cluster.fakes import FakeCluster
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.errors import ClusterUnreachable


def test_a_pool_connects_once_per_cluster_until_it_is_closed(fake: FakeCluster) -> None:
    """Equal configs share a connection, others do not; after the close a new one is made."""
    with ClusterPool() as clusters:
        first = clusters.get(fake.config())
        assert clusters.get(fake.config()) is first
        assert clusters.get(fake.config(request_timeout=29.0)) is not first
    with pytest.raises(ClusterUnreachable, match="the connection was closed"):
        first.pd.stores()
    with clusters:
        assert clusters.get(fake.config()) is not first


def test_a_cluster_that_does_not_answer_is_asked_again_by_the_next_caller(fake: FakeCluster) -> None:
    """A failed connection is not kept."""
    with ClusterPool() as clusters:
        fake.pd.close()
        for _ in range(2):
            with pytest.raises(ClusterUnreachable):
                clusters.get(fake.config(connect_timeout=0.5))
