"""Compares the finished copy with the cluster (`--checksum`), and copies again what differs.

A store computes the checksum of its live rows, so it also differs from the copy's if rows have expired or were written since.
Then the rows are compared; expired rows do not count as differences. Ranges that changed during the backup cannot be compared;
they are counted and reported. Other ranges with differences are copied again, once. If the second copy differs too and the range
did not change between the two comparisons, the copy is wrong. Transactional data are compared at backup-ts, where they never change.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.backup.copy import copy_intervals
from tikv_br.backupset import coverage, ledger
from tikv_br.backupset.files import Expiry
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry
from tikv_br.cancellation import run_on_threads
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.txnkv import txn_checksum
from tikv_br.compare.sides import ClusterSide, FileRows, RangeSums, RecordedSums
from tikv_br.dataflow.convert import Converter, join_expiry
from tikv_br.dataflow.plan import Interval
from tikv_br.dataflow.run import BackupContext
from tikv_br.dataflow.write import Snapshot
from tikv_br.errors import ChecksumMismatch
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import show_key
from tikv_br.progress_events import Notice

if TYPE_CHECKING:
    from tikv_br.compare.rows import DifferenceSums


CHECKSUM_THREADS = 16
"""Concurrent checksum requests; the stores do the work."""


class Verdict(enum.Enum):
    """Result of comparing an interval."""

    EQUAL = "equal, except for rows that have expired"
    CHANGED = "changed since it was copied"
    DIFFERENT = "different, though not known to have changed"


class _Comparison(NamedTuple):
    verdict: Verdict
    sums: Checksum
    """The cluster's checksum."""
    rows: DifferenceSums | None = None
    """None if the checksums are equal."""


def compare_checksums(context: BackupContext) -> None:
    """Compare all intervals with the cluster, and copy different ones again, once.

    Raises `ChecksumMismatch` if an interval still differs. Its copy is removed, so that the next run copies it again.
    """
    comparisons = _compare_all(context, context.finished)
    first = {each.interval: comparison for each, comparison in comparisons if comparison.verdict is Verdict.DIFFERENT}
    if first:
        context.reporter(
            Notice(f"{len(first)} of {len(comparisons)} ranges differ from the cluster and are copied again")
        )
        removed = _remove_copies(context, [each for each, _ in comparisons if each.interval in first])
        done = {each.attempt for each in context.finished}
        copy_intervals(context, [_to_interval(entry) for entry in removed])
        coverage.require_coverage(context.source_ranges, (each.interval for each in context.finished))
        again = _compare_all(context, [each for each in context.finished if each.attempt not in done])
        again = [(each, _judge_second_copy(first[each.interval], comparison)) for each, comparison in again]
        if wrong := [(each, comparison) for each, comparison in again if comparison.verdict is Verdict.DIFFERENT]:
            removed = _remove_copies(context, [each for each, _ in wrong])
            raise _mismatch(removed[0], wrong[0][1], len(wrong), context.cluster.clock.remark())
        comparisons = [(each, comparison) for each, comparison in comparisons if each.interval not in first] + again
    changed = sorted(each.interval for each, comparison in comparisons if comparison.verdict is Verdict.CHANGED)
    context.compared, context.changed = len(comparisons) - len(changed), len(changed)
    if changed:
        context.reporter(
            Notice(
                f"{len(changed)} of {len(comparisons)} ranges changed while the backup ran, and their checksums could not be "
                f"compared: {changed[0]}{' and others' if len(changed) > 1 else ''}"
            )
        )


def _compare_all(context: BackupContext, finished: Sequence[FinishedTask]) -> list[tuple[FinishedTask, _Comparison]]:
    def compare_entry(each: FinishedTask) -> tuple[FinishedTask, _Comparison]:
        comparison = _compare(context, ledger.read_entry(context.store, each))
        context.check_locks()
        return each, comparison

    return run_on_threads(compare_entry, finished, CHECKSUM_THREADS, "checksum")


def _compare(context: BackupContext, entry: LedgerEntry) -> _Comparison:
    if context.snapshot is not None:
        return _compare_snapshot(context, context.snapshot, entry)
    converter = context.conversion.of(entry.interval)
    cluster = ClusterSide(context.cluster.raw(converter.source.keyspace_id))
    span = converter.source.user_range(entry.interval)
    answer = cluster.sums(span)
    if answer.sums in _possible_sums(entry, converter, answer):
        return _Comparison(Verdict.EQUAL, answer.sums)
    rows = _compare_rows(context, entry, converter, cluster, span)
    if rows.first_key is None:
        return _Comparison(Verdict.EQUAL, answer.sums, rows)
    changed = _only_expired(rows, entry) or (not rows.expiring and cluster.sums(span).sums != answer.sums)
    return _Comparison(Verdict.CHANGED if changed else Verdict.DIFFERENT, answer.sums, rows)


