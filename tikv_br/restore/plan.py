"""The planner: which files, which part of each, and where the target is split before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tikv_br.backupset.coverage import KeyRange, intersection
from tikv_br.backupset.files import FileEntry

MIB = 1 << 20
REGION_BYTES = 96 * MIB
"""What a region should hold after the restore: the stores' own default for a split by size."""


class FilePart(NamedTuple):
    """One task: the part of one file that is wanted."""

    file: FileEntry
    span: KeyRange

    def __str__(self) -> str:
        return self.file.name


def choose_parts(files: Iterable[FileEntry], wanted: Sequence[KeyRange]) -> list[FilePart]:
    """The parts of ``files`` that lie in ``wanted``, in the order of their keys. One that only touches is left out."""
    parts = [
        FilePart(file, span)
        for file in files
        for each in wanted
        if not (span := intersection(file.key_range, each)).is_empty
    ]
    return sorted(parts, key=lambda part: part.span)


def split_keys(parts: Sequence[FilePart], region_bytes: int = REGION_BYTES) -> list[bytes]:
    """RPC keys at which to split the target: starts of files only, so that each is downloaded once a replica.

    Neighbours share a region until it would hold more than ``region_bytes``.
    """
    keys: list[bytes] = []
    held = 0
    for part in parts:
        if held and held + part.file.total_bytes > region_bytes:
            keys.append(part.span.start)
            held = 0
        held += part.file.total_bytes
    return keys
