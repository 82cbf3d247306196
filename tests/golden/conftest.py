"""Data of real servers, and a store that answers with them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cluster.fakes import FakeCluster


@pytest.fixture
def copied(golden: Path, tmp_path: Path) -> Path:
    """A copy of a backup that the Go tool made of a cluster of API V2, to damage."""
    target = tmp_path / "backup"
    shutil.copytree(golden / "backups" / "v2" / "data", target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    """A scripted PD and store."""
    made = FakeCluster()
    yield made
    made.close()


@pytest.fixture(params=["v1", "v2"])
def txn_recording(request: pytest.FixtureRequest, golden: Path) -> Path:
    """The recorded transactions of an API version."""
    return golden / "txn" / str(request.param)
