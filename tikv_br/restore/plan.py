"""The plan of a restore: the wanted parts of the files, and where to split the target. No I/O."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from tikv_br.backupset.files import FilePair
from tikv_br.compare.files import FilePart
from tikv_br.formats.keys.ranges import KeyRange, gaps, intersection
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite
from tikv_br.restore.options import REGION_BYTES


class RestoreRange(NamedTuple):
    """A range of the backup to restore, and the rewrite of its keys."""

    span: KeyRange
    rewrite: Rewrite = UNCHANGED

    @property
    def target(self) -> KeyRange:
        """The range in the cluster."""
        return self.rewrite.range(self.span)


class IngestResult(NamedTuple):
    """Counts of what tasks have done."""

    regions: int = 0
    """Regions that ingested a file; counted once per file."""
    put: int = 0
    """Rows written by puts."""
    expired: int = 0
    """Rows left out because they had expired."""
    uploaded: int = 0
    """Files that tikv-br sent to the stores."""
    downloads: int = 0
    """Number of downloads by stores; at least one per file and replica."""


class RestorePlan(Struct, frozen=True):
    """The plan of a restore. Keys are RPC keys."""

    wanted: tuple[RestoreRange, ...]
    """Ranges of the backup, with the rewrite of their keys."""
    parts: tuple[FilePart, ...]
    """The remaining parts, in key order."""
    resumed: int
    """Number of files that an unfinished restore has restored."""
    splits: tuple[bytes, ...]
    """Keys at which the target would be split; no region starts there yet."""
    regions: int
    """Number of regions of the target ranges before the splits."""

    @property
    def total_kvs(self) -> int:
        """Rows of the remaining files, counting each as a whole."""
        return sum(part.totals.total_kvs for part in self.parts)

    @property
    def total_bytes(self) -> int:
        """Bytes of keys and values of those files, before encoding and compression."""
        return sum(part.totals.total_bytes for part in self.parts)

    @property
    def size(self) -> int:
        """Stored bytes of those files, which each replica's store downloads."""
        return sum(part.totals.size for part in self.parts)


def choose_parts(pairs: Iterable[FilePair], wanted: Sequence[RestoreRange]) -> list[FilePart]:
    """The parts of files within ``wanted``, whose ranges must not overlap, in key order."""
    ordered = sorted(wanted, key=lambda each: each.span)
    starts = [each.span.start for each in ordered]
    parts: list[FilePart] = []
    for file, values in pairs:
        for at in range(max(bisect.bisect_right(starts, file.start_key) - 1, 0), len(ordered)):
            if file.end_key and starts[at] >= file.end_key:
                break
            span = intersection(file.key_range, ordered[at].span)
            if not span.is_empty:
                parts.append(FilePart(file, span, ordered[at].rewrite, values))
    return sorted(parts, key=lambda part: part.span)


def remaining_parts(parts: Iterable[FilePart], done: Sequence[KeyRange]) -> list[FilePart]:
    """``parts`` without the ranges ``done``, which are keys as in the files."""
    remaining = gaps(KeyRange(b"", b""), done)
    starts = [gap.start for gap in remaining]
    left: list[FilePart] = []
    for part in parts:
        for at in range(max(bisect.bisect_right(starts, part.span.start) - 1, 0), len(remaining)):
            if part.span.end and starts[at] >= part.span.end:
                break
            if not (span := intersection(part.span, remaining[at])).is_empty:
                left.append(part._replace(span=span))
    return left


def split_keys(parts: Sequence[FilePart], region_bytes: int = REGION_BYTES) -> list[bytes]:
    """RPC keys at which to split the target: only starts of files, so that each replica downloads a file once.

    Neighbouring files share a region of up to ``region_bytes``.
    """
    keys: list[bytes] = []
    held = 0
    for part in parts:
        size = part.totals.total_bytes
        if held and held + size > region_bytes:
            keys.append(part.target.start)
            held = 0
        held += size
    return keys
