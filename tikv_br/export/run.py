"""An export from its options to its summary: the steps, the state that they share, and the destination, with the names of its objects.

A task writes one object, which becomes visible as a whole and replaces the object of an earlier attempt.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from tikv_br import __version__, records, run_id
from tikv_br.backupset import layout, lease
from tikv_br.backupset.coverage import codec_of, nothing_matched
from tikv_br.backupset.rows import chosen_codec, has_rows
from tikv_br.cancellation import clean_up
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.ttl import TtlFetcher
from tikv_br.cluster.txnkv import notice_transactions
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import Engine, Interval, plan_by_regions, require_rows, source_ranges
from tikv_br.dataflow.read import MergeSources, StoredRows, scan_rows
from tikv_br.dataflow.write import try_task
from tikv_br.errors import StorageConflict, StorageError, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, gaps, hull, intersection
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.steps import FunctionStep, run_steps
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import run_tasks
from tikv_br.tasks.session import check_java
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.formats.tables import TableOptions


@dataclass(slots=True)
class ExportPart:
    """One file of an export, and what was counted while it was written. Picklable."""

    name: str
    rows: int = 0
    data_bytes: int = 0
    """Bytes of user keys and values."""
    size: int = 0
    """Bytes of the file."""
    vanished: int = 0
    """Rows left out because they no longer existed when their TTL was read."""
    expiry_error_seconds: int = 0
    """Maximum number of seconds by which an expiry may be too early."""


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """A keyspace of a cluster. Picklable."""

    config: ClusterConfig
    codec: KeyCodec
    with_ttl: bool
    """True if the TTL of each key is requested."""
    rate_limit: RateLimit = field(default_factory=RateLimit)

    def batches(self, span: KeyRange, part: ExportPart, context: TaskContext) -> Iterator[pa.RecordBatch]:
        """The rows of an RPC range, page by page, one page ahead; counts in ``part`` what requests for TTLs show."""
        cluster = context.shared(ClusterPool).get(self.config)
        raw = cluster.raw_of(self.codec)
        ttls = TtlFetcher(cluster, raw) if self.with_ttl else None
        for rows in scan_rows(raw, span, ttls, self.rate_limit):
            if ttls is not None:
                part.vanished, part.expiry_error_seconds = ttls.vanished, ttls.error_seconds
            yield rows


@dataclass(frozen=True, slots=True)
class BackupSource:
    """A keyspace of a full backup, and of the increments on it. Picklable."""

    rows: StoredRows
    codec: KeyCodec

    def batches(self, span: KeyRange, part: ExportPart, context: TaskContext) -> Iterator[pa.RecordBatch]:
        """The rows of an RPC range, by ascending key; no tombstones, one version per key."""
        del part, context
        return self.rows.batches(span, self.codec)


@dataclass(frozen=True, slots=True)
class ExportJob:
    """Parameters that all tasks of an export share. Picklable."""

    source: ClusterSource | BackupSource
    destination: StorageLocation
    table: TableOptions


@dataclass(frozen=True, slots=True)
class ExportTask:
    """An RPC range, and the name of its file."""

    span: KeyRange
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.span}"


def run_export_task(job: ExportJob, task: ExportTask, context: TaskContext) -> ExportPart:
    """Write one part, with retries. Raises the `TikvBrError` of the last attempt."""
    return try_task(context, lambda: _write_part(job, task, context))


def _write_part(job: ExportJob, task: ExportTask, context: TaskContext) -> ExportPart:
    """Write one part. After an error nothing of it is visible."""
    from tikv_br.formats import columns
    from tikv_br.formats.tables import UnfitText, open_table

    part = ExportPart(task.name)
    with open_store(job.destination).open_writer(task.name) as writer:
        table = open_table(writer.write, job.table)
        try:
            for batch in job.source.batches(task.span, part, context):
                table.append(batch)
                size = int(columns.row_sizes(batch).sum())
                part.rows += batch.num_rows
                part.data_bytes += size
                context.report(data_bytes=size, keys=batch.num_rows)
            table.finish()
        except BaseException as error:
            table.abort()
            if isinstance(error, UnfitText):
                hint = "Pass --encoding hex or escaped, or --format parquet."
                raise UsageError(f"{error}, so it cannot be written with --encoding raw", hint=hint) from None
            raise
        part.size = writer.close().size
    return part


Format = Literal["parquet", "csv", "jsonl"]
Encoding = Literal["raw", "hex", "escaped"]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of one export."""

    read: BackupOptions
    """Cluster to read, executor, and in ``storage`` the destination; the rest is not used."""
    backup: StorageLocation | None = None
    """A backup to read instead of the cluster: a full one or, with those that it continues, an incremental one."""
    format: Format = "parquet"
    encoding: Encoding | None = None
    """Text form of keys and values; None = as ``raw import`` assumes for such a file."""
    overwrite: bool = False
    """Replace an earlier export at the destination."""

    @property
    def form(self) -> Encoding:
        """Text form of keys and values."""
        return self.encoding or ("raw" if self.format == "csv" else "hex")

    def check(self) -> None:
        """Raise `UsageError` for options that are invalid for every source."""
        self.read.check()
        if self.encoding and self.format == "parquet":
            raise UsageError(
                "--encoding cannot be used with --format parquet, which keeps keys and values as bytes",
                hint="Leave out --encoding, or pass --format csv or jsonl.",
            )
        if self.read.storage.crypter.encrypts:
            raise UsageError("the files of an export cannot be encrypted with --crypter", hint="Use --s3.sse.")
        if self.backup is not None and self.read.assume_no_ttl:
            raise UsageError("--assume-no-ttl cannot be used with --from-backup: a backup has the expiry of its rows")


