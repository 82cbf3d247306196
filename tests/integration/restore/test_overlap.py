"""Restores check the target beside the files and compare files while others are ingested, and are as safe as in sequence."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.integration.backup.data import when
from tests.integration.restore.conftest import FILES, ROWS, rows_of
from tests.support.live_cluster import LiveCluster
from tests.support.waiting import eventually
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.errors import BackupDamaged, RetryBudgetExhausted
from tikv_br.progress_events import StepFinished, StepStarted
from tikv_br.restore import inspect
from tikv_br.restore import target as target_steps
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.options import Mode, RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse
from tikv_br.tasks.executor import ExecutorOptions

DELAY = 0.2
TASKS = 4


def options_of(live: LiveCluster, location: StorageLocation, **changes: object) -> RestoreOptions:
    """A restore by a few tasks at once."""
    executor = ExecutorOptions(executor="driver", concurrency=TASKS)
    return RestoreOptions(live.config, location, executor=executor, concurrency=TASKS, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "rpc"), [(Mode.INGEST, "Ingest"), (Mode.PUT, "RawBatchPut")])
def test_files_are_compared_while_others_are_brought_in(
    source: StorageLocation, target: LiveCluster, mode: Mode, rpc: str
) -> None:
    """With slow stores many comparisons have begun when the last file is in; no file is compared twice."""
    target.fail(rpc, {"delay": {"seconds": DELAY}}, count=-1)
    target.fail(
        rpc, {"delay": {"seconds": 10 * DELAY}}, skip=FILES - 1
    )  # the last, until a busy machine compares the others
    asked = target.fail("RawChecksum", {"delay": {"seconds": DELAY}}, count=-1)
    begun: list[int] = []
    count = when(StepFinished, mode.value, lambda: begun.append(target.hits(asked)))
    summary = restore(options_of(target, source, mode=mode), count)
    assert summary.verified
    assert rows_of(target) == ROWS
    assert target.hits(asked) == summary.files
    assert begun[0] >= FILES // 4  # in sequence, none
    assert summary.overlap_seconds["compare checksums"] > 0


def test_the_target_is_checked_beside_the_files(
    source: StorageLocation, target: LiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are inspected while the check of the target has not ended."""
    look, inspected = inspect.inspect_file, list[None]()
    check_target = target_steps.check_target

    def slow(backup: BackupSet, *arguments: object) -> inspect.FileFacts:
        time.sleep(DELAY)
        inspected.append(None)
        return look(backup, *arguments)  # type: ignore[arg-type]

    def check_slowly(context: RestoreContext) -> None:
        eventually(lambda: len(inspected) >= TASKS)
        check_target(context)

    monkeypatch.setattr(inspect, "inspect_file", slow)
    monkeypatch.setattr(target_steps, "check_target", check_slowly)
    done: list[int] = []
    summary = restore(
        options_of(target, source), when(StepFinished, "check the target", lambda: done.append(len(inspected)))
    )
    assert done[0] >= TASKS  # in sequence, none
    assert summary.overlap_seconds["check every file"] > 0


def test_a_file_found_damaged_while_others_are_in(source: StorageLocation, target: LiveCluster, tmp_path: Path) -> None:
    """It is named, what the target holds is said, and with a sound copy in its place the same command goes on."""
    copy = tmp_path / "backup"
    shutil.copytree(source.path, copy)
    location = parse(f"local://{copy}")
    names = [file.name for file in BackupSet.open(open_store(location)).files]
    victim = copy / names[-1]
    sound = victim.read_bytes()
    altered = bytearray(sound)
    altered[3] ^= 1
    last = ExecutorOptions(executor="driver", concurrency=1)
    options = RestoreOptions(target.config, location, executor=last)
    with pytest.raises(BackupDamaged, match=victim.name) as caught:
        restore(options, when(StepStarted, "ingest", lambda: victim.write_bytes(altered)))
    there = rows_of(target)
    assert 0 < len(there) < len(ROWS)
    assert f"already holds {len(names) - 1} of the {len(names)} files" in caught.value.hint
    victim.write_bytes(sound)
    summary = restore(options)
    assert (summary.verified, summary.resumed_files) == (True, len(names) - 1)
    assert rows_of(target) == ROWS


def test_a_comparison_that_fails_during_the_ingest_is_made_again(source: StorageLocation, target: LiveCluster) -> None:
    """A refused answer then is no failure: the comparing step decides, and reports its findings."""
    refused = target.fail("RawChecksum", {"abort": {"code": "UNIMPLEMENTED", "details": "not now"}}, count=1)
    assert restore(options_of(target, source)).verified
    assert target.hits(refused) == 1


def test_an_ingest_that_fails_ends_the_comparisons_under_way(source: StorageLocation, target: LiveCluster) -> None:
    """The restore does not wait for stores that are slow to answer them."""
    target.fail("RawChecksum", {"delay": {"seconds": 40}}, count=-1)
    target.fail("Ingest", {"abort": {"code": "UNIMPLEMENTED", "details": "no such call"}}, count=1, skip=FILES // 2)
    began = time.monotonic()
    with pytest.raises(Exception, match="no such call") as caught:
        restore(options_of(target, source))
    assert not isinstance(caught.value, RetryBudgetExhausted)
    assert time.monotonic() - began < 30
