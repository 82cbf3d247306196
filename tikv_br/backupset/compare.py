"""Compares a cluster with a backup: the stores' checksums with the recorded ones.

A store counts the rows that are alive by its own clock, at one moment for each region and request. Where rows may expire, the
recorded sums are therefore no measure: the file is read, and its rows are counted for every second at which the answer
may have been given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import Expiry, FileEntry
from tikv_br.backupset.rows import file_errors, read_rows
from tikv_br.cancellation import Cancellation, TaskCancelled, cancelled_on_error, inherit
from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.errors import ApiVersionMismatch, ChecksumMismatch, TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection, user_range
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite
from tikv_br.storage.base import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.formats.columns import Flags
    from tikv_br.formats.rawscan import ScanPage

T = TypeVar("T")
R = TypeVar("R")


def check_same_encoding(backup: ApiVersion, info: ClusterInfo) -> None:
    """Raise `ApiVersionMismatch` for a backup in another encoding than the cluster's."""
    if backup is not info.api_version:
        raise ApiVersionMismatch(
            f"the backup is in API {backup.label} encoding, the cluster runs API {info.api_version.label}"
        )


@dataclass
class LiveSums:
    """The checksum of the rows of one RPC range; a row with expiry ``e`` lives at all seconds before ``e``."""

    span: KeyRange
    first: int
    """The seconds since the epoch of interest, both ends included."""
    last: int
    lasting: Checksum = field(default_factory=Checksum)
    """Of the rows that outlive the window."""
    expiring: dict[int, Checksum] = field(default_factory=dict)
    """Of the rows that expire inside the window, by second."""
    passing: list[pa.RecordBatch] = field(default_factory=list)
    """Those rows themselves."""

    def at(self, now: int) -> Checksum:
        """The checksum of the rows alive at ``now``, a second of the window."""
        alive = (sums for second, sums in self.expiring.items() if second > now)
        return sum(alive, start=self.lasting)

    def each(self) -> Iterator[Checksum]:
        """The checksum at every second of the window."""
        return (self.at(now) for now in range(self.first, self.last + 1))

    def add(self, records: pa.RecordBatch, codec: KeyCodec) -> None:
        """Count records of ``SCHEMA``: one version a key, no tombstones."""
        from tikv_br.formats import columns
        from tikv_br.formats.rows import within

        records = within(records, *user_range(codec, self.span))
        expire_ts = columns.numbers(records["expire_ts"])
        self.lasting += _checksum(records, codec, (expire_ts == 0) | (expire_ts > self.last))
        passing = (expire_ts > self.first) & (expire_ts <= self.last)
        if not passing.any():
            return
        self.passing.append(_filtered(records, passing))
        for second in range(self.first + 1, self.last + 1):
            if (gone := expire_ts == second).any():
                self.expiring[second] = self.expiring.get(second, Checksum()) + _checksum(records, codec, gone)


def count_live(batches: Iterable[pa.RecordBatch], codec: KeyCodec, sums: Sequence[LiveSums]) -> None:
    """Count the rows of a file (``SCHEMA``, in file order) in each of ``sums``. Raises `FormatError`."""
    from tikv_br.formats.rows import LiveFilter

    newest = LiveFilter(now=0)
    for records in batches:
        alive = newest.apply(records)
        for each in sums:
            each.add(alive, codec)


def _checksum(records: pa.RecordBatch, codec: KeyCodec, wanted: Flags) -> Checksum:
    chosen = _filtered(records, wanted)
    return checksum(chosen["key"], chosen["value"], codec.prefix)


def _filtered(records: pa.RecordBatch, wanted: Flags) -> pa.RecordBatch:
    import pyarrow as pa

    return records if wanted.all() else records.filter(pa.array(wanted))


