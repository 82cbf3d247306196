"""The steps from the split of the target to its comparison with the backup: limit downloads, transfer the rows, compare.

A restore by puts reads rows and writes them with RawBatchPut, as any client does. The cluster gives the rows new timestamps (API V2), and change feeds report them. Each batch is a Raft entry, so this is many times
slower than an ingest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial, reduce
from itertools import chain

from msgspec import Struct

from tikv_br import run_id
from tikv_br.cancellation import run_on_threads
from tikv_br.cluster.cluster import ClusterPool, refuse_beyond
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.import_mode import DownloadLimit
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.split import scatter, split_at
from tikv_br.cluster.timestamps import show_ts
from tikv_br.compare.files import BackgroundComparison, BackupComparison, Comparison, FilePart
from tikv_br.errors import BackupDamaged, ChecksumMismatch, ClusterError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.limits import RowLimits
from tikv_br.progress_events import Notice
from tikv_br.report.facts import counted
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.ingest import IngestJob, ingest_part
from tikv_br.restore.options import Mode, Restamp, Via
from tikv_br.restore.plan import IngestResult, split_keys
from tikv_br.restore.record import RestoreRecord
from tikv_br.restore.resume import forget_if_different, save_checkpoint
from tikv_br.restore.target import comparison_of, gaps_of, raw_comparison_of
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.credentials import to_backend, to_cipher_info
from tikv_br.tasks.executor import choose_executor, run_tasks
from tikv_br.tasks.task import TaskContext

CHUNK_ROWS = 16_384
"""Rows per progress report."""


class PutJob(Struct, frozen=True):
    """Parameters that all tasks of a restore share. Picklable."""

    cluster: ClusterConfig
    api_version: ApiVersion
    store: ObjectStore
    limits: RowLimits
    record: RestoreRecord | None = None
    """Record of finished parts."""


def put_part(job: PutJob, part: FilePart, context: TaskContext) -> IngestResult:
    """Put the rows of one part that have not expired yet, with their remaining TTL.

    Raises `BackupDamaged` and `BackupUnsupported` naming the file, `StorageError`, `ClusterError`.
    """
    from tikv_br.formats import columns

    rows, span = part.rows(job.store, job.api_version)
    writer = context.shared(ClusterPool).get(job.cluster).raw(rows.target.keyspace_id).column_writer()
    put = expired = 0
    for chunk in chain.from_iterable(columns.slices(page, CHUNK_ROWS) for page in rows.pages(span)):
        refuse_beyond(job.limits, chunk, rows.target)
        chunk_expired = int(writer.put_rows(chunk).sum())
        put += chunk.num_rows - chunk_expired
        expired += chunk_expired
        context.report(data_bytes=chunk.nbytes, keys=chunk.num_rows - chunk_expired)
    if job.record is not None:
        job.record.add(part.span)
    return IngestResult(put=put, expired=expired)


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
        slow_seconds=limit.seconds(
            options.concurrency * largest
        ),  # at worst all transfers are at one store, and share its limit
        new_timestamp=context.restamp_ts,
        fenced=frozenset(name for name, facts in context.facts.items() if facts.fences),
        record=context.record,
        limits=context.cluster.row_limits(context.codec) if context.codec.mode is KeyMode.RAW else None,
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
    backup, limits = context.backup, context.cluster.row_limits(context.codec)
    job = PutJob(context.options.cluster, backup.api_version, backup.store, limits, context.record)
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


SAME_COMMAND = "The same command restores all rows again."


@forget_if_different
def compare(context: RestoreContext) -> None:
    """Compare the cluster with the backup; rows that newer deletes hide are ingested again."""
    comparison = raw_comparison_of(context)
    try:
        compare_all(context, comparison)
    except ChecksumMismatch as error:
        if not ingest_hidden(context, comparison):
            raise ChecksumMismatch(error.message, hint=_hint(context, error)) from None
        try:
            compare_all(context, comparison)
        except ChecksumMismatch as again:
            hint = "Stop all clients that delete or write these keys in the target, then run the same command again."
            raise ChecksumMismatch(again.message, hint=hint) from None


def compare_all(context: RestoreContext, comparison: Comparison) -> None:
    """Find the checksum of all parts, and other rows. Parts that were found equal during the ingest are not compared again."""
    equal: dict[tuple[str, KeyRange], Checksum] = {}
    if context.comparing is not None:
        equal = context.comparing.finish()
        context.comparing = None
    left = [part for part in context.parts if (part.file.name, part.span) not in equal]
    found = comparison.require_all_equal(left, context.options.concurrency)
    context.found = reduce(Checksum.merge, equal.values(), found)
    if context.options.allow_overwrite:
        context.others.update({("", gap): comparison.count_rows(gap) for gap in gaps_of(context)})


def ingest_hidden(context: RestoreContext, comparison: BackupComparison) -> bool:
    """Ingest the parts again, with a newer timestamp, whose rows newer deletes hide; False if anything else differs.

    Raises `ChecksumMismatch` if rows are to keep their own timestamps.
    """
    options = context.options
    if options.mode is not Mode.INGEST or context.backup.api_version is not ApiVersion.V2:
        return False
    ts = 0
    if options.restamp is not Restamp.NEVER:
        ts = context.cluster.pd.tso()
        context.cluster.flush_timestamps()  # what clients write from now on is newer than these rows
    parts, rows = _hidden(context, comparison)
    if not parts:
        return False
    found = f"newer deletes of the same keys in the target hide {counted(rows, 'restored row')}"
    if not ts:
        raise ChecksumMismatch(
            f"{found}: with --restamp never, restored rows keep their older timestamps",
            hint="Run the same command again with --restamp auto: all rows are restored again with a new timestamp, and become visible.",
        )
    context.reporter(Notice(f"{found}: these rows are ingested again with the new timestamp {show_ts(ts)}"))
    context.restamp_ts = ts
    save_checkpoint(context)
    todo, done, context.todo = context.todo, context.done, parts
    limit_downloads(context)
    while_locked(ingest)(context)
    or_notice(lift_limit)(context)
    context.todo, context.done = todo, done
    return True


def _hidden(context: RestoreContext, comparison: BackupComparison) -> tuple[list[FilePart], int]:
    """The parts that differ, and how many of their rows newer deletes hide; none if anything else differs."""
    threads = context.options.concurrency
    answers = run_on_threads(comparison.compare, context.parts, threads, "compare")
    parts = [part for part, (_, difference) in zip(context.parts, answers, strict=True) if difference]
    rows = run_on_threads(comparison.hidden_rows, parts, threads, "compare")
    return (parts, sum(rows)) if all(rows) else ([], 0)


def _hint(context: RestoreContext, mismatch: ChecksumMismatch) -> str:
    hint = f"{mismatch.hint} {SAME_COMMAND}"
    if context.options.allow_overwrite and context.options.mode is Mode.INGEST and not context.restamp_ts:
        hint = f"{hint} If the backup's rows must replace newer rows of the target, pass --restamp always."
    return hint
