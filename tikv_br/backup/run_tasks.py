"""Plans the intervals and runs the tasks of the chosen engine. For the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from formats.keys.codec import KeyCodec
from formats.keys.ranges import KeyRange, gaps
from tikv_br.backup.context import BackupContext
from tikv_br.backup.plan import Interval, SizedRegion, overlapping, plan_intervals, task_bytes
from tikv_br.backup.store_task import run_store_task
from tikv_br.backup.task import BackupJob, Task, TaskResult
from tikv_br.cluster import pd_http
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.spark.executor import ExecutorOptions, run_tasks
from tikv_br.spark.task import TaskContext

REGION_PAGE = 4096
"""Regions per request to PD; only one page is in memory."""
UNKNOWN_REGION_BYTES = 96 << 20
"""Assumed size of a region whose size PD does not know yet: the default split size."""


def make_plan(context: BackupContext) -> None:
    """Divide the remaining ranges into tasks of about equal size, by PD's estimates."""
    codec, sizes = KeyCodec(context.conversion.source), context.cluster.pd_http.region_sizes()
    done = [entry.interval for entry in context.entries]
    parts: list[tuple[KeyRange, Sequence[SizedRegion]]] = []
    for whole in context.source_ranges:
        if remaining := gaps(whole, done):
            regions = list(sized_regions(context.cluster, sizes, codec.bound(whole.start), codec.bound(whole.end)))
            parts += [(gap, overlapping(regions, codec.bound(gap.start), codec.bound(gap.end))) for gap in remaining]
    if not parts:
        return
    wanted = task_bytes(sum(region.size for _, regions in parts for region in regions), context.engine.slots)
    context.plan = [
        interval for gap, regions in parts for interval in plan_intervals(regions, codec, gap.start, gap.end, wanted)
    ]
    context.engine = context.engine.settle_executor(context.options, context.plan)


def sized_regions(
    cluster: Cluster, sizes: Mapping[int, pd_http.RegionSize], start: bytes, end: bytes
) -> Iterator[SizedRegion]:
    """The regions that overlap ``[start, end)``, which are region bounds as PD encodes them, in order; reads them page by page."""
    done = False
    while not done:
        page = cluster.pd.scan_regions(start, end, REGION_PAGE)
        for region in page:
            size = sizes.get(region.id)
            yield SizedRegion(region.start, UNKNOWN_REGION_BYTES if size is None else size.bytes)
        start = page[-1].end
        done = not start or bool(end and start >= end)


def copy(context: BackupContext) -> None:
    """Copy all intervals of the plan. Raises the first error of a task."""
    copy_intervals(context, context.plan)


def copy_intervals(context: BackupContext, plan: Sequence[Interval]) -> None:
    """Copy intervals. Raises the first error of a task."""
    if not plan:
        return
    options, engine = context.options, context.engine
    rate_limit = RateLimit(options.rate_limit).share(engine.executor, engine.slots, len(plan))
    job = BackupJob(context.first_run, options, context.conversion, rate_limit, engine.rewrites_files)
    if engine.name == "store":
        run_task = run_store_task
    else:
        from tikv_br.backup.scan import run_scan_task as run_task  # loads Arrow and numpy: after the checks
    run_backup_tasks(context, plan, partial(run_task, job))


def run_backup_tasks(
    context: BackupContext, plan: Sequence[Interval], function: Callable[[Task, TaskContext], TaskResult]
) -> None:
    """Run a task for each interval, and add the results to the context. Raises the first error of a task."""
    options, engine = context.options, context.engine
    context.confirm_locks()
    tasks = [Task(interval.start, interval.end) for interval in plan]
    context.session_seconds += run_tasks(
        tasks,
        function,
        options=ExecutorOptions(
            engine.executor,
            options.spark_master,
            engine.slots if engine.executor == "driver" else options.concurrency,
            options.spark_settings,
        ),
        on_result=context.add_result,
        name_of=str,
        reporter=context.report,
        shared=[context.clusters],
        expected_task_bytes=sum(interval.size for interval in plan) // len(tasks),
    )
