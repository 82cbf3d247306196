"""A lost safe point ends the run at the next result, and before the commit."""

from __future__ import annotations

import pytest

from tikv_br.backupset.ledger import FinishedTask
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.safepoint import SafePointKeeper
from tikv_br.dataflow import steps
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.run import BackupContext
from tikv_br.dataflow.write import PhaseSeconds, TaskResult
from tikv_br.errors import ClusterUnreachable, SafePointError
from tikv_br.storage.url import StorageLocation

RESULT = TaskResult(FinishedTask(b"", b"", "a", vanished=4), PhaseSeconds(scan=1.5, upload=0.5))


class AbsentPd(PdClient):
    """A PD that does not answer."""

    def __init__(self) -> None:
        """Connect to nothing."""

    def gc_safe_point(self) -> int:
        """Fail."""
        raise ClusterUnreachable("PD is away")

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """Fail."""
        raise ClusterUnreachable("PD is away")


def context(lost: SafePointError | None) -> BackupContext:
    """Return a context whose keeper holds, or has lost, its safe point."""
    made = BackupContext(BackupOptions(ClusterConfig(("127.0.0.1:1",)), StorageLocation("local", "/backup")))
    made.keeper = SafePointKeeper(AbsentPd(), "x", 1000, 60)
    made.keeper.lost = lost
    return made


def test_results_add_up_while_the_safe_point_holds() -> None:
    """Seconds of all tasks are summed by phase, and what they say of their rows is kept."""
    held = context(None)
    held.add_result(RESULT)
    held.add_result(RESULT)
    assert held.task_seconds == PhaseSeconds(scan=3.0, upload=1.0)
    assert [each.vanished for each in held.finished] == [4, 4]


def test_a_lost_safe_point_ends_the_scan_and_forbids_the_commit() -> None:
    """Nothing is made a backup whose backup-ts GC may have passed."""
    lost = context(SafePointError("GC has passed"))
    with pytest.raises(SafePointError):
        lost.add_result(RESULT)
    with pytest.raises(SafePointError):
        steps.commit(lost)


def test_a_hand_over_that_fails_says_that_the_backup_is_complete() -> None:
    """The files are sound; only the tail has lost its hold."""
    with pytest.raises(SafePointError, match=r"backup is complete.*PD is away"):
        steps.hand_over_safe_point(context(None))
