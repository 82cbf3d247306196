"""Compares files of a backup with a cluster: the stores' checksums with the recorded ones, and rows where these do not suffice.

Recorded checksums do not suffice for a part of a file, for keys with another prefix, and while rows expire.

Compares parts of a transactional backup with a cluster, by checksums that the stores compute of what a reader of now sees.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileEntry, FilePair, Totals, totals
from tikv_br.cancellation import Cancellation, TaskCancelled, inherit, run_on_threads
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.txn_calls import TxnCalls
from tikv_br.cluster.txnkv import PrefixRule, txn_checksum
from tikv_br.compare.ranges import compare_range
from tikv_br.compare.report import Report
from tikv_br.compare.sides import ClusterSide, FileRows
from tikv_br.errors import ChecksumMismatch, TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite
from tikv_br.formats.keys.text import show_key
from tikv_br.storage.base import ObjectStore

if TYPE_CHECKING:
    from tikv_br.compare.rows import DifferenceSums


class FilePart(NamedTuple):
    """A file of a backup, or a part of it, and the keys that its rows have in a cluster. Picklable."""

    file: FileEntry
    """Of transactional data: the file of column family ``write``."""
    span: KeyRange
    """RPC keys as in the file."""
    rewrite: Rewrite = UNCHANGED
    values: FileEntry | None = None
    """The file of the same range with the long values of transactional data; None = there are none."""

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files in the order in which stores must ingest them."""
        return FilePair(self.file, self.values).files

    @property
    def totals(self) -> Totals:
        """Sums over the files, each as a whole."""
        return totals(self.files)

    @property
    def target(self) -> KeyRange:
        """RPC keys as in the cluster."""
        return self.rewrite.range(self.span)

    def rows(
        self, store: ObjectStore, api_version: ApiVersion, cluster: KeyCodec | None = None
    ) -> tuple[FileRows, KeyRange]:
        """The rows of the files, and the range of user keys in a cluster, by default RawKV of the same API version."""
        cluster = cluster or KeyCodec(api_version)
        source = codec_of(api_version, self.file.key_range, cluster.mode)
        target = codec_of(cluster.api_version, self.target, cluster.mode)
        return FileRows(store, self.file, source, target, self.rewrite, self.values), target.user_range(self.target)

    def __str__(self) -> str:
        return self.file.name


class Comparison(abc.ABC):
    """Compares parts of a backup with a cluster. Thread-safe."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @abc.abstractmethod
    def compare(self, part: FilePart, *, exact: bool = False) -> tuple[Checksum, str]:
        """The checksum of the backup's keys in the cluster and no text, or an empty one and what differs."""

    @abc.abstractmethod
    def count_rows(self, span: KeyRange) -> int:
        """The number of rows that the cluster has in a range."""

    def compare_empty(self, span: KeyRange) -> str:
        """Return the difference if the cluster has rows in a range where the backup has none; else empty."""
        rows = self.count_rows(span)
        return f"the cluster holds {rows} rows in {span}, the backup none" if rows else ""

    def require_all_equal(self, parts: Sequence[FilePart], threads: int, *, exact: bool = False) -> Checksum:
        """`require_equal` for all ``parts`` in parallel; returns their merged checksum."""
        found = run_on_threads(partial(self.require_equal, exact=exact), parts, threads, "compare")
        return sum(found, start=Checksum())

    def require_equal(self, part: FilePart, *, exact: bool = False) -> Checksum:
        """The checksum of a part as the cluster has it.

        Raises `ChecksumMismatch` naming range and file, besides what `compare` raises.
        """
        equal, difference = self.compare(part, exact=exact)
        if difference:
            remark = self._cluster.clock.remark()
            raise ChecksumMismatch(f"{difference}. {remark}" if remark else difference)
        return equal


