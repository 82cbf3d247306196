"""Steps that split the target, limit downloads, and transfer the rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from tikv_br import run_id
from tikv_br.cluster.import_mode import DownloadLimit
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.split import scatter, split_at
from tikv_br.compare.files import BackgroundComparison, FilePart
from tikv_br.errors import (
    BackupDamaged,
    ClusterError,
)
from tikv_br.progress_events import Notice
from tikv_br.report.facts import counted
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.download import IngestJob
from tikv_br.restore.ingest import ingest_part
from tikv_br.restore.options import Via
from tikv_br.restore.plan import IngestResult, split_keys
from tikv_br.restore.put import PutJob, put_part
from tikv_br.restore.target import comparison_of
from tikv_br.storage.credentials import to_backend, to_cipher_info
from tikv_br.tasks.executor import choose_executor, run_tasks
from tikv_br.tasks.task import TaskContext


def or_notice(action: Callable[[RestoreContext], object]) -> Callable[[RestoreContext], None]:
    """Wrap an optional action: a `ClusterError` is reported, not raised, because its effects expire."""

    def act(context: RestoreContext) -> None:
        try:
            action(context)
        except ClusterError as error:
            context.reporter(Notice(error.message))

    return act


def while_locked(action: Callable[[RestoreContext], None]) -> Callable[[RestoreContext], None]:
    """Renew the lease before an action that only its holder may take. Raises `LeaseLost`, `StorageError`."""

    def act(context: RestoreContext) -> None:
        if context.lease is not None:
            context.lease.confirm()
        action(context)

    return act


def ingest(context: RestoreContext) -> None:
    """Have the stores download and ingest every part."""
    if context.announcer is not None:
        context.announcer.begin(context.restamp_ts)
    options, backup, tasks = context.options, context.backup, len(context.todo)
    limit = RateLimit(options.rate_limit)
    executor = options.executor.executor if options.executor.executor != "auto" else choose_executor(tasks)
    largest = max((part.totals.size for part in context.todo), default=0)
    job = IngestJob(
        cluster=options.cluster,
        api_version=backup.api_version,
        codec=context.codec,
        store=backup.store,
        via=context.via,
        backend=_backend(context),
        cipher_info=to_cipher_info(backup.store.location).SerializeToString(),
        upload_limit=limit.share(executor, options.concurrency, tasks),
        slow_seconds=limit.seconds(options.concurrency * largest),  # concurrent transfers share a store's limit
        new_timestamp=context.restamp_ts,
        fenced=frozenset(name for name, facts in context.facts.items() if facts.fences),
        record=context.record,
    )
    _run(context, partial(ingest_part, job))


def _backend(context: RestoreContext) -> bytes:
    """The address of the files for the stores; empty if they do not read them."""
    options = context.options
    if context.via is Via.UPLOAD:
        return b""
    return to_backend(context.backup.store.location, send_credentials=options.send_credentials).SerializeToString()


def put(context: RestoreContext) -> None:
    """Read every part and put its rows."""
    job = PutJob(context.options.cluster, context.backup.api_version, context.backup.store, context.record)
    _run(context, partial(put_part, job))


def _run(context: RestoreContext, transfer: Callable[[FilePart, TaskContext], IngestResult]) -> None:
    """Run a task per part. Each restored part is compared in the background while others are restored."""
    parts, options = context.todo, context.options
    if options.checksum:
        context.comparing = BackgroundComparison(comparison_of(context), options.concurrency)
    done = 0

    def on_result(result: tuple[FilePart, IngestResult]) -> None:
        nonlocal done
        done += 1
        context.add_result(*result)

    try:
        context.session_seconds = run_tasks(
            parts,
            partial(_transfer_part, transfer),
            options=options.executor,
            on_result=on_result,
            name_of=str,
            reporter=context.reporter,
            shared=[context.clusters],
            planned_bytes=[part.totals.total_bytes for part in parts],
        )
    except BackupDamaged as error:
        error.hint = (
            f"The target already holds {done} of the {counted(len(parts), 'file')} to restore, and maybe rows of other files. "
            "Once `tikv-br verify` finds the backup sound, run the same command again to resume. "
            "To abandon the restore, delete the range and run `tikv-br backup abort --restores`."
        )
        raise
    if context.comparing is not None:
        context.overlap_seconds["compare checksums"] = context.comparing.seconds_until(time.monotonic())


def _transfer_part(
    transfer: Callable[[FilePart, TaskContext], IngestResult], part: FilePart, task: TaskContext
) -> tuple[FilePart, IngestResult]:
    return part, transfer(part, task)


SCATTER_SECONDS = 60.0
"""Seconds to wait for new regions to spread; without it a restore is only slower."""


def split(context: RestoreContext) -> None:
    """Split the target into regions of about 96 MiB, and scatter them so that all stores ingest at once."""
    keys = split_keys(context.todo, context.options.region_bytes)
    context.regions_made = split_at(context.cluster, context.codec, keys)
    if not context.regions_made:
        return
    try:
        left = scatter(context.cluster, context.regions_made, SCATTER_SECONDS)
    except ClusterError as error:  # an uneven cluster is no reason to fail a restore
        context.reporter(Notice(f"the new regions could not be scattered over the stores: {error.message}"))
        return
    if left:
        context.reporter(
            Notice(f"{len(left)} of {len(context.regions_made)} new regions were not moved to other stores")
        )


def limit_downloads(context: RestoreContext) -> None:
    """Set the download limit of every store; without --ratelimit, remove one that a killed restore has left."""
    name = f"tikv-br-restore-{run_id.current_or_new()}"
    context.download_limit = DownloadLimit(context.cluster, context.options.rate_limit, name)
    context.download_limit.start()


def lift_limit(context: RestoreContext) -> bool:
    """Remove the download limit, also after a failure. Returns whether there was one."""
    limit, context.download_limit = context.download_limit, None
    if limit is None:
        return False
    limit.stop()
    return context.options.rate_limit > 0