SUCCESS = "_SUCCESS"
"""Written last, as Hadoop and Spark do: without it the export is not complete."""
DESCRIPTION = layout.EXPORT_RECORD
"""Object with the export's description. Spark and Arrow ignore objects whose name starts with ``_``."""
_PART = re.compile(r"part-\d{5,}\.(parquet|csv|jsonl)")


def part_name(number: int, suffix: str) -> str:
    """Name of the file of a task."""
    return f"part-{number:05d}.{suffix}"


def earlier_objects(store: ObjectStore, *, overwrite: bool) -> list[str]:
    """Objects of an export that are to be replaced. Raises `StorageConflict` unless there is nothing, or ``overwrite`` and an export only."""
    found: list[str] = []
    for info in store.list():
        if info.name.startswith(f"{layout.LEASE}/"):
            continue
        if info.name not in {SUCCESS, DESCRIPTION} and not _PART.fullmatch(info.name):
            raise StorageConflict(
                f"{store.location} is not empty: {info.name} does not belong to an export",
                hint="Pass an empty path. --overwrite replaces nothing but an earlier export.",
            )
        found.append(info.name)
    if found and not overwrite:
        state = "an earlier" if SUCCESS in found else "an unfinished"
        raise StorageConflict(
            f"{store.location} is not empty: it holds {state} export",
            hint="Pass an empty path, or --overwrite to replace the export.",
        )
    return found


def check_parts(store: ObjectStore, parts: Sequence[ExportPart]) -> None:
    """Raise `StorageError` unless each part has the size that was written."""
    there = {info.name: info.size for info in store.list()}
    for part in parts:
        if there.get(part.name) != part.size:
            raise StorageError(
                f"{part.name} was written with {part.size:,} bytes, but now has {there.get(part.name, 0):,}",
                hint="Another process writes to the destination. Pass an empty path.",
            )


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file, as `DESCRIPTION` lists it."""

    name: str
    rows: int
    size: int
    """Size in bytes."""


@dataclass(frozen=True, slots=True)
class ExportDescription:
    """The content of `DESCRIPTION`."""

    tool_version: str
    run: str
    source: str
    """Address or URL, without credentials."""
    cluster_id: int
    api_version: str
    keyspace_id: int
    ranges: tuple[KeyRange, ...]
    """RPC keys of ``api_version``."""
    backup_ts: int
    """0 = the backup has none, or a cluster was read."""
    file_format: str
    encoding: str
    columns: tuple[str, ...]
    started_ms: int
    """Start of reading, as `finished_ms` its end, in milliseconds since the epoch by this machine's clock."""
    finished_ms: int
    total_kvs: int
    total_bytes: int
    files: tuple[ExportedFile, ...]