class BackupComparison(Comparison):
    """Compares files of RawKV data, or parts of them."""

    def __init__(
        self,
        cluster: Cluster,
        store: ObjectStore,
        api_version: ApiVersion,
        cuts: Mapping[str, Sequence[bytes]] | None = None,
        *,
        expiry_recorded: bool,
        others: dict[tuple[str, KeyRange], int] | None = None,
    ) -> None:
        """``store`` holds the files, written in ``api_version``, which is the cluster's too.

        The checksum of a whole file is requested in parts that ``cuts``, ascending RPC keys by the file's name, divide.
        ``expiry_recorded`` is as in the `BackupSet`.
        With ``others``, keys that the backup does not have are no difference: their numbers are stored there, by part.
        """
        super().__init__(cluster)
        self._store = store
        self._api_version = api_version
        self._cuts = cuts or {}
        self._expiry_recorded = expiry_recorded
        self._others = others

    def compare(self, part: FilePart, *, exact: bool = False) -> tuple[Checksum, str]:
        """The checksum of the backup's keys in the cluster and no text, or an empty one and what differs.

        The file is read only if its recorded sums do not suffice, or if ``exact``: sums are XORs, and equal as well if an even
        number of rows has the same change. Then raises `BackupDamaged` if it is damaged.
        """
        file = part.file
        rows, cluster, there = self._sides(part)
        recorded = rows.recorded(there)
        cuts = [cluster.codec.user_key(cut) for cut in self._cuts.get(file.name, ())] if recorded else []
        if recorded and not self._may_expire(file):
            found = cluster.sums(there, cuts).sums
            difference = "" if found == recorded.everything else differing_sums(part, found, recorded.everything)
        else:
            report = compare_range(rows, cluster, there, keys=1, cuts=cuts)
            found, difference = report.sums, _differing_ranges(part, cluster, report)
        # Equal sums may hide the same change of two rows; different ones may be due to rows that only the cluster has.
        must_read = self._others is not None if difference else exact
        if must_read:
            sums = self._compare_rows(part)
            found, difference = sums.same, _differing_rows(part, sums)
            if self._others is not None:
                self._others[file.name, part.span] = sums.only_b.total_kvs
        return (Checksum(), difference) if difference else (found, "")

    def hidden_rows(self, part: FilePart) -> int:
        """Return the number of rows of a part that newer deletes hide, if that is the only difference; else 0.

        All rows that the cluster shows must be in the file, unless others are counted, and the first missing one must have
        a tombstone (API V2). Reads both sides, unless the cluster shows no row of a whole file. Raises as `compare`.
        """
        file = part.file
        rows, cluster, there = self._sides(part)
        if part.span == file.key_range and not self._may_expire(file) and not cluster.sums(there).sums.total_kvs:
            return file.total_kvs if cluster.raw.has_tombstone(next(rows.pages(there))["key"][0].as_py()) else 0
        found = self._compare_rows(part)
        if found.value.total_kvs or (found.only_b.total_kvs and self._others is None) or found.first_only_a is None:
            return 0
        return found.only_a.total_kvs if cluster.raw.has_tombstone(found.first_only_a) else 0

    def count_rows(self, span: KeyRange) -> int:
        """The number of rows that the cluster has in a range."""
        codec = codec_of(self._api_version, span)
        wanted = codec.user_range(span)
        return self._cluster.raw(codec.keyspace_id).checksum(wanted).total_kvs

    def _sides(self, part: FilePart) -> tuple[FileRows, ClusterSide, KeyRange]:
        rows, there = part.rows(self._store, self._api_version)
        return rows, ClusterSide(self._cluster.raw(rows.target.keyspace_id)), there

    def _compare_rows(self, part: FilePart) -> DifferenceSums:
        from tikv_br.compare.rows import DifferenceSums, compare_rows

        rows, cluster, there = self._sides(part)
        sums = DifferenceSums(cluster.codec.prefix)
        for found in compare_rows(rows.pages(there), cluster.pages(there), cluster.now):
            sums.add(found)
        return sums

    def _may_expire(self, file: FileEntry) -> bool:
        return self._api_version.has_ttl and (not self._expiry_recorded or file.expiry.total_kvs > 0)


class BackgroundComparison:
    """Compares parts on threads of its own as they are handed in, until `stop`. Thread-safe."""

    def __init__(self, comparison: Comparison, threads: int) -> None:
        self._comparison = comparison
        self._cancellation = Cancellation()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compare")
        self._futures: dict[tuple[str, KeyRange], Future[Checksum | None]] = {}
        self._at_work: list[tuple[float, float]] = []
        """Start and end of the comparison of each part."""

    def add(self, part: FilePart) -> None:
        """Compare a restored part; the same part may be added again."""
        with self._cancellation.active():
            self._futures[part.file.name, part.span] = self._pool.submit(inherit(self._compare), part)

    def finish(self) -> dict[tuple[str, KeyRange], Checksum]:
        """Wait for all parts; the checksums of those that were found equal, by name of the file and span.

        The others differ or could not be compared; compare them again for the reason.
        """
        wait(self._futures.values())
        self._pool.shutdown()
        found = {part: future.result() for part, future in self._futures.items()}
        return {part: sums for part, sums in found.items() if sums is not None}

    def stop(self) -> None:
        """Cancel what is under way; idempotent."""
        self._cancellation.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def seconds_until(self, end: float) -> float:
        """Return the seconds spent on comparisons before ``end`` (monotonic clock); concurrent ones count once."""
        total = 0.0
        reached = 0.0
        for first, last in sorted(self._at_work):
            total += max(min(last, end) - max(first, reached), 0.0)
            reached = max(reached, last)
        return total

    def _compare(self, part: FilePart) -> Checksum | None:
        began = time.monotonic()
        try:
            sums, difference = self._comparison.compare(part)
        except (TikvBrError, TaskCancelled):
            return None
        finally:
            self._at_work.append((began, time.monotonic()))
        return None if difference else sums


def differing_sums(part: FilePart, found: Checksum, expected: Checksum) -> str:
    """Describe a difference between the checksums of a part."""
    return (
        f"{part.span} of the cluster differs from {part}: {found.total_kvs} rows, {found.total_bytes} bytes, "
        f"checksum {found.crc64xor:016x}, instead of {expected.total_kvs} rows, {expected.total_bytes} bytes, "
        f"checksum {expected.crc64xor:016x}"
    )


