"""Fixtures of several folders of unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.unit.cluster.fakes import FakeCluster


@pytest.fixture
def fake_cluster() -> Iterator[Callable[..., FakeCluster]]:
    """Make scripted clusters that end with the test."""
    made: list[FakeCluster] = []

    def make(stores: int = 1) -> FakeCluster:
        made.append(FakeCluster(stores))
        return made[-1]

    yield make
    for each in made:
        each.close()
