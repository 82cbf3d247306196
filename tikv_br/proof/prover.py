"""Prove that the cluster holds what the backup holds: the stores' own checksums against the recorded ones.

A store counts the rows that live by its own clock, at one moment for each region and request. Where rows may expire, the
recorded sums are therefore no measure: the file is read, and its rows are counted for every second at which the answer
may have been given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import NamedTuple

from formats.api_version import ApiVersion
from formats.checksum import Checksum
from formats.keys import KeyCodec
from tikv_br.backupset.coverage import KeyRange, intersection
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.cluster import Cluster
from tikv_br.errors import ChecksumMismatch
from tikv_br.proof.live_sums import LiveSums, count_live
from tikv_br.proof.ranges import codec_of, user_range
from tikv_br.proof.rewrite import UNCHANGED, Rewrite
from tikv_br.proof.stored_rows import naming, records
from tikv_br.storage.base import ObjectStore

CLOCK_SECONDS = 5
"""How far a store's clock may be from ours, and an expiry from the recorded one: it was asked for, in whole seconds."""
SCAN_SECONDS = 300
"""Rows that expire within this time may vanish while rows are compared."""


class _Answer(NamedTuple):
    """What the cluster said of a range, and between which seconds by the stores' clocks."""

    span: KeyRange
    sums: Checksum
    first: int
    last: int


class Prover:
    """Compares files, or parts of them, with what the cluster has. Thread-safe."""

    def __init__(self, cluster: Cluster, store: ObjectStore, api_version: ApiVersion) -> None:
        """``store`` holds the files, written in ``api_version``, which is the cluster's too."""
        self._cluster = cluster
        self._store = store
        self._api_version = api_version

    def prove_all(self, parts: Sequence[tuple[FileEntry, KeyRange, Rewrite]], threads: int) -> Checksum:
        """`prove` for all ``parts``, several at once; all together. Raises for the first that differs."""
        with ThreadPoolExecutor(threads, thread_name_prefix="prove") as pool:
            try:
                return reduce(Checksum.merge, pool.map(lambda part: self.prove(*part), parts), Checksum())
            finally:
                pool.shutdown(cancel_futures=True)

    def prove(self, file: FileEntry, span: KeyRange, rewrite: Rewrite = UNCHANGED) -> Checksum:
        """The checksum of ``span``, all of the file's range or a part of it, as the cluster has it under ``rewrite``.

        Raises `ChecksumMismatch` naming range and file, besides what `compare` raises.
        """
        equal, differences = self.compare(file, span, rewrite)
        if differences:
            raise ChecksumMismatch(differences[0])
        return equal

    def compare(self, file: FileEntry, span: KeyRange, rewrite: Rewrite = UNCHANGED) -> tuple[Checksum, list[str]]:
        """The checksum of what is equal in the cluster, and what differs, region by region.

        The file is read only where its recorded sums cannot tell: in part, rewritten, or with rows that expire just now.
        Raises `BackupDamaged` when it has to be and is not sound.
        """
        if span == file.key_range and not rewrite.changes:
            answer = self._ask(span)
            if answer.sums in recorded(file, answer.first, answer.last):
                return answer.sums, []
            if not self._may_expire(file):
                return Checksum(), [_difference(file, answer, _sums(file))]
        return self._compare_apart(file, rewrite, self._pieces(rewrite.range(span)))

    def compare_empty(self, span: KeyRange) -> list[str]:
        """What differs in a range of which the backup has no row."""
        rows = self._ask(span).sums.total_kvs
        return [f"the cluster holds {rows} rows in {span}, the backup none"] if rows else []

    def _compare_apart(
        self, file: FileEntry, rewrite: Rewrite, pieces: Sequence[KeyRange]
    ) -> tuple[Checksum, list[str]]:
        """Compare region by region with the rows of the file."""
        equal = Checksum()
        differences: list[str] = []
        unclear: list[_Answer] = []
        answers = [self._ask(piece) for piece in pieces]
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
        """Compare row by row where no sum tells: rows expire just now, and not all exactly at the recorded second."""
        from tikv_br.proof.row_check import compare_rows

        codec = codec_of(self._api_version, answers[0].span)
        raw = self._cluster.raw(codec.keyspace_id)
        now = int(time.time())
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

    def _ask(self, span: KeyRange) -> _Answer:
        codec = codec_of(self._api_version, span)
        began = int(time.time())
        sums = self._cluster.raw(codec.keyspace_id).checksum(*user_range(codec, span))
        return _Answer(span, sums, began - CLOCK_SECONDS, int(time.time()) + CLOCK_SECONDS)

    def _pieces(self, span: KeyRange) -> list[KeyRange]:
        """The range cut where regions end."""
        codec = KeyCodec(self._api_version)
        regions = self._cluster.pd.scan_regions(codec.bound(span.start), codec.bound(span.end))
        here = (KeyRange(codec.from_bound(region.start), codec.from_bound(region.end)) for region in regions)
        return [piece for each in here if not (piece := intersection(each, span)).is_empty]

    def _live(self, file: FileEntry, rewrite: Rewrite, answers: Sequence[_Answer]) -> list[LiveSums]:
        """What the rows of the file come to under the rewrite, in the ranges and at the times of the answers."""
        expected = [LiveSums(answer.span, answer.first, answer.last) for answer in answers]
        source, target = (codec_of(self._api_version, span) for span in (file.key_range, answers[0].span))
        with naming(file):
            rows = (rewrite.apply(batch, source, target) for batch in records(self._store, file, source))
            count_live(rows, target, expected)
        return expected

    def _may_expire(self, file: FileEntry) -> bool:
        """Whether rows may vanish by themselves; of files of the Go tool it is not recorded."""
        return self._api_version.has_ttl and (not file.tail_sha256 or file.expiry.total_kvs > 0)


def _sums(file: FileEntry) -> Checksum:
    return Checksum(file.crc64xor, file.total_kvs, file.total_bytes)


def recorded(file: FileEntry, first: int, last: int) -> list[Checksum]:
    """What the record alone says that the cluster may answer between two seconds since the epoch.

    All rows while none has expired, or those that never do; nothing while rows expire.
    """
    everything, expiry = _sums(file), file.expiry
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
        f"{answer.span} of the cluster is not {file.name}: {found.total_kvs} rows, {found.total_bytes} bytes, "
        f"crc64xor {found.crc64xor:016x}, instead of {expected.total_kvs} rows, {expected.total_bytes} bytes, "
        f"crc64xor {expected.crc64xor:016x}"
    )
