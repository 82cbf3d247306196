"""kill -9 of a sync at random moments, judged by what every key has been at the source and at the target."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.integration.incremental.forked_sync import Syncs, saved
from tests.integration.incremental.writer import Writer
from tests.support import history
from tests.support.live_cluster import contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.formats.api_version import ApiVersion

KILLS = 18  # and two more
PATIENCE = 120.0


def seconds_to_save(syncs: Syncs, asked: list[str], state: Path) -> float:
    """Run a sync until it has brought the checkpoint on; how long that takes."""
    for _warm in (False, True):
        before, began = saved(state, "killed"), time.monotonic()
        pid = syncs.begin(asked)
        eventually(lambda: saved(state, "killed") > before, PATIENCE)  # noqa: B023 - looked at at once
        seconds = time.monotonic() - began
        syncs.kill(pid)
    return seconds


@pytest.mark.timeout(600)
def test_no_kill_loses_a_key_or_turns_one_back(tmp_path: Path) -> None:
    """SIGKILL twenty times under writes: the clusters end equal, and no key is older than a checkpoint said."""
    seed = int(os.environ.get("TIKV_BR_TEST_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    chance = random.Random(seed)
    state = tmp_path / "state"
    state.mkdir()
    settings = {"stores": 2, "regions": 4, "resolved_ts_interval": 0.2}
    with (
        live_cluster(tmp_path / "source", ApiVersion.V2, **settings) as source,
        live_cluster(tmp_path / "target", ApiVersion.V2, stores=1, regions=3) as target,
        Syncs() as syncs,
    ):
        since = minus_seconds(source.cluster.pd.tso(), 10)
        asked = ["--pd", source.pd, "--sink", f"tikv://{target.pd}", "--state-dir", str(state)]
        asked += ["--id", "killed", "--from-backup-ts", str(since), "--hold-back", "0s", "--sorter-memory", "64KiB"]
        with history.CheckpointWatch(lambda: saved(state, "killed"), target.cluster.pd.tso) as watch:
            with Writer(source, 1), Writer(source, 2):
                seconds = seconds_to_save(syncs, asked, state)
                for _ in range(KILLS):
                    pid = syncs.begin(asked)
                    time.sleep(chance.uniform(0, 1.5 * seconds))
                    syncs.kill(pid)
            pid = syncs.begin(asked)
            wanted = contents(source)
            eventually(lambda: contents(target) == wanted, PATIENCE, every=0.2)
            syncs.end(pid)
        before = history.read(tmp_path / "source", tmp_path / "a")
        after = history.read(tmp_path / "target", tmp_path / "b")
    assert history.check(before, after, watch.passed) > 0
