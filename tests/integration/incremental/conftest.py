"""Playgrounds that the tests of a module share. Beyond it they would be idle, which costs each a hundredth of a core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.integration.kafka_server import KafkaBroker, kafka_broker
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.formats.api_version import ApiVersion

Clusters = Callable[[ApiVersion], LiveCluster]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """A cluster of two stores and six regions of each API version, started when it is first wanted."""
    with _started(tmp_path_factory, stores=2, regions=6, election_timeout=0.5) as get:
        yield get


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """Smaller ones, to be written to."""
    with _started(tmp_path_factory, stores=1, regions=2) as get:
        yield get


@pytest.fixture(scope="session")
def broker() -> Iterator[KafkaBroker]:
    """A Kafka broker at which everything is allowed; it uses a core for seconds to start."""
    with kafka_broker() as broker:
        yield broker


@contextlib.contextmanager
def _started(tmp_path_factory: pytest.TempPathFactory, **settings: object) -> Iterator[Clusters]:
    running: dict[ApiVersion, LiveCluster] = {}
    with contextlib.ExitStack() as stack:

        def get(version: ApiVersion) -> LiveCluster:
            if version not in running:
                folder = tmp_path_factory.mktemp(f"sync-{version.label}")
                running[version] = stack.enter_context(live_cluster(folder, version, **settings))
            return running[version]

        yield get