def compare_rows(pages: Iterable[ScanPage], expected: LiveSums, codec: KeyCodec) -> tuple[Checksum, bool]:
    """The checksum of scanned rows, and whether they are those expected.

    All rows that outlive the window must be present. Rows that expire inside it may be missing, but their values must be as
    expected. The pages cover the range of ``expected``.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from tikv_br.formats.columns import SCHEMA

    passing = pa.Table.from_batches(expected.passing, SCHEMA)  # none are left where all of them have expired by now
    passing_keys, passing_values = (passing[name].combine_chunks() for name in ("key", "value"))
    lasting = there = Checksum()
    equal = True
    for page in pages:
        at = pc.index_in(_user_keys(page.keys, codec), value_set=passing_keys)
        known = at.is_valid()
        values = page.values.filter(known)
        equal = equal and values.equals(passing_values.take(at.filter(known)))
        there += checksum(page.keys.filter(known), values)
        lasting += checksum(page.keys.filter(at.is_null()), page.values.filter(at.is_null()))
    return there + lasting, equal and lasting == expected.lasting


def count_missing(
    raw: RawClient, batches: Iterable[pa.RecordBatch], span: KeyRange, now: int, *, allow_others: bool = False
) -> tuple[int, bytes]:
    """How many of a file's rows a range of the cluster lacks, and the first such user key.

    0 and no key where the cluster shows any other value in the range or, without ``allow_others``, any other key. Rows that
    expire until ``now`` may be missing.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from tikv_br.formats.rows import LiveFilter, unexpired

    newest = LiveFilter(now=0)
    missing, first, start = 0, b"", span.start
    for rows in (newest.apply(batch) for batch in batches):
        if not rows.num_rows:
            continue
        end = raw.codec.rpc_key(rows["key"][-1].as_py() + b"\0")
        seen = np.zeros(rows.num_rows, bool)
        for page in raw.scan_pages(start, end):
            at = pc.index_in(_user_keys(page.keys, raw.codec), value_set=rows["key"])
            known = at.drop_null()
            if at.null_count and not allow_others:
                return 0, b""
            if not page.values.filter(at.is_valid()).equals(rows["value"].take(known)):
                return 0, b""
            seen[known.to_numpy()] = True
        absent = unexpired(rows.filter(pa.array(~seen)), now)
        if absent.num_rows and not missing:
            first = absent["key"][0].as_py()
        missing += absent.num_rows
        start = end
    if not allow_others and start != span.end and any(len(page.keys) for page in raw.scan_pages(start, span.end)):
        return 0, b""
    return missing, first


def _on_threads(compare: Callable[[T], R], parts: Sequence[T], threads: int) -> list[R]:
    """Compare all parts, until the first one that raises."""
    with ThreadPoolExecutor(threads, thread_name_prefix="compare") as pool, cancelled_on_error():
        try:
            return list(pool.map(inherit(compare), parts))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _user_keys(keys: pa.LargeBinaryArray, codec: KeyCodec) -> pa.LargeBinaryArray:
    import pyarrow.compute as pc

    return pc.binary_replace_slice(keys, 0, len(codec.prefix), b"") if codec.prefix else keys


SCAN_SECONDS = 300
"""Rows that expire within this time may vanish while rows are compared."""


class _Answer(NamedTuple):
    """The cluster's checksum of a range, and between which seconds of the stores' clocks it was computed."""

    span: KeyRange
    sums: Checksum
    first: int
    last: int


