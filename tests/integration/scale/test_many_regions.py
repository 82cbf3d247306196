"""A plan of many regions stays small and quick on the driver, and no task or worker is sent more than its own interval."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integration.scale.finished_tasks import FILE_KVS
from tests.integration.scale.planned import planned
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Return those of 10,000 regions."""
    return planned(10_000)


def test_ten_thousand_regions_are_planned_in_seconds(figures: dict[str, Any]) -> None:
    """Asking PD for 10,000 regions and their sizes, and cutting them into tasks, takes below 5 s and 300 MiB."""
    assert figures["regions"] == 10_000
    assert figures["tasks"] == 1_000
    assert figures["cpu_seconds"] < 5
    assert figures["peak_mib"] < 300


def test_a_restore_into_ten_thousand_regions_is_planned_in_seconds() -> None:
    """A file for every four regions, a quarter of them done: the remaining parts, split keys and regions."""
    figures = planned(10_000, "plan_restore_once")
    assert figures["regions"] == 10_000
    assert figures["files"] == 2_500
    assert figures["left"] == 1_875
    assert figures["splits"] > 1_000
    assert figures["cpu_seconds"] < 10
    assert figures["peak_mib"] < 300


def test_tasks_are_sent_their_interval_only(figures: dict[str, Any]) -> None:
    """Neither a task nor what workers share grows with the number of regions."""
    few = planned(100)
    assert figures["task_bytes"] < 300
    assert abs(figures["closure_bytes"] - few["closure_bytes"]) < 50
    assert figures["closure_bytes"] < 20_000


def test_the_outcomes_of_many_tasks_become_a_backup(tmp_path: Path) -> None:
    """A backup of 3,000 regions, with tasks that another process ends: every file is in it once, and the driver stays small."""
    figures = planned(3_000, "back_up_once", str(tmp_path))
    opened = BackupSet.open(open_store(StorageLocation("local", str(tmp_path))))
    written = sorted(f"sst/{path.name}" for path in (tmp_path / "sst").iterdir())
    assert sorted(file.name for file in opened.files) == written
    assert figures["regions"] == 3_000
    assert figures["tasks"] == 1_000
    assert opened.totals.total_kvs == figures["total_kvs"] == len(written) * FILE_KVS
    assert all(left.end_key == right.start_key for left, right in pairwise(opened.files))
    assert not (tmp_path / "tikv-br" / "ledger").exists()
    assert figures["cpu_seconds"] < 60
    assert figures["peak_mib"] < 300
