"""``--ratelimit``: what a store is made to write, to send and to fetch a second, measured at a playground."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import eventually
from tikv_br.backup.run import backup
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.dataflow import plan
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import choose_engine
from tikv_br.errors import Failure, Terminated, TikvBrError, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.restore.options import RestoreOptions, Via
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions, run_tasks
from tikv_br.tasks.task import TaskContext

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
    """Eight concurrent tasks share the limit of their store, whoever writes the files."""

    def speed(limit: int) -> float:
        place = StorageLocation("local", str(tmp_path / str(len(list(tmp_path.iterdir())))))
        options = BackupOptions(live.config, place, rate_limit=limit, engine=engine, executor="driver", concurrency=8)  # type: ignore[arg-type]
        report = backup(options)
        assert len(report.plan) > 4
        summary = report.summary
        moved = summary.backup_size if engine == "store" else summary.total_bytes
        return moved / summary.step_seconds["copy"]

    holds(speed)


@dataclass(frozen=True)
class Reading:
    """A task that reads from a store at a limit."""

    limit: RateLimit

    def __call__(self, pages: int, _context: TaskContext) -> tuple[float, float]:
        """Read so many pages; the times of its start and its end."""
        began = time.time()
        for _ in range(pages):
            self.limit.spend(1, LIMIT // 8)
        return began, time.time()


@pytest.mark.parametrize("concurrency", [None, 1])
def test_tasks_of_spark_share_the_limit(concurrency: int | None) -> None:
    """Each has a limit of its own, but no two in one process run at once: what is read by all never exceeds the whole limit."""
    where = {"executor": "spark", "spark_master": "local[2]", "concurrency": concurrency}
    options = BackupOptions(ClusterConfig(("nobody:1",)), StorageLocation("local", "/nowhere"), **where)  # type: ignore[arg-type]
    engine = choose_engine(options, ApiVersion.V1, ApiVersion.V1)
    tasks, spans = [4] * 8, list[tuple[float, float]]()
    limit = RateLimit(LIMIT).share(engine.executor, engine.slots, len(tasks))
    run_tasks(
        tasks,
        Reading(limit),
        options=ExecutorOptions(executor="spark", spark_master=options.spark_master, concurrency=concurrency),
        on_result=spans.append,
    )
    seconds = max(end for _, end in spans) - min(began for began, _ in spans)
    assert sum(tasks) * (LIMIT // 8) / seconds <= 1.1 * LIMIT


def restored_in_a_second(options: RestoreOptions) -> float:
    """Restore, and return the bytes of files a second."""
    summary = restore(options)
    return summary.backup_size / summary.step_seconds["ingest"]


def test_a_restore_holds_the_limit_and_lifts_it(live: LiveCluster, tmp_path: Path) -> None:
    """Downloads of a store share the limit; afterwards it is lifted, also when the restore fails."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    backup(BackupOptions(live.config, place, engine="store"))
    with live_cluster(tmp_path / "target", ApiVersion.V1, stores=1) as target:
        reported = target.fail("SetDownloadSpeedLimit", {"delay": {"seconds": 0.0}}, count=-1)
        options = RestoreOptions(target.config, place, rate_limit=LIMIT, allow_overwrite=True)
        holds(lambda limit: restored_in_a_second(structs.replace(options, rate_limit=limit)))
        before = target.hits(reported)
        assert before % 2 == 0
        target.fail("Download", {"abort": {"code": "UNIMPLEMENTED", "details": "no such call"}}, count=-1)
        with pytest.raises(TikvBrError):
            restore(options)
        assert target.hits(reported) == before + 2


def run_backup(options: BackupOptions) -> int:
    """Back up in a process of its own; its exit code."""
    try:
        backup(options)
    except Failure as error:
        return error.exit_code
    return 0


@pytest.mark.usefixtures("many_tasks")
@pytest.mark.parametrize("engine", ["store", "scan"])
def test_sigterm_ends_a_limited_backup_within_seconds(live: LiveCluster, tmp_path: Path, engine: str) -> None:
    """Running tasks end, also while they wait for their share of the limit."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    options = BackupOptions(live.config, place, rate_limit=MIB // 50, engine=engine, executor="driver")  # type: ignore[arg-type]
    with Forks(__name__, "tikv_br.cluster.cluster", "tikv_br.cluster.scan") as forks:
        pid = forks.start(partial(run_backup, options))
        eventually((tmp_path / "backup" / "tikv-br" / "run.json").exists)
        time.sleep(2)
        os.kill(pid, signal.SIGTERM)
        reported = time.monotonic()
        assert forks.wait() == Terminated.exit_code
        assert time.monotonic() - reported < 60  # far less than the 150 s that the limit would take for the rest


def test_uploads_hold_the_limit(live: LiveCluster, tmp_path: Path) -> None:
    """Uploads from this machine to a store share the limit."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    backup(BackupOptions(live.config, place, engine="store"))
    with live_cluster(tmp_path / "target", ApiVersion.V1, stores=1) as target:
        options = RestoreOptions(target.config, place, rate_limit=LIMIT, allow_overwrite=True, via=Via.UPLOAD)
        holds(lambda limit: restored_in_a_second(structs.replace(options, rate_limit=limit)))


def test_a_spark_cluster_must_say_among_how_many_tasks_it_is_divided(tmp_path: Path) -> None:
    """Without --concurrency nobody knows how many tasks read from a store at once."""
    place = StorageLocation("local", str(tmp_path))
    config = ClusterConfig(("127.0.0.1:1",))
    options = BackupOptions(config, place, rate_limit=1, executor="spark", spark_master="spark://host:7077")
    with pytest.raises(UsageError, match="--concurrency"):
        options.check()
    structs.replace(options, concurrency=8).check()
    structs.replace(options, spark_master="local[4]").check()
