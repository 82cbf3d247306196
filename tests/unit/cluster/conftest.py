"""Scripted servers for the client's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.cluster.fakes import FakeCluster


@pytest.fixture
def fake(fake_cluster: Callable[..., FakeCluster]) -> FakeCluster:
    """One scripted PD with one store that leads one region."""
    return fake_cluster()
