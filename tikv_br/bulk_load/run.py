"""Run a bulk load from its options to its summary: stage the rows as a temporary backup and restore it, or put them.

An ingest that was killed at any moment is continued by the same command: an unfinished staging is redone, a finished one is restored,
which resumes. Puts begin again.

With `--mode put` tasks put the sorted rows instead, as any client does, which needs no ingest. The rows are counted and checked first, kept on the disks of the executors,
and put from there. Puts are idempotent: a task or a load that is run again puts its rows again.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

from tikv_br.backupset import layout
from tikv_br.backupset.coverage import describe_ranges, keyspace_codec
from tikv_br.bulk_load.partition import EXAMPLES, RowCleaner
from tikv_br.bulk_load.stage import StageContext, StageOptions, check_rows, stage_steps
from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.cluster.cluster import Cluster, ClusterPool, first_rpc_key
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.keyspaces import chosen_keyspace
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.txnkv import refuse_transactions
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.run import abort_backup, open_temporary, remove_temporary, run_backup
from tikv_br.errors import (
    BackupPathInUse,
    ChecksumMismatch,
    Failure,
    StorageError,
    TargetNotEmpty,
    TaskFailed,
)
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, gaps
from tikv_br.formats.keys.text import show_both
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.report.facts import counted
from tikv_br.restore.options import DEFAULT_CONCURRENCY, Mode, RestoreOptions, Via
from tikv_br.restore.run import RestoreSummary, restore
from tikv_br.resume_options import MayChange, compared_as
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa


COMPARE_THREADS = 16


@dataclass(frozen=True, slots=True)
class LoadPutJob:
    """Parameters that all partitions share. Picklable."""

    cluster: ClusterConfig
    codec: KeyCodec
    now: int
    """Seconds since the epoch from which TTLs count."""
    threads: int
    """Number of concurrent requests of a task."""
    rate_limit: RateLimit


@dataclass(frozen=True, slots=True)
class PutResult:
    """Result of a partition. Keys are user keys."""

    rows: Checksum
    """Checksum of all rows, as the target's stores compute it."""
    expired: int
    """Rows that were not put, because their TTL had passed."""
    first_key: bytes
    last_key: bytes
    first_expiry: int
    """Earliest expiry of the rows, in seconds since the epoch; 0 = none expires."""


@dataclass
class PutContext(StageContext):
    """State of a load by puts."""

    concurrency: int = field(kw_only=True)
    """Maximum number of concurrent requests of all tasks."""
    rate_limit: int = field(kw_only=True)
    """Maximum rate per store, in bytes per second; 0 = unlimited."""
    allow_overwrite: bool = field(kw_only=True)
    done: list[PutResult] = field(default_factory=list)  # put; in the order of keys
    found: Checksum | None = None  # compare checksums


def put_steps(*, compare: bool) -> list[Step[PutContext]]:
    """The steps, in order. The target is unchanged until the last check has passed."""
    return [
        *stage_steps(dry_run=True),
        FunctionStep("check the rows", check_rows),
        FunctionStep("check the target", check_target),
        FunctionStep("put", put_rows),
        *([FunctionStep("compare checksums", compare_checksums)] if compare else []),
    ]


def check_target(context: PutContext) -> None:
    """Refuse a target with rows from the first to the last key, unless it is allowed. Raises `TargetNotEmpty`; `ClusterUnfit` for transactional data."""
    codec, results = context.codec, [each for each in context.results if each.rows.total_kvs]
    span = KeyRange(
        codec.rpc_key(min(each.first_key for each in results)),
        codec.rpc_key(max(each.last_key for each in results) + b"\0"),
    )
    refuse_transactions(context.cluster, span)
    first = None if context.allow_overwrite else first_rpc_key(context.cluster, codec.keyspace_id, span)
    if first is not None:
        raise TargetNotEmpty(
            f"the target is not empty in the range {describe_ranges(codec.api_version, [span])}: its first key there is "
            f"{show_both(codec.user_key(first))}",
            hint="Load into an empty range, or pass --allow-overwrite, also to continue a load by puts that was interrupted.",
        )