def _compare_snapshot(context: BackupContext, snapshot: Snapshot, entry: LedgerEntry) -> _Comparison:
    patience = context.options.lock_patience
    locks = SnapshotLocks(context.cluster, snapshot.ts, snapshot.resolved_locks, patience=patience)
    sums = txn_checksum(context.cluster, entry.interval, locks)
    return _Comparison(Verdict.EQUAL if sums == entry.source else Verdict.DIFFERENT, sums)


def _only_expired(rows: DifferenceSums, entry: LedgerEntry) -> bool:
    """Return whether the differences can be rows that expired in the cluster and whose expiry the copy has lost."""
    return not rows.value.total_kvs and not rows.only_b.total_kvs and rows.only_a.total_kvs <= entry.dropped_ttls


def _judge_second_copy(first: _Comparison, again: _Comparison) -> _Comparison:
    """The verdict on a second copy that differs too: the range has changed in between, or the copy is wrong."""
    if again.verdict is not Verdict.DIFFERENT or first.rows is None or again.rows is None:
        return again
    if first.rows.expiring or again.rows.expiring:
        one, other = (replace(rows, expiring=0, same=Checksum()) for rows in (first.rows, again.rows))
        same = one == other
    else:
        same = first.sums == again.sums
    return again if same else again._replace(verdict=Verdict.CHANGED)


def _possible_sums(entry: LedgerEntry, converter: Converter, answer: RangeSums) -> list[Checksum]:
    """The cluster's possible checksums, by the ledger; none if expiring rows have another encoding in the files."""
    expiry = reduce(join_expiry, (file.expiry for file in entry.files), Expiry())
    if expiry.total_kvs and converter.source.prefix != converter.target.prefix:
        return [entry.source] if expiry.earliest > answer.last else []
    return RecordedSums(entry.source, expiry).possible(answer.first - entry.expiry_error_seconds, answer.last)


def _compare_rows(
    context: BackupContext, entry: LedgerEntry, converter: Converter, cluster: ClusterSide, span: KeyRange
) -> DifferenceSums:
    from tikv_br.compare.rows import DifferenceSums, compare_rows

    files = sorted(entry.files, key=lambda file: file.start_key)
    sides = (FileRows(context.store, file, converter.target, converter.source) for file in files)
    copied = (batch for side in sides for batch in side.pages(span))
    sums = DifferenceSums()
    for found in compare_rows(copied, cluster.pages(span), cluster.now, entry.expiry_error_seconds):
        sums.add(found)
    return sums


def _to_interval(entry: LedgerEntry) -> Interval:
    return Interval(entry.interval, entry.source.total_bytes, max(len(entry.regions), 1))


def _remove_copies(context: BackupContext, finished: Sequence[FinishedTask]) -> list[LedgerEntry]:
    """Remove copies: first from the ledger, so that no run resumes from them. Returns their entries, in the same order."""
    context.confirm_locks()
    entries = [ledger.read_entry(context.store, each) for each in finished]
    removed = {each.attempt for each in finished}
    context.finished = [each for each in context.finished if each.attempt not in removed]
    ledger.remove_entries(context.store, but=context.finished)
    for entry in entries:
        for file in entry.files:
            context.store.delete(file.name)
    return entries


def _mismatch(entry: LedgerEntry, comparison: _Comparison, ranges: int, remark: str) -> ChecksumMismatch:
    copied, live, rows = entry.source, comparison.sums, comparison.rows
    differing = (
        f"; {rows.only_a.total_kvs} rows are only in the backup, {rows.only_b.total_kvs} only in the cluster, "
        f"{rows.value.total_kvs} have another value; the first key is {show_key(rows.first_key)}"
        if rows is not None and rows.first_key is not None
        else ""
    )
    return ChecksumMismatch(
        f"{entry.interval}: the cluster has {live.total_kvs} rows, {live.total_bytes} bytes, "
        f"checksum {live.crc64xor:016x}; the backup has {copied.total_kvs} rows, {copied.total_bytes} bytes, "
        f"checksum {copied.crc64xor:016x}{differing}. It was copied twice, and the cluster did not change in between"
        + (f" ({ranges} ranges differ)" if ranges > 1 else "")
        + (f". {remark}" if remark else ""),
        hint="The wrong copies were removed. The same command copies these ranges again.",
    )
