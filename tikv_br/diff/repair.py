"""Putting B right: where something differed, look again, and write what A has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.diff.places import Unit
from tikv_br.diff.sides import ClusterSide, Side
from tikv_br.diff.task import DiffJob, compare_leaf, references
from tikv_br.diff.values import DifferentRange, Report, Span
from tikv_br.errors import ConversionUnsupported
from tikv_br.spark.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.diff.rows import RowDifferences

Put = tuple[bytes, bytes, int]  # user key, value, TTL in seconds (0: never)


@dataclass(frozen=True, slots=True)
class RepairJob:
    """What all tasks of a repair share. Pickles."""

    diff: DiffJob
    delete: bool
    """Whether to remove what only B has."""


class Repair(NamedTuple):
    """The different ranges of a unit. Pickles."""

    unit: Unit
    spans: tuple[Span, ...]

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
    from tikv_br.diff.rows import compare, lockstep

    report = Report()
    target = job.diff.b.side(report.meter)
    for span in task.spans:
        for side, part in references(job.diff, task.unit, span, report.meter):
            for rows, others in lockstep(side.pages(part), target.pages(part)):
                _write(job, compare(rows, others, int(time.time())), side, target, report)
        context.report(keys=report.puts + report.deletes)
        for side, part in references(job.diff, task.unit, span, report.meter):
            counts, keys = compare_leaf(side, target, part, job.diff.keys)
            if counts.total:
                report.add(Report(counts, [DifferentRange(part, counts)], keys))
    return report


def _write(job: RepairJob, found: RowDifferences, a: Side, target: ClusterSide, report: Report) -> None:
    for batch in (found.only_a, found.value):
        puts = _puts(a, batch)
        if any(ttl for _, _, ttl in puts) and not target.codec.api_version.has_ttl:
            raise ConversionUnsupported(
                f"{sum(bool(ttl) for _, _, ttl in puts)} of the keys to write expire, and the second cluster keeps no TTLs",
                hint="Repair into a cluster of API V1TTL or V2, or leave out the range of these keys.",
            )
        target.raw.batch_put_with_ttls(puts)
        report.puts += len(puts)
    if job.delete:
        keys = found.only_b.to_pylist()
        target.raw.batch_delete(keys)
        report.deletes += len(keys)


def _puts(a: Side, rows: pa.RecordBatch) -> list[Put]:
    """Rows of A with what is left of their time; those that are gone by now are left out."""
    keys, values = rows["key"].to_pylist(), rows["value"].to_pylist()
    puts = zip(keys, values, a.ttls(rows), strict=True)
    return [(key, value, ttl) for key, value, ttl in puts if ttl is not None]
