"""Data of real servers, to be changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copied(golden: Path, tmp_path: Path) -> Path:
    """A copy of a backup that the Go tool made of a cluster of API V2, to damage."""
    target = tmp_path / "backup"
    shutil.copytree(golden / "backups" / "v2" / "data", target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target
