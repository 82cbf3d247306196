"""The work of the scan engine, from the driver's side: plan the intervals and have tasks copy them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tikv_br.backup.context import BackupContext
from tikv_br.backup.plan import RegionSize, plan_intervals, task_bytes
from tikv_br.backup.scan_task import ScanJob, ScanTask, run_scan_task
from tikv_br.cluster.cluster import Cluster
from tikv_br.spark.executor import ExecutorOptions, run_tasks

REGION_PAGE = 4096
"""Regions held as objects at a time."""
UNKNOWN_REGION_BYTES = 96 << 20
"""For a region that PD has not measured yet: the size at which regions split."""


def plan(context: BackupContext) -> None:
    """Cut the range into tasks of about equal bytes, by PD's estimates."""
    codec, whole = context.converter.source, context.source_range
    regions = list(region_sizes(context.cluster, codec.bound(whole.start), codec.bound(whole.end)))
    wanted = task_bytes(sum(region.size for region in regions), context.options.slots)
    context.plan = plan_intervals(regions, codec, whole.start, whole.end, wanted)


def region_sizes(cluster: Cluster, start: bytes, end: bytes) -> Iterator[RegionSize]:
    """The regions that overlap physical range ``[start, end)``, in order; a page of them in memory at a time."""
    sizes = cluster.pd_http.region_sizes()
    done = False
    while not done:
        page = cluster.pd.scan_regions(start, end, REGION_PAGE)
        for region in page:
            size = sizes.get(region.id)
            yield RegionSize(region.start, UNKNOWN_REGION_BYTES if size is None else size.bytes)
        start = page[-1].end
        done = not start or bool(end and start >= end)


def scan(context: BackupContext) -> None:
    """Have every interval copied. Raises the first error that a task ends with."""
    options = context.options
    job = ScanJob(
        cluster=options.cluster,
        storage=options.storage,
        converter=context.converter,
        compression=options.compression,
        compression_level=options.compression_level,
        file_bytes=options.file_bytes,
        with_ttl=context.with_ttl,
    )
    tasks = [ScanTask(interval.start, interval.end) for interval in context.plan]
    run_tasks(
        tasks,
        partial(run_scan_task, job),
        options=ExecutorOptions(options.executor, options.spark_master, _concurrency(context)),
        on_result=context.took,
        name_of=str,
        reporter=context.reporter,
        expected_task_bytes=sum(interval.size for interval in context.plan) // len(tasks),
    )


def _concurrency(context: BackupContext) -> int | None:
    """Threads of the driver share one interpreter: more than processors gain nothing."""
    options = context.options
    return options.slots if options.executor == "driver" else options.concurrency
