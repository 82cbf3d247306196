"""Plans the intervals and runs the tasks of the chosen engine. For the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tikv_br.backup.context import BackupContext
from tikv_br.backup.plan import Interval, plan_intervals, task_bytes
from tikv_br.backup.store_task import run_store_task
from tikv_br.backup.task import BackupJob, Task, TaskResult
from tikv_br.cluster import versions
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.regions import RegionColumns
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, gaps
from tikv_br.tasks.executor import ExecutorOptions, run_tasks
from tikv_br.tasks.task import TaskContext


def make_plan(context: BackupContext) -> None:
    """Divide the remaining ranges into tasks of about equal size, by PD's estimates."""
    codec, done = KeyCodec(context.conversion.source), [each.interval for each in context.finished]
    remaining = [(whole, gaps(whole, done)) for whole in context.source_ranges]
    context.plan = plan_by_regions(context.cluster, codec, remaining, context.engine.slots)
    if context.plan:
        context.engine = context.engine.settle_executor(context.options, context.plan)


def plan_by_regions(
    cluster: Cluster, codec: KeyCodec, wanted: Iterable[tuple[KeyRange, Sequence[KeyRange]]], slots: int
) -> list[Interval]:
    """Divide parts of RPC ranges, each given with its range, into tasks of about equal size, by PD's estimates.

    ``slots``: concurrent tasks. PD is asked once for each range that has parts.
    """
    sized: list[tuple[KeyRange, RegionColumns]] = []
    for whole, parts in wanted:
        if parts:
            regions = cluster.pd_http.regions(codec.bound(whole.start), codec.bound(whole.end))
            sized += [(part, regions.overlapping(codec.bound(part.start), codec.bound(part.end))) for part in parts]
    task_size = task_bytes(sum(regions.total_bytes for _, regions in sized), slots)
    return [
        interval
        for part, regions in sized
        for interval in plan_intervals(regions, codec, part.start, part.end, task_size)
    ]


def copy(context: BackupContext) -> None:
    """Copy all intervals of the plan. Raises the first error of a task."""
    copy_intervals(context, context.plan)


def copy_intervals(context: BackupContext, plan: Sequence[Interval]) -> None:
    """Copy intervals. Raises the first error of a task."""
    if not plan:
        return
    options, engine = context.options, context.engine
    rate_limit = RateLimit(options.rate_limit).share(engine.executor, engine.slots, len(plan))
    job = BackupJob(
        context.first_run,
        options,
        context.conversion,
        rate_limit,
        engine.rewrites_files,
        all(versions.supports(store.version, versions.EXPIRY_PROPERTIES) for store in context.info.stores),
    )
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
        planned_bytes=[interval.size for interval in plan],
    )
