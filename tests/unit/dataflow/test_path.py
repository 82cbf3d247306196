from __future__ import annotations

import contextlib
from pathlib import Path
from typing import cast
from unittest import mock

import pytest

from tikv_br.backupset import lease
from tikv_br.backupset.backup_writer import BackupWriter
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.run import BackupContext
from tikv_br.dataflow.steps import release_backup_lock
from tikv_br.errors import StorageUnreachable
from tikv_br.storage.local import LocalObjectStore
from tikv_br.storage.url import parse


@pytest.mark.parametrize("call", ["list", "stat", "delete"])
def test_a_lease_ends_with_its_run_also_where_the_storage_fails(tmp_path: Path, call: str) -> None:
    """Remains that the failing storage hides stay, but nobody renews the lease, so that the next run can acquire the path."""
    store = LocalObjectStore(parse(f"local://{tmp_path}"))
    context = BackupContext(cast("BackupOptions", None))
    context.store, context.writer, context.owns_work = store, BackupWriter(store), True
    context.lease = lease.acquire(store, "backup")
    failing = mock.patch.object(LocalObjectStore, call, side_effect=StorageUnreachable("on purpose"))
    with failing, contextlib.suppress(StorageUnreachable):
        release_backup_lock(context)
    with lease.acquire(store, "backup") as taken:
        taken.confirm()
