"""``--ratelimit``: what a store is made to write, to send and to fetch a second, measured at a playground."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from formats.api_version import ApiVersion
from tests.live_cluster import LiveCluster, live_cluster
from tikv_br.backup import plan
from tikv_br.backup.options import BackupOptions
from tikv_br.backup.run import backup
from tikv_br.cluster.config import ClusterConfig
from tikv_br.errors import TikvBrError, UsageError
from tikv_br.restore.options import RestoreOptions, Via
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation

MIB = 1 << 20
LIMIT = MIB
"""Bytes a second: so few that no machine is too slow for them."""
REGIONS = 8
VALUE = 16 << 10
TRIES = 4
"""A busy machine makes a run slower, never faster."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster of one store with 3 MiB that do not compress, in eight regions of equal size."""
    chance = random.Random(8)
    rows = {b"key%04d" % number: chance.randbytes(VALUE) for number in range(3 * MIB // VALUE)}
    with live_cluster(tmp_path_factory.mktemp("cluster"), ApiVersion.V1, stores=1) as live:
        live.raw().batch_put(rows)
        keys = sorted(rows)
        live.run(
            "split", keys=[keys[place].hex() for place in range(len(keys) // REGIONS, len(keys), len(keys) // REGIONS)]
        )
        yield live


@pytest.fixture
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every region be a task."""
    monkeypatch.setattr(plan, "SMALLEST_TASK", MIB // 2)


def holds(speed: Callable[[int], float]) -> None:
    """Fail unless a run comes near its limit, as far as a busy machine lets it; one that is above by 10 % fails at once.

    Each try has a limit of its own: what the one before did not use up is not made up for. What a run without a limit takes at
    the time, a run with one may take twice on top.
    """
    seen = []
    for attempt in range(TRIES):
        seen.append(speed(LIMIT + attempt) / LIMIT)
        assert seen[-1] <= 1.1
        if 1 / seen[-1] <= 1 / 0.7 or 1 / seen[-1] <= 1 / 0.7 + 2 * LIMIT / speed(0):
            return
    pytest.fail(f"speeds by the limit: {seen}")


@pytest.mark.usefixtures("many_tasks")
@pytest.mark.parametrize("engine", ["store", "scan"])
def test_a_backup_holds_the_limit(live: LiveCluster, tmp_path: Path, engine: str) -> None:
    """Eight tasks at once share the limit of their store, whoever writes the files."""

    def speed(limit: int) -> float:
        place = StorageLocation("local", str(tmp_path / str(len(list(tmp_path.iterdir())))))
        options = BackupOptions(live.config, place, rate_limit=limit, engine=engine, executor="driver", concurrency=8)  # type: ignore[arg-type]
        report = backup(options)
        assert len(report.plan) > 4
        summary = report.summary
        moved = summary.backup_size if engine == "store" else summary.total_bytes
        return moved / summary.step_seconds["copy"]

    holds(speed)


def restored_in_a_second(options: RestoreOptions) -> float:
    """Restore, and return the bytes of files a second."""
    summary = restore(options)
    return summary.backup_size / summary.step_seconds["ingest"]


def test_a_restore_holds_the_limit_and_lifts_it(live: LiveCluster, tmp_path: Path) -> None:
    """Downloads of a store share the limit; afterwards it is lifted, also when the restore fails."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    backup(BackupOptions(live.config, place, engine="store"))
    with live_cluster(tmp_path / "target", ApiVersion.V1, stores=1) as target:
        told = target.fail("SetDownloadSpeedLimit", {"delay": {"seconds": 0.0}}, count=-1)
        options = RestoreOptions(target.config, place, rate_limit=LIMIT, allow_overwrite=True)
        holds(lambda limit: restored_in_a_second(replace(options, rate_limit=limit)))
        before = target.hits(told)
        assert before % 2 == 0
        target.fail("Download", {"abort": {"code": "UNIMPLEMENTED", "details": "no such call"}}, count=-1)
        with pytest.raises(TikvBrError):
            restore(options)
        assert target.hits(told) == before + 2


def test_uploads_hold_the_limit(live: LiveCluster, tmp_path: Path) -> None:
    """Where files are sent from here, all that is sent to a store shares the limit."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    backup(BackupOptions(live.config, place, engine="store"))
    with live_cluster(tmp_path / "target", ApiVersion.V1, stores=1) as target:
        options = RestoreOptions(target.config, place, rate_limit=LIMIT, allow_overwrite=True, via=Via.UPLOAD)
        holds(lambda limit: restored_in_a_second(replace(options, rate_limit=limit)))


def test_a_spark_cluster_must_say_among_how_many_tasks_it_is_divided(tmp_path: Path) -> None:
    """Without --concurrency nobody knows how many tasks read from a store at once."""
    place = StorageLocation("local", str(tmp_path))
    config = ClusterConfig(("127.0.0.1:1",))
    options = BackupOptions(config, place, rate_limit=1, executor="spark", spark_master="spark://host:7077")
    with pytest.raises(UsageError, match="--concurrency"):
        options.check()
    replace(options, concurrency=8).check()
    replace(options, spark_master="local[4]").check()