class BackupComparison:
    """Compares files, or parts of them, with a cluster. Thread-safe."""

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

        A file is compared whole by one request for each of the pieces that ``cuts`` makes of it, ascending RPC keys by its
        name, all at once. A store computes a checksum on one processor. ``expiry_recorded`` is that of the `BackupSet`.
        With ``others``, keys that the backup does not have are no difference: their numbers are stored there, by part.
        """
        self._cluster = cluster
        self._store = store
        self._api_version = api_version
        self._cuts = cuts or {}
        self._expiry_recorded = expiry_recorded
        self._others = others

    def require_all_equal(self, parts: Sequence[tuple[FileEntry, KeyRange, Rewrite]], threads: int) -> Checksum:
        """`require_equal` for all ``parts`` in parallel; returns their merged checksum."""
        return reduce(Checksum.merge, _on_threads(lambda part: self.require_equal(*part), parts, threads), Checksum())

    def require_same_rows(self, parts: Sequence[tuple[FileEntry, KeyRange, Rewrite]], threads: int) -> None:
        """Compare row by row parts that have equal sums, in parallel.

        Sums are XORs: they are also equal if an even number of rows has the same change. Raises `ChecksumMismatch`.
        """

        def compare(part: tuple[FileEntry, KeyRange, Rewrite]) -> None:
            _, differences = self._compare_keys(*part, {})
            if differences:
                raise ChecksumMismatch(differences[0])

        _on_threads(compare, parts, threads)

    def require_equal(self, file: FileEntry, span: KeyRange, rewrite: Rewrite = UNCHANGED) -> Checksum:
        """The checksum of ``span``, all of the file's range or a part of it, as the cluster has it under ``rewrite``.

        Raises `ChecksumMismatch` naming range and file, besides what `compare` raises.
        """
        equal, differences = self.compare(file, span, rewrite)
        if differences:
            remark = self._cluster.clock.remark()
            raise ChecksumMismatch(f"{differences[0]}. {remark}" if remark else differences[0])
        return equal

    def compare(self, file: FileEntry, span: KeyRange, rewrite: Rewrite = UNCHANGED) -> tuple[Checksum, list[str]]:
        """The checksum of what is equal in the cluster, and what differs, region by region.

        The file is read only if its recorded sums do not suffice: for a part, with rewritten keys, or if rows expire now.
        Then raises `BackupDamaged` if it is damaged.
        """
        equal, differences = self._compare_sums(file, span, rewrite)
        if differences and self._others is not None:
            return self._compare_keys(file, span, rewrite, self._others)
        return equal, differences

    def _compare_sums(self, file: FileEntry, span: KeyRange, rewrite: Rewrite) -> tuple[Checksum, list[str]]:
        if span == file.key_range and not rewrite.changes:
            answer = self._request_checksum(span, self._cuts.get(file.name, ()))
            if answer.sums in recorded_sums(file, answer.first, answer.last):
                return answer.sums, []
            if not self._may_expire(file):
                return Checksum(), [_difference(file, answer, _sums(file))]
        return self._compare_by_region(file, rewrite, self._pieces(rewrite.range(span)))

    def hidden_rows(self, file: FileEntry, span: KeyRange, rewrite: Rewrite = UNCHANGED) -> int:
        """How many rows of `span` newer deletes hide, where that is the only difference; else 0.

        All rows that the cluster shows must be those of the file, unless others are counted, and the first missing one must have
        a tombstone (API V2). Reads both sides, unless the cluster shows no row of a whole file. Raises as `compare`.
        """
        source, target = (codec_of(self._api_version, each) for each in (file.key_range, rewrite.range(span)))
        raw = self._cluster.raw(target.keyspace_id)
        with file_errors(file):
            batches = (rewrite.apply(batch, source, target) for batch in read_rows(self._store, file, source, span))
            if (
                span == file.key_range
                and not self._may_expire(file)
                and not self._request_checksum(rewrite.range(span)).sums.total_kvs
            ):
                return file.total_kvs if raw.has_tombstone(next(batches)["key"][0].as_py()) else 0
            now = self._cluster.clock.now() + CLOCK_SECONDS
            allow_others = self._others is not None
            missing, first = count_missing(raw, batches, rewrite.range(span), now, allow_others=allow_others)
        return missing if missing and raw.has_tombstone(first) else 0

    def compare_empty(self, span: KeyRange) -> list[str]:
        """What differs in a range of which the backup has no row."""
        rows = self.count_rows(span)
        return [f"the cluster holds {rows} rows in {span}, the backup none"] if rows else []

    def count_rows(self, span: KeyRange) -> int:
        """The number of rows that the cluster has in a range."""
        return self._request_checksum(span).sums.total_kvs

    def _compare_keys(
        self, file: FileEntry, span: KeyRange, rewrite: Rewrite, others: dict[tuple[str, KeyRange], int]
    ) -> tuple[Checksum, list[str]]:
        """Compare the keys of the file row by row, and count the other rows of the cluster."""
        import pyarrow.compute as pc

        from tikv_br.backupset.row_differences import compare, lockstep
        from tikv_br.formats import columns
        from tikv_br.formats.rows import LiveFilter

        place = rewrite.range(span)
        source, target = (codec_of(self._api_version, each) for each in (file.key_range, place))
        newest = LiveFilter(now=0)
        stored = (
            newest.apply(rewrite.apply(batch, source, target)) for batch in read_rows(self._store, file, source, span)
        )
        pages = self._cluster.raw(target.keyspace_id).scan_pages(place.start, place.end)
        live = (columns.records(_user_keys(page.keys, target), page.values) for page in pages)
        equal, missing, changed, other = Checksum(), 0, 0, 0
        with file_errors(file):
            for ours, theirs in lockstep(stored, live):
                found = compare(ours, theirs, self._cluster.clock.now())
                same = theirs.filter(pc.is_in(theirs["key"], value_set=ours["key"]))
                equal += checksum(same["key"], same["value"], target.prefix)
                missing += len(found.only_a)
                changed += len(found.value)
                other += len(found.only_b)
        others[file.name, span] = other
        if not missing and not changed:
            return equal, []
        what = f"{missing} rows are missing and {changed} have another value"
        return Checksum(), [f"{place} of the cluster differs from {file.name}: {what}"]

    def _compare_by_region(
        self, file: FileEntry, rewrite: Rewrite, pieces: Sequence[KeyRange]
    ) -> tuple[Checksum, list[str]]:
        """Compare region by region with the rows of the file."""
        equal = Checksum()
        differences: list[str] = []
        unclear: list[_Answer] = []
        answers = [self._request_checksum(piece) for piece in pieces]
        for answer, expected in zip(answers, self._live(file, rewrite, answers), strict=True):
            if answer.sums in expected.each():
                equal += answer.sums
            elif expected.expiring:
                unclear.append(answer)
            else:
                differences.append(_difference(file, answer, expected.at(answer.first)))
        if unclear:
            found, more = self._compare_rows(file, rewrite, unclear)
            return equal + found, differences + more
        return equal, differences

    def _compare_rows(
        self, file: FileEntry, rewrite: Rewrite, answers: Sequence[_Answer]
    ) -> tuple[Checksum, list[str]]:
        """Compare row by row, if rows expire now: stores do not expire all of them at exactly the recorded second."""
        codec = codec_of(self._api_version, answers[0].span)
        raw = self._cluster.raw(codec.keyspace_id)
        now = self._cluster.clock.now()
        windows = [answer._replace(first=now - CLOCK_SECONDS, last=now + SCAN_SECONDS) for answer in answers]
        equal = Checksum()
        differences: list[str] = []
        for window, expected in zip(windows, self._live(file, rewrite, windows), strict=True):
            found, same = compare_rows(raw.scan_pages(window.span.start, window.span.end), expected, codec)
            if same:
                equal += found
            else:
                differences.append(_difference(file, window._replace(sums=found), expected.at(now)))
        return equal, differences

    def _request_checksum(self, span: KeyRange, cuts: Sequence[bytes] = ()) -> _Answer:
        codec = codec_of(self._api_version, span)
        raw = self._cluster.raw(codec.keyspace_id)

        def ask(piece: KeyRange) -> Checksum:
            return raw.checksum(*user_range(codec, piece))

        began = self._cluster.clock.now()
        pieces = [KeyRange(*piece) for piece in pairwise((span.start, *cuts, span.end))]
        with ThreadPoolExecutor(len(pieces), thread_name_prefix="checksum") as pool:
            sums = sum(pool.map(inherit(ask), pieces), start=Checksum())
        return _Answer(span, sums, began - CLOCK_SECONDS, self._cluster.clock.now() + CLOCK_SECONDS)

    def _pieces(self, span: KeyRange) -> list[KeyRange]:
        """The range cut where regions end."""
        codec = KeyCodec(self._api_version)
        regions = self._cluster.pd.scan_regions(codec.bound(span.start), codec.bound(span.end))
        here = (KeyRange(codec.from_bound(region.start), codec.from_bound(region.end)) for region in regions)
        return [piece for each in here if not (piece := intersection(each, span)).is_empty]

    def _live(self, file: FileEntry, rewrite: Rewrite, answers: Sequence[_Answer]) -> list[LiveSums]:
        """The checksums of the file's rows under the rewrite, for the ranges and times of the answers."""
        expected = [LiveSums(answer.span, answer.first, answer.last) for answer in answers]
        source, target = (codec_of(self._api_version, span) for span in (file.key_range, answers[0].span))
        with file_errors(file):
            rows = (rewrite.apply(batch, source, target) for batch in read_rows(self._store, file, source))
            count_live(rows, target, expected)
        return expected

    def _may_expire(self, file: FileEntry) -> bool:
        """Whether rows may expire."""
        return self._api_version.has_ttl and (not self._expiry_recorded or file.expiry.total_kvs > 0)


