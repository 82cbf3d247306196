"""Import mode: off unless asked for, and off again however the restore ends."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from msgspec import structs

from tests.integration.backup.data import when
from tests.integration.restore.conftest import ROWS, rows_of
from tests.integration.restore.restores import WARM, leftovers, run_restore
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster
from tests.support.waiting import eventually
from tikv_br.backupset.lease import acquire
from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.errors import LeaseHeld, TargetNotEmpty, Terminated
from tikv_br.progress_events import StepStarted
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.record import ImportModeRecord, RestoreRecord
from tikv_br.restore.run import AbortedRestores, abort_restores, restore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions

MOVERS = {"balance-leader-scheduler", "balance-hot-region-scheduler", "balance-region-scheduler"}


def importing(live: LiveCluster) -> list[bool]:
    """Stores in import mode."""
    return [store["import_mode"] for store in live.get("/playground/stores")]


def paused(live: LiveCluster) -> set[str]:
    """Paused schedulers."""
    return set(live.get("/pd/api/v1/schedulers?status=paused"))


def assert_normal(live: LiveCluster) -> None:
    """Nothing is left of import mode."""
    assert (importing(live), paused(live)) == ([False] * 3, set())


def test_a_restore_leaves_the_cluster_to_its_users(source: StorageLocation, target: LiveCluster) -> None:
    """Unless import mode is asked for, no store is switched and no scheduler paused."""
    check = when(StepStarted, "compare checksums", lambda: assert_normal(target))
    restore(RestoreOptions(cluster=target.config, storage=source), check)


def test_it_is_on_for_the_ingest_and_not_longer(source: StorageLocation, target: LiveCluster) -> None:
    """All stores and the schedulers that move regions; what the operator had paused stays paused."""
    target.cluster.pd_http.pause_scheduler("balance-region-scheduler", 600)
    seen: list[tuple[list[bool], set[str]]] = []
    note = when(StepStarted, "ingest", lambda: seen.append((importing(target), paused(target))))
    assert restore(RestoreOptions(cluster=target.config, storage=source, import_mode=True), note).verified
    assert seen == [([True] * 3, MOVERS)]
    assert (importing(target), paused(target)) == ([False] * 3, {"balance-region-scheduler"})
    assert leftovers(source) == []


def test_a_restore_that_fails_puts_everything_back(source: StorageLocation, target: LiveCluster) -> None:
    """Import mode ends before the failure is reported, whatever ended the ingest."""

    def fail() -> None:
        raise Terminated("for the test")

    with pytest.raises(Terminated):
        restore(
            RestoreOptions(cluster=target.config, storage=source, import_mode=True),
            when(StepStarted, "ingest", fail),
        )
    assert_normal(target)
    assert not any("import-mode" in name for name in leftovers(source))


def test_it_lasts_until_the_last_restore_has_ended(source: StorageLocation, target: LiveCluster) -> None:
    """Another restore of the same backup, with import mode or without, and an abort end nothing."""

    def another(new: bytes, *, import_mode: bool) -> None:
        asked = structs.replace(first, rewrite_prefix=(b"row", new), import_mode=import_mode)
        assert restore(asked).verified
        assert (importing(target), paused(target)) == ([True] * 3, MOVERS)

    def meanwhile() -> None:
        another(b"two", import_mode=True)
        another(b"six", import_mode=False)
        with pytest.raises(LeaseHeld):
            abort_restores(source, target.config)
        assert (importing(target), paused(target)) == ([True] * 3, MOVERS)

    first = RestoreOptions(cluster=target.config, storage=source, rewrite_prefix=(b"row", b"one"), import_mode=True)
    assert restore(first, when(StepStarted, "ingest", meanwhile)).verified
    assert_normal(target)
    assert leftovers(source) == []


def test_the_first_to_end_leaves_it_to_the_other(source: StorageLocation, target: LiveCluster) -> None:
    """Import mode outlasts a restore that wanted it where another one at work does; what a killed one has left goes by the next."""
    other = RestoreRecord(open_store(source), "0123456789abcdef")
    with acquire(other.lease_store(), "restore"):
        other.add_import_mode(target.cluster.cluster_id, ImportModeRecord(tuple(MOVERS)))
        for name in MOVERS:
            target.cluster.pd_http.pause_scheduler(name, 300)
        options = RestoreOptions(cluster=target.config, storage=source, import_mode=True)
        assert restore(options).verified
        assert (importing(target), paused(target)) == ([True] * 3, MOVERS)
    restore(
        structs.replace(options, rewrite_prefix=(b"row", b"two"), import_mode=False)
    )  # to which the other one is a killed one
    assert_normal(target)
    assert leftovers(source) == []


def test_abort_ends_it_too(source: StorageLocation, target: LiveCluster) -> None:
    """An abort restores the cluster without another run."""
    record = RestoreRecord(open_store(source), "given-up")
    record.add_import_mode(target.cluster.cluster_id, ImportModeRecord(tuple(MOVERS)))
    for name in MOVERS:
        target.cluster.pd_http.pause_scheduler(name, 300)
    for store_id in target.store_ids:
        target.cluster.store(store_id).switch_mode(import_sstpb_pb2.Import)
    assert (importing(target), paused(target)) == ([True] * 3, MOVERS)
    assert abort_restores(source, target.config) == AbortedRestores(0, put_back=True)
    assert_normal(target)
    assert abort_restores(source, target.config) == AbortedRestores(0, put_back=False)
    assert leftovers(source) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed(source: StorageLocation, target: LiveCluster, number: signal.Signals) -> None:
    """SIGTERM puts everything back; after SIGKILL the next command does, even one that is refused later."""
    executor = ExecutorOptions(executor="driver", concurrency=2)
    options = RestoreOptions(cluster=target.config, storage=source, executor=executor, import_mode=True)
    target.fail("Ingest", {"delay": {"seconds": 1.5}}, count=-1)
    with Forks(*WARM) as forks:
        pid = forks.start(partial(run_restore, options))
        eventually(lambda: len(leftovers(source)) >= 4)  # the beginning, import mode, and parts
        assert (importing(target), paused(target)) == ([True] * 3, MOVERS)
        os.kill(pid, number)
        code = forks.wait()
    target.heal()
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
        assert all(importing(target))
        with pytest.raises(TargetNotEmpty):
            restore(RestoreOptions(cluster=target.config, storage=source, resume=False))
    else:
        assert code == Terminated.exit_code
    assert_normal(target)
    assert restore(RestoreOptions(cluster=target.config, storage=source)).resumed_files
    assert rows_of(target) == ROWS
    assert leftovers(source) == []