@dataclass
class ExportContext:
    """State that the steps share."""

    options: ExportOptions
    reporter: Reporter
    clusters: ClusterPool = field(default_factory=ClusterPool)
    started_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    store: ObjectStore = field(init=False)
    """Store of the destination."""
    source: ClusterSource | BackupSource = field(init=False)
    sources: MergeSources | None = None
    """The backups, if a backup is read."""
    ranges: tuple[KeyRange, ...] = ()
    """Ranges to read: RPC keys, ascending, without overlap."""
    cluster_id: int = 0
    backup_ts: int = 0
    engine: Engine = field(init=False)
    plan: list[Interval] = field(default_factory=list)
    lease: lease.PathLease | None = None
    parts: list[ExportPart] = field(default_factory=list)
    session_seconds: float = 0.0

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        source = self.source
        if isinstance(source, ClusterSource):
            return ("key", "value", "expire_ts") if source.with_ttl else ("key", "value")
        chosen = (("expire_ts", source.codec.api_version.has_ttl), ("ts", source.codec.is_v2))
        return ("key", "value", *(name for name, wanted in chosen if wanted))

    @property
    def source_name(self) -> str:
        """The source, for people."""
        options = self.options
        return f"cluster {','.join(options.read.cluster.pd)}" if options.backup is None else options.backup.redacted()


def check_input(context: ExportContext) -> None:
    """Check the options before any request."""
    context.options.check()


def open_source(context: ExportContext) -> None:
    """Connect to the cluster or read the records of the backup, and find the ranges. Raises `UsageError`."""
    options, read = context.options, context.options.read
    if options.backup is not None:
        _open_backup(context, MergeSources.of_backup(options.backup))
        return
    cluster = context.clusters.get(read.cluster)
    info = cluster.info(context.reporter)
    context.cluster_id = info.cluster_id
    context.ranges = source_ranges(read, cluster, ApiVersion.V2)
    notice_transactions(cluster, context.reporter, hull(context.ranges))
    codecs = {codec_of(info.api_version, span) for span in context.ranges}
    if len(codecs) > 1:
        raise UsageError("an export has the rows of one keyspace", hint="Run one export for each, to separate paths.")
    with_ttl = info.api_version.has_ttl and not read.assume_no_ttl
    context.source = ClusterSource(read.cluster, codecs.pop(), with_ttl)
    context.engine = Engine.of_tasks("scan", "rows are scanned", read)
    if with_ttl:
        context.reporter(
            Notice("every key costs one extra request, for its TTL; if no key has a TTL, --assume-no-ttl avoids that")
        )


def _open_backup(context: ExportContext, sources: MergeSources) -> None:
    base, read = sources.base, context.options.read
    codec = chosen_codec(base, "".join(read.keyspaces[:1]))
    keyspace = codec.rpc_range()
    covered = [part for each in base.ranges if not (part := intersection(each, keyspace)).is_empty]
    context.ranges = tuple(sorted(codec.rpc_range(each) for each in read.ranges)) or tuple(sorted(covered))
    missing = [gap for span in context.ranges for gap in gaps(span, covered)]
    if missing or not context.ranges:
        raise UsageError(
            f"the backup does not contain {missing[0] if missing else keyspace}: it covers {', '.join(map(str, base.ranges))}",
            hint="Pass ranges that the backup contains, or none.",
        )
    may_expire = (
        not each.expiry_recorded or any(file.expiry.total_kvs for file in each.files) for each in sources.backups
    )
    if base.api_version.has_ttl and any(may_expire):
        context.reporter(
            Notice("rows that expired before the backup was made are left out; expire_ts says when others expire")
        )
    context.sources, context.cluster_id = sources, base.cluster_id
    context.backup_ts = sources.newest.backup_ts
    files = tuple((each.store.location, files) for each, files in sources.files(context.ranges))
    ts = sources.window()[1] if sources.increments else 0
    context.source = BackupSource(StoredRows(files, ts, sources.newest.seconds), codec)
    context.engine = Engine.of_tasks("merge", "read from a backup", read)