class BackgroundComparison:
    """Compares parts on threads of its own as they are handed in, until `stop`. Thread-safe."""

    def __init__(self, comparison: BackupComparison, threads: int) -> None:
        self._comparison = comparison
        self._cancellation = Cancellation()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compare")
        self._futures: dict[tuple[str, KeyRange], Future[Checksum | None]] = {}
        self._at_work: list[tuple[float, float]] = []
        """From when to when each part was compared."""

    def add(self, file: FileEntry, span: KeyRange, rewrite: Rewrite) -> None:
        """Compare a restored part; the same part may be added again."""
        with self._cancellation.active():
            self._futures[file.name, span] = self._pool.submit(inherit(self._compare), file, span, rewrite)

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
        """For how long parts were compared before ``end``, by the monotonic clock; time for several at once counts once."""
        total = 0.0
        reached = 0.0
        for first, last in sorted(self._at_work):
            total += max(min(last, end) - max(first, reached), 0.0)
            reached = max(reached, last)
        return total

    def _compare(self, file: FileEntry, span: KeyRange, rewrite: Rewrite) -> Checksum | None:
        began = time.monotonic()
        try:
            sums, differences = self._comparison.compare(file, span, rewrite)
        except (TikvBrError, TaskCancelled):
            return None
        finally:
            self._at_work.append((began, time.monotonic()))
        return None if differences else sums


