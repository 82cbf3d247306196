"""Rows that a merge of a backup and a log yields."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from tests.support.history import Version
from tests.support.logs import LOG_ID, write_log
from tests.unit.dataflow.samples import options
from tikv_br.archive.log import LogArchive
from tikv_br.backup.merge import MergeJob, run_merge_task
from tikv_br.backupset.ledger import LedgerEntry, read_entry
from tikv_br.cancellation import Cancellation
from tikv_br.dataflow import write
from tikv_br.dataflow.read import StoredRows
from tikv_br.errors import StorageFull
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import TaskContext, TaskMessage

BACKUP_TS = 100
SPAN = KeyCodec(ApiVersion.V2).rpc_range()


@pytest.fixture
def job(tmp_path: Path) -> MergeJob:
    """A merge of a log in which a key was written at 90 and deleted at 95. Its first row arrived late, in a segment after the backup."""
    place = StorageLocation("local", str(tmp_path / "log"))
    rows = {b"deleted": [Version(90, b"old")], b"written": [Version(110, b"new")]}
    write_log(place, 1, 80, [120], rows)
    log = LogArchive.open(open_store(place), LOG_ID)
    wanted = structs.replace(options(), storage=StorageLocation("local", str(tmp_path / "merged")))
    files = tuple(log.files_for(SPAN, BACKUP_TS, 120))
    stored = StoredRows((), ts=120, now=0, log=place, log_files=files, after_ts=BACKUP_TS)
    return MergeJob("run", wanted, stored)


def test_a_row_of_the_log_that_the_backup_superseded_stays_superseded(job: MergeJob) -> None:
    """Only the row after the backup is left."""
    done = run_merge_task(job, KeyRange(SPAN.start, SPAN.end), TaskContext(0, 0, lambda _: None))
    assert read_entry(open_store(job.options.storage), done.finished).source.total_kvs == 1


def test_an_error_in_cancelled_work_stays_what_it_was(job: MergeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is cancelled while the task meets an error of its own: that error counts, and no row does."""
    work, sent = Cancellation(), list[TaskMessage]()

    def fail(_store: ObjectStore, _entry: LedgerEntry) -> None:
        work.cancel()
        raise StorageFull("no room")

    monkeypatch.setattr(write, "write_entry", fail)
    with pytest.raises(StorageFull):
        run_merge_task(job, KeyRange(SPAN.start, SPAN.end), TaskContext(0, 0, sent.append, work))
    assert sent[0].totals[1] == 1
    assert sent[-1].totals == (0, 0)
