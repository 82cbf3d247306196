"""Fixtures for parts of the playground."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tikv_br.playground.engine import RocksEngine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RocksEngine]:
    """Return an empty engine, closed at the end."""
    opened = RocksEngine.open(tmp_path / "engine")
    yield opened
    opened.close()
