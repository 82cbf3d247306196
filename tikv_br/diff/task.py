"""The tasks: compare neighbouring ranges down to the keys that differ, and write A's rows of different ranges to B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.cluster.cluster import ClusterPool
from tikv_br.compare.ranges import compare_leaf, compare_range
from tikv_br.compare.report import DifferentRange, Meter, Report
from tikv_br.compare.sides import ClusterSide, FileRows, Reference, sides_of
from tikv_br.diff.places import BackupPlace, ClusterPlace, Unit
from tikv_br.errors import ConversionUnsupported
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class DiffJob:
    """Parameters that all tasks of a comparison share. Picklable."""

    a: ClusterPlace | BackupPlace
    b: ClusterPlace
    keys: int
    """Maximum number of keys that a task lists."""
    exact: bool = False
    """Compare all rows, even if the checksums are equal."""

    def reference(self, unit: Unit, clusters: ClusterPool, meter: Meter) -> Reference:
        """Side A of a unit."""
        if isinstance(self.a, ClusterPlace):
            return self.a.side(clusters, meter)
        return FileRows(self.a.store, unit.file, self.a.codec, self.b.codec)


def compare_units(job: DiffJob, task: tuple[Unit, ...], context: TaskContext) -> Report:
    """Compare the ranges of a task."""
    report = Report()
    clusters = context.shared(ClusterPool)
    target = job.b.side(clusters, report.meter)
    for unit in task:
        a = job.reference(unit, clusters, report.meter)
        found = compare_range(a, target, unit.span, keys=job.keys, exact=job.exact)
        report.add(found)
        del report.keys[job.keys :]
        context.report(data_bytes=found.sums.total_bytes, keys=found.sums.total_kvs)
    return report


@dataclass(frozen=True, slots=True)
class RepairJob:
    """Parameters that all tasks of a repair share. Picklable."""

    diff: DiffJob
    delete: bool
    """Delete keys that only B has."""
    missing_only: bool = False
    """Write only keys that B lacks, none that it has with another value."""
    fence: Callable[[], object] | None = None
    """Called before each write to B; raises to stop it. A job with a fence may not pickle."""


class Repair(NamedTuple):
    """The different ranges of a unit. Picklable."""

    unit: Unit
    spans: tuple[KeyRange, ...]

    def __str__(self) -> str:
        return str(self.unit)


def repairs(units: Sequence[Unit], ranges: Sequence[DifferentRange]) -> list[Repair]:
    """The ranges by the units that they lie in; both are sorted here, and no range lies in two units."""
    found: list[Repair] = []
    spans = sorted(each.span for each in ranges)
    first = 0
    for unit in sorted(units, key=lambda unit: unit.span):
        end = first
        while end < len(spans) and (not unit.span.end or spans[end].start < unit.span.end):
            end += 1
        if end > first:
            found.append(Repair(unit, tuple(spans[first:end])))
        first = end
    return found


def repair_ranges(job: RepairJob, task: Repair, context: TaskContext) -> Report:
    """Write the differences of a unit's ranges to B, then compare these ranges again.

    The report has what was written, and what differs even so. Raises `ConversionUnsupported` for a row that expires
    where B keeps no TTL.
    """
    from tikv_br.compare.rows import compare_rows
    from tikv_br.formats.rows import unexpired

    report = Report()
    clusters = context.shared(ClusterPool)
    a, target = job.diff.reference(task.unit, clusters, report.meter), job.diff.b.side(clusters, report.meter)
    source = job.diff.a if isinstance(job.diff.a, ClusterPlace) else None
    for span in task.spans:
        for side, part in sides_of(a, target, span):
            for found in compare_rows(side.pages(part), target.pages(part), target.now):
                for rows in (found.only_a,) if job.missing_only else (found.only_a, found.value):
                    alive = unexpired(rows, target.now()) if source is None else source.with_expiries(clusters, rows)
                    _put(job, alive, target, report)
                _delete(job, found.only_b, target, report)
        context.report(keys=report.puts + report.deletes)
        for side, part in sides_of(a, target, span):
            report.add(compare_leaf(side, target, part, job.diff.keys))
    return report


def _put(job: RepairJob, rows: pa.RecordBatch, target: ClusterSide, report: Report) -> None:
    from tikv_br.formats import columns

    expire_ts = columns.numbers(rows["expire_ts"])
    if expire_ts.any() and not target.codec.api_version.has_ttl:
        raise ConversionUnsupported(
            f"cannot write {(expire_ts > 0).sum()} keys with a TTL: the second cluster's API version has no TTLs",
            hint="Repair a cluster of API V1TTL or V2, or leave out the range of these keys.",
        )
    _check_fence(job, rows.num_rows)
    # A row that expires before it is sent is left out. The comparison afterwards reports B's row of that key, if any.
    report.puts += rows.num_rows - int(target.raw.column_writer().put(rows["key"], rows["value"], expire_ts).sum())


def _delete(job: RepairJob, keys: pa.LargeBinaryArray, target: ClusterSide, report: Report) -> None:
    if job.delete:
        _check_fence(job, len(keys))
        target.raw.column_writer().delete(keys)
        report.deletes += len(keys)


def _check_fence(job: RepairJob, rows: int) -> None:
    if job.fence is not None and rows:
        job.fence()
