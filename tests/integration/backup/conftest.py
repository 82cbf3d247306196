"""Playgrounds that the tests of a module share, and backups of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from formats.api_version import ApiVersion
from tests.live_cluster import LiveCluster, live_cluster
from tikv_br.backup.options import BackupOptions
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
    running: dict[ApiVersion, Any] = {}

    def get(version: ApiVersion) -> LiveCluster:
        if version not in running:
            block = live_cluster(tmp_path_factory.mktemp(version.label), version, stores=stores)
            running[version] = (block, block.__enter__())
        live: LiveCluster = running[version][1]
        return live

    yield get
    for block, _ in running.values():
        block.__exit__(None, None, None)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Return a function that makes the options of a backup into a fresh folder, on the driver unless told otherwise."""
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
