"""`--checksum`: compares the finished copy with the cluster, interval by interval.

A store computes the checksum of its live rows, so it also differs from the copy's if rows have expired or were written since.
Then the rows are compared; expired rows do not count as differences. Ranges that changed during the backup cannot be compared;
they are counted and reported. Other ranges with differences are copied again, once. If the second copy differs too and the range
did not change between the two comparisons, the copy is wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.backup.engines import copy_intervals
from tikv_br.backupset import coverage, ledger
from tikv_br.backupset.compare import possible_sums
from tikv_br.backupset.files import Expiry
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry
from tikv_br.cancellation import cancelled_on_error, inherit
from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.dataflow.context import BackupContext
from tikv_br.dataflow.convert import Converter, join_expiry
from tikv_br.dataflow.plan import Interval
from tikv_br.errors import ChecksumMismatch
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.keys.ranges import user_range
from tikv_br.formats.keys.text import show_key
from tikv_br.progress_events import Notice

if TYPE_CHECKING:
    import pyarrow as pa

CHECKSUM_THREADS = 16
"""Concurrent checksum requests; the stores do the work."""


class Verdict(enum.Enum):
    """Result of comparing an interval."""

    EQUAL = "equal, except for rows that have expired"
    CHANGED = "changed since it was copied"
    DIFFERENT = "different, though not known to have changed"


class _DifferentRows(NamedTuple):
    """Sums of the rows that differ."""

    missing: Checksum
    """Rows of the copy that the cluster lacks."""
    other: Checksum
    """Rows of the copy with another value in the cluster."""
    added: Checksum
    """Keys that only the cluster has."""
    expiring: int
    """Number of rows that may have expired in the cluster by now."""
    first_key: bytes
    """The first user key that differs."""


class _Comparison(NamedTuple):
    """Comparison of an interval with the cluster."""

    verdict: Verdict
    sums: Checksum
    """The cluster's checksum."""
    rows: _DifferentRows | None = None
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
    def compare_entry(each: FinishedTask) -> _Comparison:
        return _compare(context, ledger.read_entry(context.store, each))

    comparisons = []
    with ThreadPoolExecutor(CHECKSUM_THREADS, thread_name_prefix="checksum") as pool, cancelled_on_error():
        try:
            for each, comparison in zip(finished, pool.map(inherit(compare_entry), finished), strict=True):
                comparisons.append((each, comparison))
                context.check_locks()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return comparisons


def _compare(context: BackupContext, entry: LedgerEntry) -> _Comparison:
    converter = context.conversion.of(entry.interval)
    clock = context.cluster.clock
    first = clock.now() - CLOCK_SECONDS
    sums = _cluster_sums(context, entry)
    if sums in _possible_sums(entry, converter, first, clock.now() + CLOCK_SECONDS):
        return _Comparison(Verdict.EQUAL, sums)
    rows = _different_rows(context, entry, converter)
    if not (rows.missing.total_kvs or rows.other.total_kvs or rows.added.total_kvs):
        return _Comparison(Verdict.EQUAL, sums, rows)
    changed = _only_expired(rows, entry) or (not rows.expiring and _cluster_sums(context, entry) != sums)
    return _Comparison(Verdict.CHANGED if changed else Verdict.DIFFERENT, sums, rows)


def _only_expired(rows: _DifferentRows, entry: LedgerEntry) -> bool:
    """Whether the differences can be rows that expired in the cluster and whose expiry the copy has lost."""
    return not rows.other.total_kvs and not rows.added.total_kvs and rows.missing.total_kvs <= entry.dropped_ttls


def _judge_second_copy(first: _Comparison, again: _Comparison) -> _Comparison:
    """The verdict on a second copy that differs too: the range has changed in between, or the copy is wrong."""
    if again.verdict is not Verdict.DIFFERENT or first.rows is None or again.rows is None:
        return again
    expiring = first.rows.expiring or again.rows.expiring
    same = first.rows._replace(expiring=0) == again.rows._replace(expiring=0) if expiring else first.sums == again.sums
    return again if same else again._replace(verdict=Verdict.CHANGED)


def _cluster_sums(context: BackupContext, entry: LedgerEntry) -> Checksum:
    codec = context.conversion.of(entry.interval).source
    return context.cluster.raw(codec.keyspace_id).checksum(*user_range(codec, entry.interval))


def _possible_sums(entry: LedgerEntry, converter: Converter, first: int, last: int) -> list[Checksum]:
    """The cluster's possible checksums, by the ledger; none if expiring rows have another encoding in the files."""
    expiry = reduce(join_expiry, (file.expiry for file in entry.files), Expiry())
    if expiry.total_kvs and converter.source.prefix != converter.target.prefix:
        return [entry.source] if expiry.earliest > last else []
    return possible_sums(entry.source, expiry, first - entry.expiry_error_seconds, last)


def _different_rows(context: BackupContext, entry: LedgerEntry, converter: Converter) -> _DifferentRows:
    """Compare the interval row by row."""
    from tikv_br.backupset.row_differences import compare, lockstep

    missing = other = added = Checksum()
    expiring, first_key = 0, b""
    for copied, live in lockstep(_copied_rows(context, entry, converter), _cluster_rows(context, entry, converter)):
        found = compare(copied, live, context.cluster.clock.now(), entry.expiry_error_seconds)
        if not first_key:
            differing = (found.only_a["key"], found.value["key"], found.only_b)
            first_key = min((keys[0].as_py() for keys in differing if len(keys)), default=b"")
        missing += checksum(found.only_a["key"], found.only_a["value"])
        other += checksum(found.value["key"], found.value["value"])
        added += checksum(found.only_b, found.only_b)
        expiring += found.expiring
    return _DifferentRows(missing, other, added, expiring, first_key)


def _copied_rows(context: BackupContext, entry: LedgerEntry, converter: Converter) -> Iterator[pa.RecordBatch]:
    """The copy's newest row of each user key, without tombstones, including expired rows."""
    from tikv_br.backupset.rows import read_rows
    from tikv_br.formats.rows import LiveFilter

    newest = LiveFilter(now=0)
    for file in sorted(entry.files, key=lambda file: file.start_key):
        for batch in read_rows(context.store, file, converter.target):
            yield newest.apply(batch)


def _cluster_rows(context: BackupContext, entry: LedgerEntry, converter: Converter) -> Iterator[pa.RecordBatch]:
    """The cluster's rows, with user keys."""
    import pyarrow.compute as pc

    from tikv_br.formats import columns

    prefix = len(converter.source.prefix)
    raw = context.cluster.raw(converter.source.keyspace_id)
    for page in raw.scan_pages(entry.start, entry.end):
        keys = pc.binary_replace_slice(page.keys, 0, prefix, b"") if prefix else page.keys
        yield columns.records(keys, page.values)


def _to_interval(entry: LedgerEntry) -> Interval:
    return Interval(entry.start, entry.end, entry.source.total_bytes, max(len(entry.regions), 1))


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
        f"; {rows.missing.total_kvs} rows are only in the backup, {rows.added.total_kvs} only in the cluster, "
        f"{rows.other.total_kvs} have another value; the first key is {show_key(rows.first_key)}"
        if rows is not None
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
