"""The work from the driver's side: plan the intervals and have tasks of the chosen engine copy them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from formats.keys import KeyCodec
from formats.sst.compression import Compression
from tikv_br.backup.context import BackupContext
from tikv_br.backup.options import BackupOptions
from tikv_br.backup.plan import RegionSize, overlapping, plan_intervals, task_bytes
from tikv_br.backup.rewrite import Rewriter
from tikv_br.backup.row_writer import FileForm
from tikv_br.backup.scan_task import ScanJob, run_scan_task
from tikv_br.backup.store_task import StoreJob, run_store_task
from tikv_br.backup.task import Task, TaskResult
from tikv_br.backupset.coverage import KeyRange, missing
from tikv_br.cluster import pd_http
from tikv_br.cluster.cluster import Cluster
from tikv_br.spark.executor import ExecutorOptions, for_steering, run_tasks
from tikv_br.spark.task import TaskContext

REGION_PAGE = 4096
"""Regions held as objects at a time."""
PASSING_COMPRESSION = Compression.LZ4
"""Of stores' files that are read once and removed."""
UNKNOWN_REGION_BYTES = 96 << 20
"""For a region that PD has not measured yet: the size at which regions split."""


def plan(context: BackupContext) -> None:
    """Cut what is left to do into tasks of about equal bytes, by PD's estimates."""
    codec, sizes = KeyCodec(context.conversion.source), context.cluster.pd_http.region_sizes()
    done = [entry.interval for entry in context.entries]
    parts: list[tuple[KeyRange, Sequence[RegionSize]]] = []
    for whole in context.source_ranges:
        if holes := missing(whole, done):
            regions = list(region_sizes(context.cluster, sizes, codec.bound(whole.start), codec.bound(whole.end)))
            parts += [(hole, overlapping(regions, codec.bound(hole.start), codec.bound(hole.end))) for hole in holes]
    if not parts:
        return
    wanted = task_bytes(sum(region.size for _, regions in parts for region in regions), context.engine.slots)
    context.plan = [
        interval for hole, regions in parts for interval in plan_intervals(regions, codec, hole.start, hole.end, wanted)
    ]
    # A rate limit is kept exactly where all tasks share one process, and no hurry is needed then.
    if context.engine.steers and context.options.executor == "auto" and not context.options.rate_limit:
        context.engine = replace(context.engine, executor=for_steering(len(context.plan)))


def region_sizes(
    cluster: Cluster, sizes: Mapping[int, pd_http.RegionSize], start: bytes, end: bytes
) -> Iterator[RegionSize]:
    """The regions that overlap physical range ``[start, end)``, in order; a page of them in memory at a time."""
    done = False
    while not done:
        page = cluster.pd.scan_regions(start, end, REGION_PAGE)
        for region in page:
            size = sizes.get(region.id)
            yield RegionSize(region.start, UNKNOWN_REGION_BYTES if size is None else size.bytes)
        start = page[-1].end
        done = not start or bool(end and start >= end)


def copy(context: BackupContext) -> None:
    """Have every interval copied. Raises the first error that a task ends with."""
    options, engine = context.options, context.engine
    if not context.plan:
        return
    context.confirm_held()
    tasks = [Task(interval.start, interval.end) for interval in context.plan]
    context.session_seconds = run_tasks(
        tasks,
        _store_tasks(context) if engine.name == "store" else _scan_tasks(context),
        options=ExecutorOptions(
            engine.executor,
            options.spark_master,
            engine.slots if engine.executor == "driver" else options.concurrency,
        ),
        on_result=context.took,
        name_of=str,
        reporter=context.report,
        expected_task_bytes=sum(interval.size for interval in context.plan) // len(tasks),
    )


def _scan_tasks(context: BackupContext) -> Callable[[Task, TaskContext], TaskResult]:
    options = context.options
    job = ScanJob(
        run=context.first_run,
        cluster=options.cluster,
        storage=options.storage,
        conversion=context.conversion,
        form=_form(options),
        file_bytes=options.file_bytes,
        with_ttl=context.with_ttl,
        rate_limit=context.engine.share_of(options.rate_limit, len(context.plan)),
    )
    return partial(run_scan_task, job)


def _store_tasks(context: BackupContext) -> Callable[[Task, TaskContext], TaskResult]:
    options, conversion = context.options, context.conversion
    job = StoreJob(
        run=context.first_run,
        cluster=options.cluster,
        storage=options.storage,
        conversion=conversion,
        with_ttl=context.with_ttl,
        with_source_sums=options.checksum,
        compression=options.compression,
        compression_level=options.compression_level,
        concurrency=options.concurrency or 0,
        send_credentials=options.send_credentials,
        rate_limit=context.engine.share_of(options.rate_limit, len(context.plan)),
    )
    if context.engine.rewrites:
        job = replace(
            job,
            conversion=conversion.unchanged,
            compression=PASSING_COMPRESSION,
            compression_level=0,
            rewriter=Rewriter(conversion, _form(options), options.file_bytes),
        )
    return partial(run_store_task, job)


def _form(options: BackupOptions) -> FileForm:
    return FileForm(options.file_kind, options.compression, options.compression_level)