def _sums(file: FileEntry) -> Checksum:
    return Checksum(file.crc64xor, file.total_kvs, file.total_bytes)


def recorded_sums(file: FileEntry, first: int, last: int) -> list[Checksum]:
    """`possible_sums` of one file."""
    return possible_sums(_sums(file), file.expiry, first, last)


def possible_sums(everything: Checksum, expiry: Expiry, first: int, last: int) -> list[Checksum]:
    """The checksums that the cluster may answer between two seconds since the epoch, by the recorded sums alone.

    That of all rows before the first expires, that of the lasting rows after the last has expired; none in between.
    """
    if not expiry.total_kvs or expiry.earliest > last:
        return [everything]
    if expiry.latest > first:
        return []
    lasting = Checksum(
        everything.crc64xor ^ expiry.crc64xor,
        everything.total_kvs - expiry.total_kvs,
        everything.total_bytes - expiry.total_bytes,
    )
    return [lasting]


def _difference(file: FileEntry, answer: _Answer, expected: Checksum) -> str:
    found = answer.sums
    return (
        f"{answer.span} of the cluster differs from {file.name}: {found.total_kvs} rows, {found.total_bytes} bytes, "
        f"checksum {found.crc64xor:016x}, instead of {expected.total_kvs} rows, {expected.total_bytes} bytes, "
        f"checksum {expected.crc64xor:016x}"
    )
