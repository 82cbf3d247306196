"""What to compare: ranges that follow A's regions or files. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from formats.keys import KeyCodec
from tikv_br.backupset.coverage import KeyRange, intersection, missing
from tikv_br.backupset.files import FileEntry
from tikv_br.diff.places import Unit
from tikv_br.diff.values import Span
from tikv_br.errors import UsageError
from tikv_br.proof.ranges import user_range

MOST_TASKS = 512
"""Units are put together so that there are no more tasks than this."""


def region_units(wanted: KeyRange, bounds: Iterable[tuple[bytes, bytes]], codec: KeyCodec) -> list[Unit]:
    """A unit for each region, given by its physical bounds, as far as it lies in what is wanted (RPC keys)."""
    regions = (KeyRange(codec.from_bound(start), codec.from_bound(end)) for start, end in bounds)
    parts = (intersection(region, wanted) for region in regions)
    return [Unit(Span(*user_range(codec, part))) for part in parts if not part.is_empty]


def file_units(
    wanted: KeyRange, covered: Sequence[KeyRange], files: Sequence[FileEntry], codec: KeyCodec
) -> list[Unit]:
    """A unit for each file of a backup, and for each range that it covers without a file, as far as it is wanted.

    Raises `UsageError` when the backup covers nothing of that.
    """
    inside = [part for each in covered if not (part := intersection(each, wanted)).is_empty]
    if not inside:
        raise UsageError(f"the backup has nothing of that range: it covers {', '.join(map(str, covered))}")
    units = list(_file_parts(inside, files, codec))
    spans = [file.key_range for file in files]
    units += [Unit(Span(*user_range(codec, hole))) for part in inside for hole in missing(part, spans)]
    return sorted(units, key=lambda unit: unit.span)


def tasks(units: Sequence[Unit], most: int = MOST_TASKS) -> list[tuple[Unit, ...]]:
    """Neighbouring units put together."""
    size = max(1, -(-len(units) // most))
    return [tuple(units[first : first + size]) for first in range(0, len(units), size)]


def _file_parts(inside: Iterable[KeyRange], files: Sequence[FileEntry], codec: KeyCodec) -> Iterator[Unit]:
    for each in inside:
        for file in files:
            part = intersection(file.key_range, each)
            if not part.is_empty:
                yield Unit(Span(*user_range(codec, part)), file, part == file.key_range)
