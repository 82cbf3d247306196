"""The online alternative: tasks of Spark put the sorted rows, as any client does.

The rows are counted and checked first, kept on the disks of the executors, and put from there. Puts are idempotent: a task or a load that
is run again puts its rows again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tikv_br.backupset.coverage import describe_ranges
from tikv_br.bulk_load.partition import RowCleaner
from tikv_br.bulk_load.stage import StageContext, check_rows, stage_steps
from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.cluster.cluster import ClusterPool, first_rpc_key
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.txnkv import refuse_transactions
from tikv_br.errors import ChecksumMismatch, TargetNotEmpty, TaskFailed
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import show_both
from tikv_br.progress_events import Notice
from tikv_br.report.facts import counted
from tikv_br.steps import FunctionStep, Step
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.cluster.puts import ColumnWriter

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
            size = -(-rows.num_rows // job.threads)
            parts = [rows.slice(first, size) for first in range(0, rows.num_rows, size)]
            left_out = sum(pool.map(partial(_put, writer), parts))
            added = checksum(rows["key"], rows["value"], job.codec.prefix)
            sums, expired = sums + added, expired + left_out
            expiries = columns.numbers(rows["expire_ts"])
            if expiries.any():
                first = int(expiries[expiries > 0].min())
                first_expiry = min(first_expiry or first, first)
            context.report(data_bytes=added.total_bytes, keys=added.total_kvs - left_out)
    first_key = partition.sample[0] if partition.sample else b""
    return PutResult(sums, expired, first_key, partition.last_key or b"", first_expiry)


def _put(writer: ColumnWriter, rows: pa.RecordBatch) -> int:
    from tikv_br.formats import columns

    return int(writer.put(rows["key"], rows["value"], columns.numbers(rows["expire_ts"])).sum())


def compare_checksums(context: PutContext) -> None:
    """Compare the stores' checksums with those of the rows, partition by partition, up to the first key of the next one.

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
