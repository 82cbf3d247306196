"""The lease of a restore, at its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tikv_br.backupset import layout, lease
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.record import RestoreRecord
from tikv_br.restore.run import release_restore_lock
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


def test_a_restore_is_complete_though_its_lease_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All rows are ingested and compared by then: the remaining lease is reported, and no failure."""
    record = RestoreRecord(open_store(parse(str(tmp_path))), "0123456789abcdef")
    held = lease.acquire(record.lease_store(), "restore")
    record.lease_store().put(layout.lease_name(1), b"junk")
    context = cast("RestoreContext", SimpleNamespace(lease=held, record=record))
    release_restore_lock(context)
    assert context.lease is None
    assert layout.lease_name(1) in caplog.text
    assert record.is_running  # as far as can be known
