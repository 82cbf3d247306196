"""The tasks: compare neighbouring ranges down to the keys that differ, and write A's rows of different ranges to B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tikv_br.backupset.compare import recorded_sums
from tikv_br.backupset.rows import read_rows
from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.diff.places import BackupPlace, ClusterPlace, Unit
from tikv_br.diff.sides import ClusterSide, RangeSums, RowsSide, Side, different_ranges, row_chunks
from tikv_br.diff.values import Counts, DifferentRange, KeyDifference, Kind, Meter, Report, UserRange
from tikv_br.errors import ConversionUnsupported
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.backupset.row_differences import RowDifferences


RECHECKED_KEYS = 512
"""Maximum number of different keys of a small range that are read again; more are not due to concurrent writes."""


class PointReads(Protocol):
    """Single keys of a side."""

    def values(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """The values of those that exist."""

    def ttl(self, key: bytes) -> int | None:
        """Seconds until a key expires, 0 for never; None when it is gone."""


def recheck_keys(found: Sequence[KeyDifference], a: PointReads, b: PointReads) -> tuple[list[KeyDifference], int]:
    """The keys that still differ, with the seconds until they expire, and how many have expired or are about to."""
    if not found:
        return [], 0
    keys = [difference.key for difference in found]
    in_a, in_b = a.values(keys), b.values(keys)
    confirmed: list[KeyDifference] = []
    expiring = 0
    for key in keys:
        here, there = in_a.get(key), in_b.get(key)
        if here is not None and there is not None:
            confirmed += [KeyDifference(Kind.VALUE, key)] if here != there else []
            continue
        ttl = None if here is there else (a if there is None else b).ttl(key)
        if ttl is None or 0 < ttl <= CLOCK_SECONDS:
            expiring += 1
        else:
            confirmed.append(KeyDifference(Kind.ONLY_A if there is None else Kind.ONLY_B, key, ttl))
    return confirmed, expiring


@dataclass(frozen=True, slots=True)
class DiffJob:
    """What all tasks of a comparison share. Picklable."""

    a: ClusterPlace | BackupPlace
    b: ClusterPlace
    keys: int
    """Maximum number of keys that a task lists."""
    exact: bool = False
    """Whether to compare all rows, whatever the checksums say."""


def compare_units(job: DiffJob, task: tuple[Unit, ...], context: TaskContext) -> Report:
    """Compare the ranges of a task."""
    report = Report()
    clusters = context.shared(ClusterPool)
    target = job.b.side(clusters, report.meter)
    for unit in task:
        answer = target.sums(unit.span)
        if job.exact or not _equals_recorded(job, unit, answer):
            for side, span in references(job, clusters, unit, unit.span, report.meter):
                known = answer if span == unit.span else None
                for leaf in [span] if job.exact else different_ranges(side, target, span, known):
                    _add_leaf(report, compare_leaf(side, target, leaf, job.keys), leaf, job.keys)
        report.rows += answer.sums.total_kvs
        report.size += answer.sums.total_bytes
        context.report(data_bytes=answer.sums.total_bytes, keys=answer.sums.total_kvs)
    return report


def references(
    job: DiffJob, clusters: ClusterPool, unit: Unit, span: UserRange, meter: Meter
) -> Iterator[tuple[Side, UserRange]]:
    """Side A of a part of a unit: a cluster that answers in B's form; else its rows, in chunks that fit into memory."""
    place, codec = job.a, job.b.codec
    now = clusters.get(job.b.config).clock.now
    if isinstance(place, BackupPlace):
        for rows, part in row_chunks(_stored_rows(place, unit, span), span):
            yield RowsSide(rows, codec, now), part
        return
    side = place.side(clusters, meter)
    if side.codec.prefix == codec.prefix:
        yield side, span
        return
    for rows, part in row_chunks(side.pages(span), span):
        yield RowsSide(rows, codec, now, side), part


def compare_leaf(a: Side, b: ClusterSide, span: UserRange, names: int) -> tuple[Counts, list[KeyDifference]]:
    """Compare a range row by row: how many keys differ, and the first of them.

    A few are read again on both sides: keys that are just changing, or about to expire, are no differences.
    """
    from tikv_br.backupset.row_differences import compare, lockstep

    most = max(names, RECHECKED_KEYS)
    counts = Counts()
    found: list[KeyDifference] = []
    for rows, others in lockstep(a.pages(span), b.pages(span)):
        part = compare(rows, others, b.now())
        counts += Counts(len(part.only_a), len(part.only_b), len(part.value), part.expiring)
        if len(found) <= most:
            found += _first_keys(part, most + 1 - len(found))
    if counts.total > RECHECKED_KEYS:
        return counts, found[:names]
    confirmed, expiring = recheck_keys(found, a, b)
    kinds = Counter(difference.kind for difference in confirmed)
    gone = counts.expiring + expiring
    return Counts(kinds[Kind.ONLY_A], kinds[Kind.ONLY_B], kinds[Kind.VALUE], gone), confirmed[:names]