def put_rows(context: PutContext) -> None:
    """Put the rows that were counted."""
    slots = context.slots
    job = LoadPutJob(
        context.options.cluster,
        context.codec,
        context.base_time,
        max(context.concurrency // slots, 1),
        RateLimit(context.rate_limit).share(
            "driver" if context.runs is not None else "spark", slots, context.partitions
        ),
    )
    found = context.run_partitions(partial(put_partition, job))
    context.done = sorted((each for each in found if each.rows.total_kvs), key=lambda each: each.first_key)
    put, counted_before = (sum((each.rows for each in these), Checksum()) for these in (found, context.results))
    if put != counted_before:
        raise TaskFailed(
            f"{put.total_kvs:,} rows were put, but {counted_before.total_kvs:,} or others had been checked: the input has changed",
            hint="Run the same command again with --allow-overwrite, while nothing changes the input.",
        )


def put_partition(job: LoadPutJob, batches: Iterator[pa.RecordBatch], context: TaskContext) -> PutResult:
    """Put the rows of one partition; of each key the first. Raises `ClusterError`."""
    from tikv_br.formats import columns

    client = context.shared(ClusterPool).get(job.cluster).raw(job.codec.keyspace_id)
    writer = client.column_writer(rate_limit=job.rate_limit)
    partition, sums, expired, first_expiry = RowCleaner(job.now), Checksum(), 0, 0
    with ThreadPoolExecutor(job.threads, thread_name_prefix="put") as pool:
        for batch in batches:
            rows = partition.clean(batch)
            if not rows.num_rows:
                continue
            parts = columns.slices(rows, -(-rows.num_rows // job.threads))
            left_out = sum(int(each.sum()) for each in pool.map(writer.put_rows, parts))
            added = checksum(rows["key"], rows["value"], job.codec.prefix)
            sums, expired = sums + added, expired + left_out
            expiries = columns.numbers(rows["expire_ts"])
            if expiries.any():
                first = int(expiries[expiries > 0].min())
                first_expiry = min(first_expiry or first, first)
            context.report(data_bytes=added.total_bytes, keys=added.total_kvs - left_out)
    first_key = partition.sample[0] if partition.sample else b""
    return PutResult(sums, expired, first_key, partition.last_key or b"", first_expiry)


def compare_checksums(context: PutContext) -> None:
    """Compare the stores' checksums with the rows' checksums, partition by partition, up to the first key of the next one.

    Stores do not count rows that have expired: where there may be such, nothing is compared. Raises `ChecksumMismatch`.
    """
    client, codec = context.cluster.raw(context.codec.keyspace_id), context.codec
    cuts = [*(each.first_key for each in context.done), context.done[-1].last_key + b"\0"]
    parts = [KeyRange(*ends) for ends in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(COMPARE_THREADS, thread_name_prefix="compare") as pool:
        sums = list(pool.map(client.checksum, parts))
    passed = context.cluster.clock.now() + CLOCK_SECONDS
    expiring = [0 < each.first_expiry <= passed for each in context.done]
    for part, expected, found, skip in zip(parts, context.done, sums, expiring, strict=True):
        if not skip and found != expected.rows:
            span = codec.rpc_range(part)
            raise ChecksumMismatch(
                f"the target has {found.total_kvs:,} rows in {span} with checksum {found.crc64xor:016x}, expected are "
                f"{expected.rows.total_kvs:,} with {expected.rows.crc64xor:016x}",
                hint="Other clients may have written there, or the range had more keys before: then pass --no-checksum.",
            )
    if any(expiring):
        rows = sum(each.rows.total_kvs for each, skip in zip(context.done, expiring, strict=True) if skip)
        context.reporter(Notice(f"not compared, because some of them have expired: {counted(rows, 'row')}"))
        return
    context.found = sum(sums, Checksum())


NO_STAGING = StorageLocation("local", "/nonexistent")
"""Placeholder for the location of a load without staging; nothing opens it."""


class BulkLoadOptions(ExecutorOptions, frozen=True, kw_only=True):
    """Options of one bulk load; the executor reads the input."""

    cluster: Annotated[ClusterConfig, compared_as("identity")]
    staging: MayChange[StorageLocation | None]
    """Folder for the temporary backup, which gets a subfolder of its own; None with `Mode.PUT`."""
    stage: Annotated[StageOptions, compared_as("identity")]
    mode: MayChange[Mode] = Mode.INGEST
    via: MayChange[Via] = Via.AUTO
    concurrency: MayChange[int] = DEFAULT_CONCURRENCY
    """Number of files ingested in parallel, or of requests that put rows."""
    rate_limit: MayChange[int] = 0
    """Maximum rate per store of downloads, or of puts, in bytes per second; 0 = unlimited."""
    allow_overwrite: MayChange[bool] = False
    allow_followers: MayChange[bool] = False
    checksum: MayChange[bool] = True
    """Compare the cluster's checksums with the files' checksums afterwards."""
    send_credentials: MayChange[bool] = True
    keep_staging: MayChange[bool] = False
    resume: MayChange[bool] = True
    """Use a staging that an earlier run has finished."""
    lock_wait: MayChange[float] = 0.0
    dry_run: MayChange[bool] = False

    @property
    def location(self) -> StorageLocation:
        """Location of the temporary backup: the same for the same input, columns and target."""
        return NO_STAGING if self.staging is None else self.staging.child(self.stage.identity(self.cluster))


@dataclass(frozen=True, slots=True)
class BulkLoadSummary:
    """Result of a bulk load, or of a dry run. Bytes are of keys and values, before encoding."""

    total_kvs: int
    total_bytes: int
    crc64xor: int
    """Checksum of the loaded rows; 0 in a dry run."""
    verified: bool
    """True if the cluster's checksums were compared and equal."""
    other_kvs: int
    """Rows of the target's range that the input does not have, left alone; 0 if not compared."""
    input_rows: int | None
    """Rows of the input; None if an earlier run has read it."""
    bad_rows: int | None
    duplicate_rows: int | None
    """Rows with a key that another row has; they are not loaded."""
    duplicate_keys: list[str]
    """Some of their keys, in hex."""
    problems: dict[str, int]
    """Bad rows, by the problem."""
    bad_row_examples: list[str]
    """Some bad rows of CSV and JSON lines, with file, line and key."""
    hidden_files: int
    """Files left out, because a name on their path begins with ``_`` or ``.``."""
    sample_keys: list[str]
    """Some keys of a dry run, in hex."""
    expired_kvs: int
    """Rows that were not put, because they had expired; 0 for an ingest, which includes them."""
    engine: str
    """Value of `Mode`."""
    files: int
    resumed_files: int
    api_version: str
    cluster_id: int
    staging: str
    """URL of the temporary backup; ``""`` = none."""
    resumed_staging: bool
    """True if an earlier run had staged the rows."""
    dry_run: bool
    seconds: float
    average_speed: float
    """Bytes of keys and values per second."""
    session_seconds: float
    """Start-up time of Spark."""
    step_seconds: dict[str, float]


def bulk_load(options: BulkLoadOptions, reporter: Reporter = silent) -> BulkLoadSummary:
    """Load an input; returns when all rows are in the cluster and verified. Raises `TikvBrError`.

    `UsageError` for an input that cannot be loaded, and errors of a target that is away or not empty, are raised before the target changes.
    """
    began = time.monotonic()
    work = options.location
    if options.dry_run:
        return _summary(options, began, *_stage(options, reporter))
    if options.mode is Mode.PUT:
        return _summary(options, began, *_put(options, reporter))
    store = open_store(work)
    if not options.resume and exists(store, layout.META):
        remove_temporary(store)
    context, timings = None, dict[str, float]()
    if exists(store, layout.META):
        _check_staged(options, store)
        reporter(Notice(f"resuming: {work} already has the rows"))
    else:
        if not exists(store, layout.RUN):
            abort_backup(work, None, options.lock_wait)  # what an interrupted `remove_temporary` left
        context, timings = _stage(options, reporter)
    done = restore(
        RestoreOptions(
            cluster=options.cluster,
            storage=work,
            via=options.via,
            concurrency=options.concurrency,
            allow_overwrite=options.allow_overwrite,
            allow_followers=options.allow_followers,
            by_name=False,
            command="load raw",
            checksum=options.checksum,
            rate_limit=options.rate_limit,
            send_credentials=options.send_credentials,
            resume=options.resume,
            lock_wait=options.lock_wait,
            executor=ExecutorOptions(executor="driver", concurrency=options.concurrency),
        ),
        reporter,
    )
    if not options.keep_staging:
        remove_temporary(store)
    return _summary(options, began, context, timings, done)


def _check_staged(options: BulkLoadOptions, store: ObjectStore) -> None:
    """Raise `BackupPathInUse` if what is staged is no staging, or has rows of other keyspaces than the one of the load."""
    found = open_temporary(store)
    with Cluster.connect(options.cluster) as cluster:
        codec = keyspace_codec(cluster.api_version, chosen_keyspace(cluster, options.stage.keyspace), "--keyspace")
    if outside := next((each for each in found.ranges if gaps(each, [codec.rpc_range()])), None):
        raise BackupPathInUse(
            f"what is staged at {store.location} is not of this load: it has rows of {outside}",
            hint="Pass --no-resume to remove it and to start over, or another --staging.",
        )


def _stage(options: BulkLoadOptions, reporter: Reporter) -> tuple[StageContext, dict[str, float]]:
    """Stage the rows, or count them in a dry run; also returns the seconds of each step."""
    try:
        with contextlib.ExitStack() as stack:
            output = _output(options, dry_run=options.dry_run)
            context = StageContext(output, reporter, listed=False, stage=options.stage, stack=stack)
            report = run_backup(context, stage_steps(dry_run=options.dry_run))
    except Failure:
        if options.location.scheme == "local":
            with contextlib.suppress(StorageError):  # removes folders that are empty, and no file of another run
                open_store(options.location).sweep("", deep=True, older_than=math.inf)
        raise
    return context, report.summary.step_seconds


def _put(options: BulkLoadOptions, reporter: Reporter) -> tuple[PutContext, dict[str, float]]:
    with contextlib.ExitStack() as stack:
        context = PutContext(
            _output(options, dry_run=True),
            reporter,
            listed=False,
            stage=options.stage,
            stack=stack,
            reread=True,
            concurrency=options.concurrency,
            rate_limit=options.rate_limit,
            allow_overwrite=options.allow_overwrite,
        )
        report = run_backup(context, put_steps(compare=options.checksum))
    return context, report.summary.step_seconds


def _output(options: BulkLoadOptions, *, dry_run: bool) -> BackupOptions:
    """Options of the steps that read the input; a dry run writes no files."""
    return BackupOptions(
        cluster=options.cluster,
        storage=options.location,
        executor=options.executor,
        spark_master=options.spark_master,
        spark_settings=options.spark_settings,
        lock_wait=options.lock_wait,
        no_resume=True,
        dry_run=dry_run,
    )


def _summary(
    options: BulkLoadOptions,
    began: float,
    context: StageContext | None,
    timings: dict[str, float],
    done: RestoreSummary | None = None,
) -> BulkLoadSummary:
    """``context`` is the state of the steps that read the input; None = an earlier run has staged the rows."""
    seconds = time.monotonic() - began
    results = context.results if context else []
    put = context.done if isinstance(context, PutContext) else []
    staged, written = (sum((each.rows for each in these), Checksum()) for these in (results, put))
    expired, bad = sum(each.expired for each in put), context.problems if context else Counter[str]()
    rows, size = staged.total_kvs - expired, staged.total_bytes
    if done is not None:
        rows, size = done.total_kvs, done.total_bytes
    sample = sorted(key for each in results for key in each.sample)[:EXAMPLES] if options.dry_run else []
    return BulkLoadSummary(
        total_kvs=rows,
        total_bytes=size,
        crc64xor=done.crc64xor if done else written.crc64xor,
        verified=done.verified if done else isinstance(context, PutContext) and context.found is not None,
        other_kvs=done.other_kvs if done else 0,
        input_rows=staged.total_kvs + context.duplicates + bad.total() if context else None,
        bad_rows=bad.total() if context else None,
        duplicate_rows=context.duplicates if context else None,
        duplicate_keys=[key.hex() for key in context.duplicate_keys] if context else [],
        problems=dict(bad),
        bad_row_examples=context.bad_rows if context else [],
        hidden_files=context.hidden if context else 0,
        sample_keys=[key.hex() for key in sample],
        expired_kvs=expired,
        engine=options.mode.value,
        files=done.files if done else 0,
        resumed_files=done.resumed_files if done else 0,
        api_version=done.dst_api_version if done else context.info.api_version.label if context else "",
        cluster_id=done.cluster_id if done else context.info.cluster_id if context else 0,
        staging=options.location.redacted() if options.staging is not None else "",
        resumed_staging=context is None,
        dry_run=options.dry_run,
        seconds=round(seconds, 3),
        average_speed=round(size / max(seconds, 1e-9)),
        session_seconds=round(context.session_seconds, 3) if context else 0.0,
        step_seconds=timings | (done.step_seconds if done else {}),
    )
