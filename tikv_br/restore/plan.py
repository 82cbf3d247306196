"""The planner: which files, which part of each, and where the target is split before. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tikv_br.backupset.coverage import KeyRange, intersection, missing
from tikv_br.backupset.files import FileEntry
from tikv_br.proof.rewrite import UNCHANGED, Rewrite

MIB = 1 << 20
REGION_BYTES = 96 * MIB
"""What a region should hold after the restore: the stores' own default for a split by size."""


class Wanted(NamedTuple):
    """A range of the backup that is to be restored, and how its keys are called in the cluster."""

    span: KeyRange
    rewrite: Rewrite = UNCHANGED

    @property
    def target(self) -> KeyRange:
        """The range in the cluster."""
        return self.rewrite.range(self.span)


class FilePart(NamedTuple):
    """One task: the part of one file that is wanted."""

    file: FileEntry
    span: KeyRange
    """RPC keys as in the file."""
    rewrite: Rewrite = UNCHANGED

    @property
    def target(self) -> KeyRange:
        """RPC keys as in the cluster."""
        return self.rewrite.range(self.span)

    def __str__(self) -> str:
        return self.file.name


class Brought(NamedTuple):
    """What a task has done."""

    regions: int = 0
    """That took in a file."""
    put: int = 0
    """Rows."""
    expired: int = 0
    """Rows that were left out."""
    uploaded: int = 0
    """Files that were sent to stores from here."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The plan, with RPC keys."""

    wanted: tuple[Wanted, ...]
    """Ranges of the backup, and what they are in the cluster."""
    parts: tuple[FilePart, ...]
    """What is left to bring in, by key."""
    resumed: int
    """Files that an unfinished restore has brought in."""
    splits: tuple[bytes, ...]
    """Where the target would be split: keys at which no region begins yet."""
    regions: int
    """Regions that the target ranges lie in, before the splits."""

    @property
    def total_kvs(self) -> int:
        """Rows of the files that are left, as far as they are taken whole."""
        return sum(part.file.total_kvs for part in self.parts)

    @property
    def total_bytes(self) -> int:
        """Keys and values of those files, before encoding and compression."""
        return sum(part.file.total_bytes for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of those files as stored: what each replica's store fetches."""
        return sum(part.file.size for part in self.parts)


def choose_parts(files: Iterable[FileEntry], wanted: Sequence[Wanted]) -> list[FilePart]:
    """The parts of ``files`` that lie in ``wanted``, in the order of their keys. One that only touches is left out.

    Ranges that are wanted do not overlap.
    """
    ordered = sorted(wanted, key=lambda each: each.span)
    starts = [each.span.start for each in ordered]
    parts: list[FilePart] = []
    for file in files:
        for at in range(max(bisect.bisect_right(starts, file.start_key) - 1, 0), len(ordered)):
            if file.end_key and starts[at] >= file.end_key:
                break
            span = intersection(file.key_range, ordered[at].span)
            if not span.is_empty:
                parts.append(FilePart(file, span, ordered[at].rewrite))
    return sorted(parts, key=lambda part: part.span)


def without(parts: Iterable[FilePart], done: Sequence[KeyRange]) -> list[FilePart]:
    """What of ``parts`` does not lie in ``done``, ranges of keys as in the files."""
    holes = missing(KeyRange(b"", b""), done)
    starts = [hole.start for hole in holes]
    left: list[FilePart] = []
    for part in parts:
        for at in range(max(bisect.bisect_right(starts, part.span.start) - 1, 0), len(holes)):
            if part.span.end and starts[at] >= part.span.end:
                break
            if not (span := intersection(part.span, holes[at])).is_empty:
                left.append(part._replace(span=span))
    return left


def split_keys(parts: Sequence[FilePart], region_bytes: int = REGION_BYTES) -> list[bytes]:
    """RPC keys at which to split the target: starts of files only, so that each is downloaded once a replica.

    Neighbours share a region until it would hold more than ``region_bytes``.
    """
    keys: list[bytes] = []
    held = 0
    for part in parts:
        if held and held + part.file.total_bytes > region_bytes:
            keys.append(part.target.start)
            held = 0
        held += part.file.total_bytes
    return keys