def _equals_recorded(job: DiffJob, unit: Unit, answer: RangeSums) -> bool:
    """Whether B's checksum is the recorded one of the file, so that the file need not be read."""
    file = unit.file
    same_form = job.a.codec.prefix == job.b.codec.prefix
    return bool(file and unit.whole and same_form and answer.sums in recorded_sums(file, answer.first, answer.last))


def _stored_rows(place: BackupPlace, unit: Unit, span: UserRange) -> Iterator[pa.RecordBatch]:
    """The rows of a backup in a part of a unit: one a key, no tombstones, expired ones too."""
    from tikv_br.formats.rows import LiveFilter

    if unit.file is None:
        return
    newest = LiveFilter(now=0)
    for batch in read_rows(place.store, unit.file, place.codec, KeyRange(*place.codec.rpc_range(*span))):
        yield newest.apply(batch)


def _add_leaf(report: Report, found: tuple[Counts, list[KeyDifference]], span: UserRange, names: int) -> None:
    counts, keys = found
    report.counts += counts
    if counts.total:
        report.ranges.append(DifferentRange(span, counts))
    report.keys += keys[: max(names - len(report.keys), 0)]


def _first_keys(part: RowDifferences, most: int) -> list[KeyDifference]:
    """The first keys as objects, for those that are listed or read again."""
    columns = ((Kind.ONLY_A, part.only_a["key"]), (Kind.VALUE, part.value["key"]), (Kind.ONLY_B, part.only_b))
    found = [KeyDifference(kind, key) for kind, column in columns for key in column[:most].to_pylist()]
    return sorted(found, key=lambda difference: difference.key)[:most]


@dataclass(frozen=True, slots=True)
class RepairJob:
    """What all tasks of a repair share. Picklable."""

    diff: DiffJob
    delete: bool
    """Whether to delete keys that only B has."""
    fence: Callable[[], object] | None = None
    """Called before each write to B; raises to stop it. A job with a fence may not pickle."""


class Repair(NamedTuple):
    """The different ranges of a unit. Picklable."""

    unit: Unit
    spans: tuple[UserRange, ...]

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
    from tikv_br.backupset.row_differences import compare, lockstep

    report = Report()
    clusters = context.shared(ClusterPool)
    target = job.diff.b.side(clusters, report.meter)
    for span in task.spans:
        for side, part in references(job.diff, clusters, task.unit, span, report.meter):
            for rows, others in lockstep(side.pages(part), target.pages(part)):
                _write(job, compare(rows, others, target.now()), side, target, report)
        context.report(keys=report.puts + report.deletes)
        for side, part in references(job.diff, clusters, task.unit, span, report.meter):
            counts, keys = compare_leaf(side, target, part, job.diff.keys)
            if counts.total:
                report.add(Report(counts, [DifferentRange(part, counts)], keys))
    return report


def _write(job: RepairJob, found: RowDifferences, a: Side, target: ClusterSide, report: Report) -> None:
    from tikv_br.formats import columns

    for batch in (found.only_a, found.value):
        puts = a.with_expiries(batch)
        expire_ts = columns.numbers(puts["expire_ts"])
        if expire_ts.any() and not target.codec.api_version.has_ttl:
            raise ConversionUnsupported(
                f"cannot write {(expire_ts > 0).sum()} keys with a TTL: the second cluster's API version has no TTLs",
                hint="Repair a cluster of API V1TTL or V2, or leave out the range of these keys.",
            )
        _check_fence(job, puts.num_rows)
        # A row that expires before it is sent is left out. The comparison afterwards reports B's row of that key, if any.
        report.puts += puts.num_rows - int(target.raw.column_writer().put(puts["key"], puts["value"], expire_ts).sum())
    if job.delete:
        _check_fence(job, len(found.only_b))
        target.raw.column_writer().delete(found.only_b)
        report.deletes += len(found.only_b)


def _check_fence(job: RepairJob, rows: int) -> None:
    if job.fence is not None and rows:
        job.fence()
