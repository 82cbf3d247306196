"""Restores stopped during downloads and uploads that would take minutes."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
from msgspec import structs

from tests.integration.crash.world import disturbed
from tests.integration.restore.conftest import ROWS, rows_of
from tests.integration.restore.restores import WARM, leftovers, run_restore
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster
from tests.support.waiting import eventually
from tikv_br.cluster.channel import CallUnsupported
from tikv_br.errors import Terminated
from tikv_br.progress_events import Event
from tikv_br.restore.options import Mode, RestoreOptions, Via
from tikv_br.restore.run import abort_restores, restore
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions

SLOW = 600
"""Bytes a second for each store: a file takes some ten seconds, and three are under way."""
END_SECONDS = 25
"""Seconds to end, of some 80 that the rest of the restore would take."""
DRIVER = ExecutorOptions(executor="driver", concurrency=3)
SPARK = ExecutorOptions(executor="spark", spark_master="local[3]", concurrency=3)


@pytest.mark.parametrize(
    ("executor", "via"),
    [(DRIVER, Via.STORES), (DRIVER, Via.UPLOAD), (SPARK, Via.STORES)],
    ids=["driver-stores", "driver-upload", "spark-stores"],
)
def test_sigterm_ends_a_slow_restore_within_seconds(
    executor: ExecutorOptions, via: Via, source: StorageLocation, target: LiveCluster
) -> None:
    """Files under way are given up, import mode, limit and lease are gone, and the same command goes on from there."""
    options = RestoreOptions(
        target.config, source, executor=executor, concurrency=3, via=via, import_mode=True, rate_limit=SLOW
    )
    with Forks(*WARM) as forks:
        pid = forks.start(partial(run_restore, options))
        eventually(lambda: any("begun" not in name and "import-mode" not in name for name in leftovers(source)), 180)
        time.sleep(1)
        os.kill(pid, signal.SIGTERM)
        reported = time.monotonic()
        assert forks.wait() == Terminated.exit_code
        assert time.monotonic() - reported < END_SECONDS
    assert disturbed(target) == []
    summary = restore(structs.replace(options, executor=DRIVER, rate_limit=0))
    assert summary.resumed_files
    assert summary.verified
    assert rows_of(target) == ROWS
    assert leftovers(source) == []


@pytest.mark.parametrize("after", ["restore", "put", "abort"])
def test_a_limit_that_a_killed_restore_has_left_is_lifted(
    after: str, source: StorageLocation, target: LiveCluster
) -> None:
    """Stores keep it; the next restore without a limit lifts it, and so does a clean-up."""
    limited = RestoreOptions(target.config, source, executor=DRIVER, rate_limit=SLOW)
    with Forks(*WARM) as forks:
        pid = forks.start(partial(run_restore, limited))
        eventually(lambda: len(disturbed(target)) == len(target.store_ids))
        os.kill(pid, signal.SIGKILL)
        assert forks.wait() == -signal.SIGKILL
    assert disturbed(target) == [f"store {store_id} limits downloads" for store_id in target.store_ids]
    if after == "abort":
        abort_restores(source, target.config)
        assert all(each.finished_ts for each in target.cluster.ingests.read())  # at once, as nobody follows
    else:
        # Without --no-resume, cleaning up lifts it as well.
        unlimited = structs.replace(limited, rate_limit=0, resume=after == "put", allow_overwrite=True)
        summary = restore(structs.replace(unlimited, mode=Mode.PUT if after == "put" else Mode.INGEST))
        assert summary.seconds < summary.backup_size / SLOW / 2
        assert rows_of(target) == ROWS
    assert disturbed(target) == []


def test_the_first_error_ends_a_slow_restore_within_seconds(source: StorageLocation, target: LiveCluster) -> None:
    """As at a signal: what the other tasks have under way is given up."""
    options = RestoreOptions(target.config, source, executor=DRIVER, rate_limit=SLOW)
    failed = target.fail("Ingest", {"abort": {"code": "UNIMPLEMENTED", "details": "no such call"}}, count=1, skip=1)
    seen: list[float] = []

    def look(_event: Event) -> None:
        if not seen and target.hits(failed):
            seen.append(time.monotonic())

    with pytest.raises(CallUnsupported):
        restore(options, look)
    assert time.monotonic() - seen[0] < END_SECONDS
