"""Places for backups and their index."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.backupset.shelves import index_at
from tikv_br.backupset.index import Index
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """Return where a backup goes."""
    return open_store(parse(str(tmp_path / "backup")))


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Return the index of an empty folder."""
    return index_at(tmp_path)
