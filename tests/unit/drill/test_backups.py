"""The choice of the backup that a drill restores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs

from tests.unit.serve.samples import entry
from tikv_br.backupset.index import Index
from tikv_br.drill.backups import newest_of_scope
from tikv_br.drill.context import DrillContext
from tikv_br.errors import BackupNotFound
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


def test_transactional_backups_are_passed_over(tmp_path: Path) -> None:
    """Drills are for RawKV: a newer transactional backup in the same folder neither is chosen nor ends the drill."""
    root = parse(str(tmp_path))
    index, said = Index(open_store(root)), list[object]()
    fields = SimpleNamespace(options=SimpleNamespace(backups=root), recorder=said.append)
    context = cast("DrillContext", fields)
    newest = structs.replace(entry("txn", 1.0), key_mode=KeyMode.TXN, scope="1" * 16)
    index.add(newest)
    with pytest.raises(BackupNotFound, match="no backup of RawKV data"):
        newest_of_scope(context)
    for each in (entry("older", 3.0), entry("raw", 2.0)):
        index.add(each)
    assert [each.path for each in newest_of_scope(context)] == ["raw", "older"]
    assert said == []
