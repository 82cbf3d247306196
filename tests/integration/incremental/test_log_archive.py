"""A log archive of a cluster under writes and splits, killed again and again, against the versions in the stores."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.integration.incremental.forked_sync import Syncs, saved
from tests.integration.incremental.writer import Writer
from tests.support import history
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import eventually
from tikv_br.archive.log import LogArchive
from tikv_br.archive.records import merge_periods
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

KILLS = 12
MOST_OBJECTS = 8
"""Maximum of files, segments and checkpoints that a process writes before it is killed."""
PAUSE = 0.02
PATIENCE = 120.0
Row = tuple[bytes, int, bytes | None, bool]
"""Key, ts, value (None = deleted), and whether it expires."""


def rows_of(log: Path) -> set[Row]:
    """All rows of all data files, as pyarrow reads them."""
    found: set[Row] = set()
    for name in log.glob("data/*/*.parquet"):
        for row in pq.read_table(name, partitioning=None).to_pylist():
            value = None if row["deleted"] else row["value"]
            found.add((row["key"], row["ts"], value, bool(row["expire_ts"])))
    return found


def split_somewhere(live: LiveCluster, chance: random.Random) -> None:
    """Split a region where the writers write."""
    codec = live.raw().codec
    live.split(codec.bound(codec.rpc_key(b"%d%03d" % (chance.choice([1, 2]), chance.randrange(200)))))


@pytest.mark.timeout(600)
def test_kills_and_splits_lose_no_version(tmp_path: Path) -> None:
    """SIGKILL twelve times at random moments: there is no gap, and only versions of the scan windows are missing."""
    seed = int(os.environ.get("TIKV_BR_TEST_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    chance = random.Random(seed)
    log, state = tmp_path / "store" / "killed", tmp_path / "store" / "killed" / "state"
    settings = {"stores": 2, "regions": 4, "resolved_ts_interval": 0.2}
    with live_cluster(tmp_path / "source", ApiVersion.V2, **settings) as source, Syncs() as syncs:
        codec = source.raw().codec
        since = minus_seconds(source.cluster.pd.tso(), 10)
        sink = f"local://{tmp_path}/store?flush-interval=300ms&flush-size=4KiB"
        asked = ["--pd", source.pd, "--sink", sink, "--id", "killed", "--from-backup-ts", str(since)]
        asked += ["--hold-back", "0s", "--sorter-memory", "64KiB", "--checkpoint-every", "100ms"]

        def catch_up() -> None:
            now = source.cluster.pd.tso()
            eventually(lambda: saved(state, "killed") > now, PATIENCE, every=0.1)

        def objects() -> int:
            return sum(1 for _ in log.glob("*/**/*"))

        with Writer(source, 1, PAUSE), Writer(source, 2, PAUSE):
            for number in range(KILLS):
                enough = objects() + chance.randrange(MOST_OBJECTS)
                pid = syncs.begin(asked)
                if number % 4 == 0:  # twice: what is written after the first lies outside of the scan windows
                    catch_up()
                    catch_up()
                else:
                    eventually(lambda: objects() >= enough, PATIENCE)  # noqa: B023
                    split_somewhere(source, chance)
                syncs.kill(pid)
        last = source.cluster.pd.tso()
        pid = syncs.begin(asked)
        catch_up()
        syncs.end(pid)
        versions = history.read(tmp_path / "source", tmp_path / "scratch")
    wanted = {(key, at.ts, at.value, at.expires) for key, found in versions.items() for at in found if at.ts > since}
    found = rows_of(log)
    assert len(wanted) > 100
    assert any(row[2] is None for row in wanted)
    assert any(row[3] for row in wanted)
    assert found - wanted == set()
    archive = LogArchive.open(open_store(parse(f"local://{tmp_path}/store")), "killed")
    assert (archive.damage, archive.gaps()) == ((), [])
    assert archive.end_ts() >= archive.checkpoint_ts > last
    assert archive.verify_files(whole=True) == []
    windows = merge_periods(period for segment in archive.segments for period in segment.inexact)

    def in_window(row: Row) -> bool:
        key = codec.rpc_key(row[0])
        point = KeyRange(key, key + b"\0")
        return any(each.from_ts < row[1] <= each.to_ts and each.span.contains(point) for each in windows)

    assert {row for row in wanted - found if not in_window(row)} == set()
    assert not all(map(in_window, wanted))
