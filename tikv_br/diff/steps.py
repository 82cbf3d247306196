"""A comparison, and a repair, as runbooks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import KeyRange, intersection
from tikv_br.cluster.shared import shared_cluster
from tikv_br.diff import plan
from tikv_br.diff.options import BackupChoice, DiffOptions
from tikv_br.diff.places import BackupPlace, ClusterPlace, Unit, find_backup, find_cluster
from tikv_br.diff.repair import RepairJob, repair_ranges, repairs
from tikv_br.diff.task import DiffJob, compare_units
from tikv_br.diff.values import Report
from tikv_br.errors import UsageError
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.spark.executor import run_tasks
from tikv_br.steps import Line


@dataclass
class DiffContext:
    """What the steps find out for one another."""

    options: DiffOptions
    reporter: Reporter = silent
    a: ClusterPlace | BackupPlace = field(init=False)
    b: ClusterPlace = field(init=False)
    backup: BackupSet | None = None
    """Where A is one."""
    units: list[Unit] = field(default_factory=list)
    found: Report = field(default_factory=Report)
    """What the comparison found."""
    repaired: Report | None = None
    """What was written, and what differs even so; None = no repair took place."""
    delete: bool = False
    """Whether a repair removes what only B has."""
    session_seconds: float = 0.0
    """How long Spark took to start; 0 on the driver."""

    @property
    def job(self) -> DiffJob:
        """What all tasks share."""
        return DiffJob(self.a, self.b, self.options.keys, self.options.exact)


def find_sides(context: DiffContext) -> None:
    """Connect to both, and find what is to be compared. Raises `UsageError` when they are the same, or B is a part of A."""
    options = context.options
    if isinstance(options.a, BackupChoice):
        context.a, context.backup = find_backup(options.a)
    else:
        context.a = find_cluster(options.a, "--keyspace")
    same = str(context.a.keyspace_id or "")
    context.b = find_cluster(replace(options.b, keyspace=options.b.keyspace or same), "--other-keyspace")
    if isinstance(context.a, ClusterPlace):
        _check_apart(context.a, context.b, KeyRange(*context.a.codec.rpc_range(options.start, options.end)))
    context.reporter(Notice(f"A: {context.a}"))
    context.reporter(Notice(f"B: {context.b}"))


def _check_apart(a: ClusterPlace, b: ClusterPlace, wanted: KeyRange) -> None:
    """See that no row is on both sides."""
    if shared_cluster(a.config).cluster_id != shared_cluster(b.config).cluster_id or a.keyspace_id != b.keyspace_id:
        return
    if not b.below:
        raise UsageError("both sides are the same keyspace of the same cluster")
    if not intersection(wanted, KeyRange(*b.codec.rpc_range(b"", b""))).is_empty:
        raise UsageError("the second side lies within the first")


def plan_ranges(context: DiffContext) -> None:
    """Follow the regions of a cluster, or the files of a backup."""
    options, place = context.options, context.a
    codec = place.codec
    wanted = KeyRange(*codec.rpc_range(options.start, options.end))
    if isinstance(place, ClusterPlace):
        regions = shared_cluster(place.config).pd.scan_regions(codec.bound(wanted.start), codec.bound(wanted.end))
        context.units = plan.region_units(wanted, ((region.start, region.end) for region in regions), codec)
    elif context.backup is not None:
        context.units = plan.file_units(wanted, context.backup.ranges, context.backup.files, codec)


def compare(context: DiffContext) -> None:
    """Compare all ranges."""
    context.session_seconds += run_tasks(
        plan.tasks(context.units),
        partial(compare_units, context.job),
        options=context.options.where,
        on_result=context.found.add,
        name_of=lambda task: str(task[0]),
        reporter=context.reporter,
    )


def repair(context: DiffContext) -> None:
    """Write the differences."""
    context.repaired = Report()
    context.session_seconds += run_tasks(
        repairs(context.units, context.found.ranges),
        partial(repair_ranges, RepairJob(context.job, context.delete)),
        options=context.options.where,
        on_result=context.repaired.add,
        name_of=str,
        reporter=context.reporter,
    )


COMPARISON = (Line("look at both sides", find_sides), Line("plan the ranges", plan_ranges), Line("compare", compare))
"""The runbook of a comparison, which writes nothing."""
REPAIR = (Line("repair the second", repair),)
"""The runbook of a repair of what a comparison has found."""
