"""Restores that end before their end, and restores of recorded backups."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.restore.conftest import FILES
from tests.support.live_cluster import LiveCluster
from tests.support.waiting import eventually
from tikv_br.backupset import layout
from tikv_br.errors import (
    Failure,
    Terminated,
)
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.progress_events import Event
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.record import RestoreCheckpoint, RestoreRecord
from tikv_br.restore.run import RestoreSummary, restore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse
from tikv_br.tasks.executor import ExecutorOptions

THREADS = 3


WARM = (
    __name__,
    "tikv_br.formats.rawscan",
    *(f"tikv_br.{name}" for name in ("cluster.cluster", "cluster.scan", "backupset.rows", "storage.local")),
)
"""Rows that a restore imports."""


def options_of(live: LiveCluster, location: StorageLocation, **changes: object) -> RestoreOptions:
    """A restore by a few tasks at once, so that there is a middle to end in."""
    executor = ExecutorOptions(executor="driver", concurrency=THREADS)
    return RestoreOptions(cluster=live.config, storage=location, executor=executor, **changes)  # type: ignore[arg-type]


def run_restore(options: RestoreOptions) -> int:
    """Restore in a process of its own; its exit code."""
    try:
        restore(options)
    except Failure as error:
        sys.stderr.write(f"{type(error).__name__}: {error.message}\n")
        return error.exit_code
    return 0


def leftovers(location: StorageLocation) -> list[str]:
    """Remains of restores in the storage, except leases of killed or running ones."""
    return [info.name for info in open_store(location).list(layout.RESTORE) if "/lease-" not in info.name]


def break_off(live: LiveCluster, location: StorageLocation, rpc: str = "Ingest", **changes: object) -> None:
    """Let a restore end as by SIGTERM once about half of its files are in.

    Calls of the second half take long enough for a busy machine to notice the first.
    """
    done, half, ended_before = 0, FILES // 2, _ended_calls(live, rpc)

    def count(_event: Event) -> None:
        nonlocal done
        done = max(done, len(leftovers(changes.get("state", location))))  # type: ignore[arg-type]
        if done > half:
            raise Terminated("for the test")

    slow = live.fail(rpc, {"delay": {"seconds": 0.5}}, skip=half, count=-1)
    with pytest.raises(Terminated):
        restore(options_of(live, location, **changes), count)
    # Stores execute cancelled calls all the same: not while the test looks at the target.
    eventually(lambda: _ended_calls(live, rpc) - ended_before >= half + live.hits(slow))
    live.heal()


def _ended_calls(live: LiveCluster, rpc: str) -> int:
    return int(live.calls()["rpcs"].get(rpc, {"calls": 0})["calls"])


def forge_checkpoint(live: LiveCluster, location: StorageLocation) -> None:
    """Write what anybody can who may write beside a backup: a checkpoint by which every range of this target was empty."""
    store, cluster_id = open_store(location), live.cluster.cluster_id
    record = RestoreRecord.of(store, cluster_id, store.get(layout.META), [])
    record.create_checkpoint(RestoreCheckpoint(cluster_id, (EVERY_KEY,), 1, secret="0" * 32))


def restore_golden(live: LiveCluster, golden: Path, name: str, **changes: object) -> RestoreSummary:
    """Restore one recorded backup, and leave its folder alone."""
    location = parse(f"local://{golden / 'backups' / name / 'data'}")
    with tempfile.TemporaryDirectory() as state:
        settings = {"state": parse(f"local://{state}"), **changes}
        return restore(RestoreOptions(cluster=live.config, storage=location, **settings))  # type: ignore[arg-type]