def check_destination(context: ExportContext) -> None:
    """Check that the destination is empty or, with ``overwrite``, has an export only. Raises `StorageConflict`, `LeaseHeld`."""
    context.store = open_store(context.options.read.storage)
    lease.check_free(context.store)
    earlier_objects(context.store, overwrite=context.options.overwrite)


def check_files(context: ExportContext) -> None:
    """Check length and end of every file of a backup to be read. Raises `BackupDamaged`."""
    if context.sources is not None:
        context.sources.verify_identity(context.ranges)


def look_for_rows(context: ExportContext) -> None:
    """Refuse explicit ranges and keyspaces without a row. Raises `NothingMatched`."""
    read, sources = context.options.read, context.sources
    if sources is None:
        require_rows(read, context.clusters.get(read.cluster), context.ranges, context.reporter)
        return
    explicit = bool(read.ranges or read.keyspaces)
    if explicit and not read.allow_empty and not any(has_rows(each, context.ranges) for each in sources.backups):
        raise nothing_matched("the backup", context.source.codec.api_version, context.ranges)


def make_plan(context: ExportContext) -> None:
    """Divide the ranges into tasks of about equal size: at regions, or at files of the backup."""
    slots = context.engine.slots
    if context.sources is not None:
        context.plan = context.sources.plan((), context.ranges, slots)
    else:
        cluster, codec = context.clusters.get(context.options.read.cluster), context.source.codec
        context.plan = plan_by_regions(cluster, codec, [(span, [span]) for span in context.ranges], slots)
    context.engine = context.engine.settle_executor(context.options.read, context.plan)
    if context.engine.executor == "spark":
        check_java()


def acquire_lock(context: ExportContext) -> None:
    """Acquire the lock of the destination; this also shows that it is writable. Removes an earlier export."""
    context.lease = lease.acquire(context.store, "export")
    earlier = earlier_objects(context.store, overwrite=context.options.overwrite)
    for name in sorted(earlier, key=lambda name: name != SUCCESS):  # interrupted, it leaves an unfinished export
        context.lease.check()
        context.store.delete(name)
    context.store.sweep()


def release_lock(context: ExportContext) -> None:
    """Release the lock."""
    if context.lease is not None:
        context.lease.try_release()


def copy(context: ExportContext) -> None:
    """Write all parts. Raises the first error of a task."""
    options, engine = context.options, context.engine
    from tikv_br.formats.tables import TableFormat, TableOptions  # loads Arrow: after the checks

    names = context.columns
    table = TableOptions(TableFormat(options.format), options.form, expire_ts="expire_ts" in names, ts="ts" in names)
    source = context.source
    if isinstance(source, ClusterSource):
        limit = RateLimit(options.read.rate_limit).share(engine.executor, engine.slots, len(context.plan))
        source = ClusterSource(source.config, source.codec, source.with_ttl, limit)
    tasks = [
        ExportTask(interval.span, part_name(number, options.format)) for number, interval in enumerate(context.plan)
    ]
    context.session_seconds = run_tasks(
        tasks,
        partial(run_export_task, ExportJob(source, options.read.storage, table)),
        options=options.read.choose(engine.executor, engine.slots),
        on_result=context.parts.append,
        name_of=str,
        reporter=context.reporter,
        shared=[context.clusters],
        planned_bytes=[interval.size for interval in context.plan],
    )


