"""Playgrounds that the tests of a module share, and backups of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.backup.data import hard_rows
from tests.integration.backup.loaded import Loaded, Sources, fill
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.url import StorageLocation

Options = Callable[..., BackupOptions]
Clusters = Callable[[ApiVersion], LiveCluster]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """Return a function from an API version to a playground of three stores, started when first asked for."""
    yield from _clusters(tmp_path_factory, stores=3)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """Return a function from an API version to an empty playground to restore into."""
    yield from _clusters(tmp_path_factory, stores=1)


def _clusters(tmp_path_factory: pytest.TempPathFactory, stores: int) -> Iterator[Clusters]:
    running: dict[ApiVersion, LiveCluster] = {}
    with contextlib.ExitStack() as stack:

        def get(version: ApiVersion) -> LiveCluster:
            if version not in running:
                block = live_cluster(tmp_path_factory.mktemp(version.label), version, stores=stores)
                running[version] = stack.enter_context(block)
            return running[version]

        yield get


@pytest.fixture(scope="module")
def rows() -> dict[bytes, bytes]:
    """Return the rows without TTL of every cluster of `sources`."""
    return hard_rows(count=1000)


@pytest.fixture(scope="module")
def sources(clusters: Clusters, rows: dict[bytes, bytes]) -> Sources:
    """Return a function to a cluster with rows, split into regions; with TTLs, gone and replaced rows where it has them."""

    @functools.cache
    def get(version: ApiVersion) -> Loaded:
        return fill(clusters(version), version, rows)

    return get


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Return a function that makes the options of a backup into a fresh folder, by default on the driver."""
    numbers = itertools.count()

    def make(live: LiveCluster, **changes: object) -> BackupOptions:
        place = StorageLocation("local", str(tmp_path / f"backup-{next(numbers)}"))
        usual = {
            "cluster": live.config,
            "storage": place,
            "engine": "scan",
            "executor": "driver",
            "concurrency": 2,
            "file_bytes": 64 << 10,
        }
        settings: dict[str, Any] = {**usual, **changes}
        return BackupOptions(**settings)

    return make
