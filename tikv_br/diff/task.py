"""The task: compare neighbouring ranges, down to the keys that differ."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tikv_br.backupset.coverage import KeyRange
from tikv_br.diff.bisect import Answer, differing
from tikv_br.diff.places import BackupPlace, ClusterPlace, Unit
from tikv_br.diff.settle import SETTLED_KEYS, settle
from tikv_br.diff.sides import ClusterSide, RowsSide, Side, pieces
from tikv_br.diff.values import Counts, DifferentRange, KeyDifference, Kind, Meter, Report, Span
from tikv_br.proof.prover import recorded
from tikv_br.proof.stored_rows import records
from tikv_br.spark.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.diff.rows import RowDifferences


@dataclass(frozen=True, slots=True)
class DiffJob:
    """What all tasks of a comparison share. Pickles."""

    a: ClusterPlace | BackupPlace
    b: ClusterPlace
    keys: int
    """How many keys a task may name."""
    exact: bool = False
    """Whether to compare all rows, whatever the checksums say."""


def compare_units(job: DiffJob, task: tuple[Unit, ...], context: TaskContext) -> Report:
    """Compare the ranges of a task."""
    report = Report()
    target = job.b.side(report.meter)
    for unit in task:
        answer = target.sums(unit.span)
        if job.exact or not _as_recorded(job, unit, answer):
            for side, span in references(job, unit, unit.span, report.meter):
                known = answer if span == unit.span else None
                for leaf in [span] if job.exact else differing(side, target, span, known):
                    _take(report, compare_leaf(side, target, leaf, job.keys), leaf, job.keys)
        report.rows += answer.sums.total_kvs
        report.size += answer.sums.total_bytes
        context.report(data_bytes=answer.sums.total_bytes, keys=answer.sums.total_kvs)
    return report


def references(job: DiffJob, unit: Unit, span: Span, meter: Meter) -> Iterator[tuple[Side, Span]]:
    """Side A of a part of a unit: a cluster that answers in B's form; else its rows, in pieces that fit into memory."""
    place, codec = job.a, job.b.codec
    if isinstance(place, BackupPlace):
        for rows, part in pieces(_stored_rows(place, unit, span), span):
            yield RowsSide(rows, codec), part
        return
    side = place.side(meter)
    if side.codec.prefix == codec.prefix:
        yield side, span
        return
    for rows, part in pieces(side.pages(span), span):
        yield RowsSide(rows, codec, side), part


def compare_leaf(a: Side, b: ClusterSide, span: Span, names: int) -> tuple[Counts, list[KeyDifference]]:
    """Compare a range row by row: how many keys differ, and the first of them.

    A few are read again on both sides: what changes just now, or is about to expire, is no difference.
    """
    from tikv_br.diff.rows import compare, lockstep

    most = max(names, SETTLED_KEYS)
    counts = Counts()
    found: list[KeyDifference] = []
    for rows, others in lockstep(a.pages(span), b.pages(span)):
        part = compare(rows, others, int(time.time()))
        counts += part.counts
        if len(found) <= most:
            found += _named(part, most + 1 - len(found))
    if counts.total > SETTLED_KEYS:
        return counts, found[:names]
    settled, expiring = settle(found, a, b)
    kinds = Counter(difference.kind for difference in settled)
    gone = counts.expiring + expiring
    return Counts(kinds[Kind.ONLY_A], kinds[Kind.ONLY_B], kinds[Kind.VALUE], gone), settled[:names]


def _as_recorded(job: DiffJob, unit: Unit, answer: Answer) -> bool:
    """Whether B's answer is what the backup recorded of the file, so that the file need not be read."""
    file = unit.file
    same_form = job.a.codec.prefix == job.b.codec.prefix
    return bool(file and unit.whole and same_form and answer.sums in recorded(file, answer.first, answer.last))


def _stored_rows(place: BackupPlace, unit: Unit, span: Span) -> Iterator[pa.RecordBatch]:
    """The rows of a backup in a part of a unit: one a key, no tombstones, expired ones too."""
    from formats.rows import LiveFilter

    if unit.file is None:
        return
    newest = LiveFilter(now=0)
    for batch in records(place.store, unit.file, place.codec, KeyRange(*place.codec.rpc_range(*span))):
        yield newest.apply(batch)


def _take(report: Report, found: tuple[Counts, list[KeyDifference]], span: Span, names: int) -> None:
    counts, keys = found
    report.counts += counts
    if counts.total:
        report.ranges.append(DifferentRange(span, counts))
    report.keys += keys[: max(names - len(report.keys), 0)]


def _named(part: RowDifferences, most: int) -> list[KeyDifference]:
    """The first keys as objects: for the few that are named or read again."""
    columns = ((Kind.ONLY_A, part.only_a["key"]), (Kind.VALUE, part.value["key"]), (Kind.ONLY_B, part.only_b))
    found = [KeyDifference(kind, key) for kind, column in columns for key in column[:most].to_pylist()]
    return sorted(found, key=lambda difference: difference.key)[:most]
