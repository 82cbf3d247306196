"""Run a comparison or a repair from its options to its summary."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import describe_ranges
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.keyspaces import keyspace_names, matching_keyspace
from tikv_br.cluster.txnkv import notice_transactions, refuse_transactions
from tikv_br.compare.report import DifferentRange, KeyDifference, Meter, Report
from tikv_br.diff import places
from tikv_br.diff.places import BackupChoice, BackupPlace, ClusterPlace, DiffOptions, Unit, find_backup, find_cluster
from tikv_br.diff.task import DiffJob, RepairJob, compare_units, repair_ranges, repairs
from tikv_br.errors import NothingMatched, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.steps import FunctionStep, run_steps
from tikv_br.tasks.executor import run_tasks


@dataclass
class DiffContext:
    """State that the steps share."""

    options: DiffOptions
    reporter: Reporter = silent
    clusters: ClusterPool = field(default_factory=ClusterPool)
    a: ClusterPlace | BackupPlace = field(init=False)
    b: ClusterPlace = field(init=False)
    backup: BackupSet | None = None
    """Side A, if it is a backup."""
    units: list[Unit] = field(default_factory=list)
    found: Report = field(default_factory=Report)
    """Report of the comparison."""
    repaired: Report | None = None
    """Report of the repair, with the remaining differences; None = no repair took place."""
    delete: bool = False
    """True if a repair deletes keys that only B has."""
    missing_only: bool = False
    """True if a repair writes only keys that B lacks."""
    session_seconds: float = 0.0
    """Start-up time of Spark; 0 on the driver."""

    @property
    def job(self) -> DiffJob:
        """Return the parameters that all tasks share."""
        return DiffJob(self.a, self.b, self.options.keys, self.options.exact)


def find_sides(context: DiffContext) -> None:
    """Connect to both sides. Raises `UsageError` if they are the same."""
    options = context.options
    if isinstance(options.a, BackupChoice):
        context.a, context.backup = find_backup(options.a)
    else:
        context.a = find_cluster(context.clusters, options.a, "--keyspace", context.reporter)
    other = options.b if options.b.keyspace != "" else replace(options.b, keyspace=_same_keyspace(context))
    context.b = find_cluster(context.clusters, other, "--other-keyspace", context.reporter)
    if isinstance(context.a, ClusterPlace):
        clusters = [context.clusters.get(place.config) for place in (context.a, context.b)]
        if (
            context.a.codec.keyspace_id == context.b.codec.keyspace_id
            and clusters[0].cluster_id == clusters[1].cluster_id
        ):
            raise UsageError("both sides are the same keyspace of the same cluster")
        for cluster in clusters:
            notice_transactions(cluster, context.reporter, options.span)
    context.reporter(Notice(f"A: {context.a}"))
    context.reporter(Notice(f"B: {context.b}"))


def _same_keyspace(context: DiffContext) -> int:
    """The id in B's cluster of the keyspace of A, by its name. Raises `UsageError` if there is none."""
    keyspace_id, target = context.a.codec.keyspace_id, context.clusters.get(context.options.b.config)
    if not keyspace_id or target.api_version is not ApiVersion.V2:
        return keyspace_id
    if isinstance(context.a, ClusterPlace):
        names = keyspace_names(context.clusters.get(context.a.config), [keyspace_id])
    else:
        names = (
            {}
            if context.backup is None or context.backup.manifest is None
            else context.backup.manifest.description.names
        )
    return matching_keyspace(target.pd, keyspace_id, names, "--other-keyspace", context.reporter)


def plan_ranges(context: DiffContext) -> None:
    """Follow the regions of a cluster, or the files of a backup."""
    options, place = context.options, context.a
    codec = place.codec
    wanted = codec.rpc_range(options.span)
    if isinstance(place, ClusterPlace):
        regions = context.clusters.get(place.config).pd.each_region(codec.bound(wanted.start), codec.bound(wanted.end))
        ends = (region.end_within(codec, wanted) for region in regions)
        context.units = places.region_units(wanted, ends, codec)
    elif context.backup is not None:
        context.units = places.file_units(wanted, context.backup.ranges, context.backup.files, codec)


def compare(context: DiffContext) -> None:
    """Compare all ranges."""
    context.session_seconds += run_tasks(
        places.tasks(context.units),
        partial(compare_units, context.job),
        options=context.options.where,
        on_result=context.found.add,
        name_of=lambda task: str(task[0]),
        reporter=context.reporter,
        shared=[context.clusters],
    )


def look_for_rows(context: DiffContext) -> None:
    """Refuse an explicit range or keyspace of which no side has a row. Raises `NothingMatched`."""
    options, found = context.options, context.found
    if (
        options.has_choice
        and not options.allow_empty
        and not found.sums.total_kvs + found.counts.total + found.counts.expiring
    ):
        span = context.a.codec.rpc_range(options.span)
        raise NothingMatched(f"neither side has a row {describe_ranges(context.a.codec.api_version, [span])}")