def _differing_rows(part: FilePart, found: DifferenceSums) -> str:
    missing, changed = found.only_a.total_kvs, found.value.total_kvs
    if not missing and not changed:
        return ""
    return (
        f"{part.target} of the cluster differs from {part}: {missing} rows are missing and {changed} have another value"
    )


def _differing_ranges(part: FilePart, cluster: ClusterSide, report: Report) -> str:
    if not report.ranges:
        return ""
    counts, span = report.counts, report.ranges[0].span
    where = str(cluster.codec.rpc_range(span))
    if len(report.ranges) > 1:
        where += f" and {len(report.ranges) - 1} more ranges"
    return (
        f"{where} of the cluster differs from {part}: {counts.only_a} rows are missing, {counts.value} have another value, "
        f"{counts.only_b} are not in the backup; the first key is {show_key(report.keys[0].key)}"
    )


SHOWN_PARTS = 3
BATCH_BYTES = 4 << 20
"""Bytes of values that are read by one request."""


class TxnComparison(Comparison):
    """Compares parts with a cluster. Thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        store: ObjectStore,
        api_version: ApiVersion,
        others: dict[tuple[str, KeyRange], int] | None = None,
    ) -> None:
        """``store`` holds the files, written in ``api_version``.

        With ``others``, keys that the backup does not have are no difference: their numbers are stored there, by part.
        """
        super().__init__(cluster)
        self._store, self._api_version, self._others = store, api_version, others
        self._codec = KeyCodec(cluster.api_version, mode=KeyMode.TXN)

    def require_all_equal(self, parts: Sequence[FilePart], threads: int, *, exact: bool = False) -> Checksum:
        """The merged checksum of all parts. Raises `ChecksumMismatch` that counts the parts that differ, and names the first."""
        found = run_on_threads(lambda part: self.compare(part, exact=exact), parts, threads, "compare")
        differences = [difference for _, difference in found if difference]
        if differences:
            count = f"{len(differences)} of {len(parts)} parts of the backup differ: " if len(parts) > 1 else ""
            raise ChecksumMismatch(count + "; ".join(differences[:SHOWN_PARTS]))
        return sum((sums for sums, _ in found), start=Checksum())

    def compare(self, part: FilePart, *, exact: bool = False) -> tuple[Checksum, str]:
        """The checksum of a part in the cluster and no text, or an empty one and what differs.

        Reads the files of a part that is not whole, and with `others` if the checksums differ. ``exact`` changes nothing.
        """
        del exact
        locks = SnapshotLocks(self._cluster, self._cluster.pd.tso())
        is_whole = part.span == part.file.key_range
        expected = Checksum(*part.totals[:3]) if is_whole else self._sums(part)
        rule = PrefixRule(part.rewrite.old, part.rewrite.new) if is_whole and part.rewrite.changes else None
        found = txn_checksum(self._cluster, part.target, locks, rule)
        if found == expected:
            return found, ""
        if self._others is None:
            return Checksum(), differing_sums(part, found, expected)
        if different := self._different_rows(part, locks):
            return Checksum(), f"{part.target} of the cluster differs from {part} in {different} rows of the backup"
        self._others[part.file.name, part.span] = found.total_kvs - expected.total_kvs
        return expected, ""

    def count_rows(self, span: KeyRange) -> int:
        """The number of rows that the cluster has in a range."""
        return txn_checksum(self._cluster, span, SnapshotLocks(self._cluster, self._cluster.pd.tso())).total_kvs

    def _sums(self, part: FilePart) -> Checksum:
        """The checksum of the rows of a part, by their keys in the cluster."""
        rows, span = part.rows(self._store, self._api_version, self._codec)
        prefix = rows.target.prefix
        return sum((checksum(page["key"], page["value"], prefix) for page in rows.pages(span)), start=Checksum())

    def _different_rows(self, part: FilePart, locks: SnapshotLocks) -> int:
        """The number of rows of a part that the cluster has not, or with another value."""
        calls = TxnCalls(self._cluster)
        return sum(
            len(wanted.items() - calls.batch_get(sorted(wanted), locks.ts, sorted(locks.resolved)).items())
            for wanted in self._batches(part)
        )

    def _batches(self, part: FilePart) -> Iterator[dict[bytes, bytes]]:
        """The rows of a part by RPC key, about `BATCH_BYTES` at a time."""
        rows, span = part.rows(self._store, self._api_version, self._codec)
        batch, size = dict[bytes, bytes](), 0
        for page in rows.pages(span):
            for key, value in zip(page["key"].to_pylist(), page["value"].to_pylist(), strict=True):
                batch[rows.target.rpc_key(key)] = value
                size += len(value)
                if size >= BATCH_BYTES:
                    yield batch
                    batch, size = {}, 0
        yield batch
