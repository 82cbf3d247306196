"""A task of the store engine, with a store that answers at once: no row, so no file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from msgspec import structs

from tests.support.one_store import OneStore
from tests.unit.dataflow.samples import options
from tikv_br.backup import store as store_task
from tikv_br.backup.store import run_store_task
from tikv_br.backupset.ledger import LedgerEntry, read_entry
from tikv_br.cancellation import Cancellation, TaskCancelled
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.write import BackupJob
from tikv_br.errors import StorageError, StorageFull, StorageReadOnly
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import SharedObjects, TaskContext


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> OneStore:
    """The store that every connection leads to."""
    made = OneStore()
    monkeypatch.setattr(Cluster, "connect", lambda _config: cast("Cluster", made))
    return made


@pytest.fixture
def run(tmp_path: Path, store: OneStore) -> Callable[..., None]:
    """Run a task over all keys."""

    def run_task(work: Cancellation | None = None, rate_limit: int = 0) -> None:
        wanted = structs.replace(options(), storage=StorageLocation("local", str(tmp_path)))
        job = BackupJob("run", wanted, Conversion(ApiVersion.V1, ApiVersion.V1), RateLimit(rate_limit))
        context = TaskContext(0, 0, lambda _: None, work, SharedObjects([ClusterPool()]))
        done = run_store_task(job, KeyRange(b"", b""), context)
        entry = read_entry(open_store(wanted.storage), done.finished)
        assert (entry.files, len(store.requests)) == ((), 1)

    return run_task


def test_one_request_covers_the_interval(run: Callable[..., None], tmp_path: Path) -> None:
    """Nothing is left of it but the ledger entry."""
    run()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_no_request_is_sent_once_the_run_is_cancelled(run: Callable[..., None], store: OneStore) -> None:
    """A request may get its turn because another task of the same run was cancelled first."""
    work = Cancellation()
    work.cancel()
    with work.active(), pytest.raises(TaskCancelled):
        run(rate_limit=1 << 20)
    assert store.requests == []


def test_an_error_in_cancelled_work_stays_what_it_was(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is cancelled while the task meets an error of its own."""
    work = Cancellation()

    def fail(_store: ObjectStore, _entry: LedgerEntry) -> None:
        work.cancel()
        raise StorageFull("no room")

    monkeypatch.setattr(store_task, "write_entry", fail)
    with pytest.raises(StorageFull):
        run(work)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EACCES, StorageReadOnly),
        (errno.ENOTDIR, StorageReadOnly),
        (errno.EIO, StorageError),
    ],
)
def test_a_folder_that_cannot_be_made_is_an_error_as_of_any_write(
    run: Callable[..., None], store: OneStore, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StorageError]
) -> None:
    """Only where the path cannot be written to is it read-only; the message has the system's reason."""

    def fail(*_args: object, **_named: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(StorageError, match=os.strerror(code)) as caught:
        run()
    assert type(caught.value) is kind
    assert store.requests == []
