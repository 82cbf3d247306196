"""Putting B right: where something differed, look again, and write what A has."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
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


@dataclass(frozen=True, slots=True)
class RepairJob:
    """What all tasks of a repair share. Pickles."""

    diff: DiffJob
    delete: bool
    """Whether to remove what only B has."""
    told: Callable[[Sequence[bytes]], object] | None = None
    """Is told user keys before they are written to B. With it or `spare` the job cannot travel."""
    spare: Callable[[Sequence[bytes]], Collection[bytes]] | None = None
    """Says which of the user keys that only B has are not removed."""


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
    from formats import columns

    for batch in (found.only_a, found.value):
        puts = a.lasting(batch)
        expire_ts = columns.numbers(puts["expire_ts"])
        if expire_ts.any() and not target.codec.api_version.has_ttl:
            raise ConversionUnsupported(
                f"{(expire_ts > 0).sum()} of the keys to write expire, and the second cluster keeps no TTLs",
                hint="Repair into a cluster of API V1TTL or V2, or leave out the range of these keys.",
            )
        if job.told is not None and puts.num_rows:
            job.told(puts["key"].to_pylist())
        target.raw.put_columns(puts["key"], puts["value"], expire_ts)
        report.puts += puts.num_rows
    if job.delete:
        keys = _unspared(job, found.only_b)
        target.raw.delete_columns(keys)
        report.deletes += len(keys)


def _unspared(job: RepairJob, keys: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """The keys that a repair may remove."""
    if job.spare is None or not len(keys):
        return keys
    import pyarrow as pa
    import pyarrow.compute as pc

    spared = pa.array(sorted(job.spare(keys.to_pylist())), pa.large_binary())
    return keys.filter(pc.invert(pc.is_in(keys, value_set=spared)))