def repair_differences(context: DiffContext) -> None:
    """Write the differences to B. Raises `ClusterUnfit` if it also has transactional data."""
    refuse_transactions(context.clusters.get(context.b.config), context.options.span)
    context.repaired = Report()
    context.session_seconds += run_tasks(
        repairs(context.units, context.found.ranges),
        partial(repair_ranges, RepairJob(context.job, context.delete, missing_only=context.missing_only)),
        options=context.options.where,
        on_result=context.repaired.add,
        name_of=str,
        reporter=context.reporter,
        shared=[context.clusters],
    )


COMPARISON = (
    FunctionStep("read both sides", find_sides),
    FunctionStep("plan the ranges", plan_ranges),
    FunctionStep("compare", compare),
    FunctionStep("look for rows", look_for_rows),
)
"""The steps of a comparison, which writes nothing."""
REPAIR = (FunctionStep("repair B", repair_differences),)
"""The steps of a repair after a comparison."""


@dataclass(frozen=True, slots=True)
class DiffSummary:
    """Compared ranges, and their differences."""

    a: str
    b: str
    api_version: str
    """API version of A."""
    other_api_version: str
    """API version of B."""
    ranges: int
    """Regions or files of A that were compared."""
    rows: int
    """Rows of B that were compared."""
    bytes: int
    """Bytes of keys and values."""
    different_ranges: int
    only_a: int
    only_b: int
    value: int
    expiring: int
    """Keys on one side only that are about to expire, or have expired: no differences."""
    checksum_requests: int
    scan_requests: int
    scanned_bytes: int
    puts: int
    """Keys written to B by a repair."""
    deletes: int
    remaining: int
    """Keys that differ now: all that were found or, after a repair, what it left."""
    executor: str
    seconds: float
    session_seconds: float
    """Seconds that Spark took to start, for the comparison and a repair; 0 on the driver."""
    step_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class DiffResult:
    """The summary, with what it counts."""

    summary: DiffSummary
    ranges: list[DifferentRange]
    """Ranges by ascending key."""
    keys: list[KeyDifference]
    """The first ones, at most `DiffOptions.keys`."""
    context: DiffContext = field(repr=False)
    """Context for `repair`."""


def diff(options: DiffOptions, reporter: Reporter = silent) -> DiffResult:
    """Compare A and B. Writes nothing; the summary's ``remaining`` counts the differences.

    Raises `UsageError` for sides that cannot be compared, and the `TikvBrError` that prevented the comparison.
    """
    options.check_executor()
    began = time.monotonic()
    context = DiffContext(options, reporter)
    with context.clusters:
        timings = run_steps(COMPARISON, context, reporter)
    keys = sorted(context.found.keys, key=lambda difference: difference.key)
    return DiffResult(
        _summary(context, time.monotonic() - began, timings),
        sorted(context.found.ranges),
        keys[: options.keys],
        context,
    )


def repair(
    found: DiffResult, reporter: Reporter = silent, *, delete: bool = False, missing_only: bool = False
) -> DiffResult:
    """Write missing and, unless ``missing_only``, different rows to B; with ``delete`` also delete keys that only B has.

    Returns the differences found, with a summary of what was written and what still differs.
    """
    began = time.monotonic()
    context = found.context
    context.reporter, context.delete, context.missing_only = reporter, delete, missing_only
    with context.clusters:
        timings = found.summary.step_seconds | run_steps(REPAIR, context, reporter)
    seconds = found.summary.seconds + time.monotonic() - began
    return replace(found, summary=_summary(context, seconds, timings))


def _summary(context: DiffContext, seconds: float, timings: dict[str, float]) -> DiffSummary:
    found, repaired = context.found, context.repaired
    counts = found.counts
    meter = Meter()
    for report in filter(None, (found, repaired)):
        meter.add(report.meter)
    return DiffSummary(
        a=str(context.a),
        b=str(context.b),
        api_version=context.a.codec.api_version.label,
        other_api_version=context.b.codec.api_version.label,
        ranges=len(context.units),
        rows=found.sums.total_kvs,
        bytes=found.sums.total_bytes,
        different_ranges=len(found.ranges),
        only_a=counts.only_a,
        only_b=counts.only_b,
        value=counts.value,
        expiring=counts.expiring,
        checksum_requests=meter.checksums,
        scan_requests=meter.scans,
        scanned_bytes=meter.scanned_bytes,
        puts=repaired.puts if repaired else 0,
        deletes=repaired.deletes if repaired else 0,
        remaining=counts.total if repaired is None else repaired.counts.total,
        executor=context.options.where.executor,
        seconds=round(seconds, 3),
        session_seconds=round(context.session_seconds, 3),
        step_seconds={name: round(value, 3) for name, value in timings.items()},
    )
