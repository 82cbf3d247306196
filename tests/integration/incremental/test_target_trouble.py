"""A target that is down, busy or slow: the sync waits in bounded memory, confirms nothing, and catches up."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.incremental.conftest import Clusters
from tests.integration.incremental.forked_sync import Syncs, run_sync, saved
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.handover import FromTs
from tikv_br.incremental.sinks.url import TikvTarget
from tikv_br.incremental.sync import SyncOptions
from tikv_br.storage.url import parse

MIB = 1 << 20
PATIENCE = 200.0
DOWN_SECONDS = float(os.environ.get("TIKV_BR_TEST_DOWN_SECONDS", "12"))
"""Duration of an outage: by default a little longer than the retries of one write."""
BUSY = {"region_error": {"server_is_busy": {"reason": "test", "backoff_ms": 500}}}
SLOW = {"delay": {"seconds": 3}}
"""So slow that a megabyte is not there before all has been written, on a slow machine either."""
TROUBLES = {"down": None, "busy": BUSY, "slow": SLOW}
WRITTEN = {"down": 320, "busy": 8, "slow": 8}
"""MiB written during the trouble."""
MOST_GROWTH = 240
"""MiB: what gRPC reads ahead from two stores, inbox, sorter, and what allocators keep: 110 to 165, also when twice as much is written."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Target of changes."""
    with live_cluster(tmp_path_factory.mktemp("target"), ApiVersion.V2, stores=1, regions=2) as live:
        yield live


def memory(pid: int, kind: str) -> float:
    """MiB that a process holds (``RSS``), or has held at most (``HWM``)."""
    found = re.search(rf"^Vm{kind}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def wait_for(live: LiveCluster, wanted: dict[bytes, bytes]) -> None:
    """Wait for the target to hold this."""
    eventually(lambda: contents(live) == wanted, PATIENCE, every=0.3)


def write(live: LiveCluster, mib: int) -> dict[bytes, bytes]:
    """Write so much, over and over to the same few keys; what they hold then."""
    rows: dict[bytes, bytes] = {}
    for turn in range(mib):
        rows = {b"%c" % (at * 4): os.urandom(16) * 1024 + b"%d" % turn for at in range(64)}
        live.raw().batch_put(rows)
    return rows


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_waits_in_bounded_memory_and_catches_up(
    clusters: Clusters, target: LiveCluster, tmp_path: Path, trouble: str
) -> None:
    """More is written than the sync may hold while the target takes nothing; then all arrives."""
    source = clusters(ApiVersion.V2)
    for live in (source, target):
        live.raw().delete_range(EVERY_KEY)
    options = SyncOptions(
        changefeed_id=trouble,
        source=source.config,
        target=TikvTarget((target.pd,)),
        state=parse(f"local://{tmp_path}"),
        scratch=tmp_path,
        start=FromTs(minus_seconds(source.cluster.pd.tso(), 6)),
        sorter_bytes=8 * MIB,
        feed=FeedOptions(hold_back=0, queue_bytes=8 * MIB),
    )
    with Syncs() as syncs:
        pid = syncs.start(partial(run_sync, options))
        wait_for(target, write(source, 4))
        before = memory(pid, "RSS")
        failpoint = _begin(target, trouble)
        rows = write(source, 1)
        written_ts = source.cluster.pd.tso()
        rows = write(source, WRITTEN[trouble])
        _last(target, failpoint)
        assert saved(tmp_path, trouble) < written_ts
        target.heal()
        wait_for(target, rows)
        assert memory(pid, "HWM") - before < MOST_GROWTH
        os.kill(pid, signal.SIGTERM)
        assert syncs.wait() == 0


def test_ends_soon_though_the_target_is_busy(clusters: Clusters, target: LiveCluster, tmp_path: Path) -> None:
    """SIGTERM ends a sync whose write is being tried again and again, and what was not confirmed comes after the next start."""
    source = clusters(ApiVersion.V2)
    for live in (source, target):
        live.raw().delete_range(EVERY_KEY)
    asked = ["--pd", source.pd, "--sink", f"tikv://{target.pd}", "--state-dir", str(tmp_path), "--hold-back", "0s"]
    asked += ["--from-backup-ts", str(minus_seconds(source.cluster.pd.tso(), 6))]
    with Syncs() as syncs:
        failpoint = target.fail("RawBatchPut", BUSY, count=-1)
        pid = syncs.begin(asked)
        source.raw().put(b"k", b"v")
        _wait_for_hits(target, failpoint)
        syncs.end(pid)
        target.heal()
        assert contents(target) == {}
        pid = syncs.begin(asked)
        wait_for(target, {b"k": b"v"})
        syncs.end(pid)


def _begin(live: LiveCluster, trouble: str) -> int:
    action = TROUBLES[trouble]
    if action is not None:
        return live.fail("RawBatchPut", action, count=-1)
    for store in live.store_ids:
        live.kill_store(store)
    return 0


def _last(live: LiveCluster, failpoint: int) -> None:
    if failpoint:
        _wait_for_hits(live, failpoint)
    else:
        time.sleep(DOWN_SECONDS)


def _wait_for_hits(live: LiveCluster, failpoint: int, count: int = 2) -> None:
    eventually(lambda: live.hits(failpoint) >= count, PATIENCE)
