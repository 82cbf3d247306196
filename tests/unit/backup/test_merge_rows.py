"""Rows that a merge of a backup and a log yields."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from formats.api_version import ApiVersion
from formats.keys.codec import KeyCodec
from formats.keys.ranges import KeyRange
from tests.support.history import Version
from tests.support.logs import LOG_ID, write_log
from tests.unit.backup.samples import options
from tikv_br.archive.log import LogArchive
from tikv_br.backup.merge import MergeJob, run_merge_task
from tikv_br.backup.task import Task
from tikv_br.spark.task import TaskContext
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

BACKUP_TS = 100


def test_a_row_of_the_log_that_the_backup_superseded_stays_superseded(tmp_path: Path) -> None:
    """A key was written at 90 and deleted at 95. Its first row arrived late, in the segment that ends after the backup."""
    place = StorageLocation("local", str(tmp_path / "log"))
    rows = {b"deleted": [Version(90, b"old")], b"written": [Version(110, b"new")]}
    write_log(place, 1, 80, [120], rows)
    span = KeyRange(*KeyCodec(ApiVersion.V2).rpc_range(b"", b""))
    log = LogArchive.open(open_store(place), LOG_ID)
    wanted = replace(options(), storage=StorageLocation("local", str(tmp_path / "merged")))
    files = tuple(log.files_for(span, BACKUP_TS, 120))
    job = MergeJob("run", wanted, (), place, files, after_ts=BACKUP_TS, ts=120)
    done = run_merge_task(job, Task(span.start, span.end), TaskContext(0, 0, lambda _: None))
    assert done.entry.source.total_kvs == 1