def remove_parts(context: ExportContext) -> None:
    """Remove what was written, unless another run has taken over the destination."""
    if context.lease is None or context.lease.lost is not None:
        return
    for name in (SUCCESS, DESCRIPTION, *(part_name(at, context.options.format) for at in range(len(context.plan)))):
        context.store.delete(name)
    context.store.sweep()


def commit(context: ExportContext) -> None:
    """Check that all parts are there, then write the description and `SUCCESS`."""
    options, source = context.options, context.source
    if context.lease is not None:
        context.lease.confirm()
    parts = sorted(context.parts, key=lambda part: part.name)
    check_parts(context.store, parts)
    description = ExportDescription(
        tool_version=__version__,
        run=run_id.current(),
        source=context.source_name,
        cluster_id=context.cluster_id,
        api_version=source.codec.api_version.label,
        keyspace_id=source.codec.keyspace_id,
        ranges=context.ranges,
        backup_ts=context.backup_ts,
        file_format=options.format,
        encoding="" if options.format == "parquet" else options.form,
        columns=context.columns,
        started_ms=context.started_ms,
        finished_ms=time.time_ns() // 1_000_000,
        total_kvs=sum(part.rows for part in parts),
        total_bytes=sum(part.data_bytes for part in parts),
        files=tuple(ExportedFile(part.name, part.rows, part.size) for part in parts),
    )
    context.store.put(DESCRIPTION, records.dump(description))
    if context.lease is not None:
        context.lease.confirm()
    context.store.put(SUCCESS, b"")


EXPORT = (
    FunctionStep("check the input", check_input),
    FunctionStep("open the source", open_source),
    FunctionStep("check the destination", check_destination),
    FunctionStep("check the files", check_files),
    FunctionStep("look for rows", look_for_rows),
    FunctionStep("plan", make_plan),
    FunctionStep("acquire the export lock", acquire_lock, release_lock),
    FunctionStep("export", copy, remove_parts),
    FunctionStep("commit", commit),
    FunctionStep("release the lock", release_lock),
)
"""The steps of an export."""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """Result of an export."""

    total_kvs: int
    total_bytes: int
    """Bytes of user keys and values."""
    files: int
    size: int
    """Bytes of the files."""
    file_format: str
    encoding: str
    """Text form of keys and values; empty for Parquet."""
    columns: tuple[str, ...]
    source: str
    storage: str
    api_version: str
    keyspace_id: int
    backup_ts: int
    """0 = the backup has none, or a cluster was read."""
    vanished_kvs: int
    expiry_error_seconds: int
    executor: str
    executor_reason: str
    seconds: float
    average_speed: float
    session_seconds: float
    step_seconds: dict[str, float]


def export(options: ExportOptions, reporter: Reporter = silent) -> ExportSummary:
    """Export the rows of a cluster or a backup; returns when the export is complete. Raises `TikvBrError`."""
    began = time.monotonic()
    context = ExportContext(options, reporter)
    with context.clusters:
        timings = run_steps(EXPORT, context, reporter, clean_up)
    seconds = time.monotonic() - began
    options, parts, source = context.options, context.parts, context.source
    total_bytes = sum(part.data_bytes for part in parts)
    return ExportSummary(
        total_kvs=sum(part.rows for part in parts),
        total_bytes=total_bytes,
        files=len(parts),
        size=sum(part.size for part in parts),
        file_format=options.format,
        encoding="" if options.format == "parquet" else options.form,
        columns=context.columns,
        source=context.source_name,
        storage=options.read.storage.redacted(),
        api_version=source.codec.api_version.label,
        keyspace_id=source.codec.keyspace_id,
        backup_ts=context.backup_ts,
        vanished_kvs=sum(part.vanished for part in parts),
        expiry_error_seconds=max((part.expiry_error_seconds for part in parts), default=0),
        executor=context.engine.executor,
        executor_reason=context.engine.executor_reason,
        seconds=round(seconds, 3),
        average_speed=round(total_bytes / max(seconds, 1e-9)),
        session_seconds=round(context.session_seconds, 3),
        step_seconds={name: round(value, 3) for name, value in timings.items()},
    )
