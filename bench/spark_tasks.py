"""What Spark costs beside the work: the start of a session, the first task of a worker, each task after, bytes sent to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from bench.harness import Figure, Goal, Scale, Spread
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.tasks.executor import ExecutorOptions, run_tasks
from tikv_br.tasks.task import TaskContext

BENCH = "Spark tasks"
CORES = 2
MOST_CLOSURE_BYTES = 100 << 10


def figures(scale: Scale) -> Iterator[Figure]:
    """Sessions of two local threads, each with one job of empty tasks."""
    runs = [_run(scale.spark_tasks) for _ in range(scale.process_rounds)]
    case = f"{scale.spark_tasks:,} empty tasks"
    for subject, unit, values in (
        ("session start", "s", [run[0] for run in runs]),
        ("until the first task ends", "s", [run[1] for run in runs]),
        ("each further task", "ms", [run[2] for run in runs]),
    ):
        yield Figure(BENCH, case, subject, unit, Spread.of(values), len(runs))
    goal = Goal("value", at_most=MOST_CLOSURE_BYTES)
    yield Figure(BENCH, case, "closure", "bytes", Spread.of([float(closure_bytes())]), 1, goal=goal)


def nothing(task: KeyRange, context: TaskContext) -> int:
    """Do no work."""
    del task
    return context.index


def _run(count: int) -> tuple[float, float, float]:
    """Seconds until the session stood, from then to the first result, and milliseconds of a core for each further task."""
    tasks = [KeyRange(b"%06d" % number, b"%06d" % (number + 1)) for number in range(count)]
    ended: list[float] = []
    began = time.monotonic()
    session = run_tasks(
        tasks,
        nothing,
        options=ExecutorOptions(executor="spark", spark_master=f"local[{CORES}]"),
        on_result=lambda _index: ended.append(time.monotonic()),
    )
    each = (ended[-1] - ended[0]) / max(count - 1, 1) * CORES * 1000
    return session, ended[0] - began - session, max(each, 1e-6)


def closure_bytes() -> int:
    """Bytes of what every task of a backup by scans is sent with, pickled as Spark does it: twice as much text as is usual."""
    from pyspark import cloudpickle

    from tikv_br.backup.scan import run_scan_task
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.dataflow.convert import Conversion
    from tikv_br.dataflow.options import BackupOptions
    from tikv_br.dataflow.write import BackupJob
    from tikv_br.formats.api_version import ApiVersion
    from tikv_br.storage.url import StorageLocation
    from tikv_br.tasks.channel import ChannelAddress
    from tikv_br.tasks.executor import _run_one
    from tikv_br.tasks.session import by_value

    options = BackupOptions(
        cluster=ClusterConfig(pd=("pd-with-a-long-name.somewhere.example:2379",) * 5),
        storage=StorageLocation("local", "/a/folder" * 20),
    )
    job = BackupJob("r" * 32, options, Conversion(ApiVersion.V1, ApiVersion.V2))
    address = ChannelAddress("driver.somewhere.example", 65_535, b"k" * 32)
    dumps: Callable[[object], bytes] = cloudpickle.dumps
    return len(dumps(by_value(partial(map, partial(_run_one, partial(run_scan_task, job), address)))))
