"""The destination of an export: the names of its objects, its description, and what may be there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tikv_br.backupset import layout
from tikv_br.errors import StorageConflict, StorageError
from tikv_br.export.task import ExportPart
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore

SUCCESS = "_SUCCESS"
"""Written last, as Hadoop and Spark do: without it the export is not complete."""
DESCRIPTION = layout.EXPORT_RECORD
"""Object with the export's description. Spark and Arrow ignore objects whose name starts with ``_``."""
_PART = re.compile(r"part-\d{5,}\.(parquet|csv|jsonl)")


def part_name(number: int, suffix: str) -> str:
    """Name of the file of a task."""
    return f"part-{number:05d}.{suffix}"


def earlier_objects(store: ObjectStore, *, overwrite: bool) -> list[str]:
    """Objects of an export that are to be replaced. Raises `StorageConflict` unless there is nothing, or ``overwrite`` and an export only."""
    found: list[str] = []
    for info in store.list():
        if info.name.startswith(f"{layout.LEASE}/"):
            continue
        if info.name not in {SUCCESS, DESCRIPTION} and not _PART.fullmatch(info.name):
            raise StorageConflict(
                f"{store.location} is not empty: {info.name} does not belong to an export",
                hint="Pass an empty path. --overwrite replaces nothing but an earlier export.",
            )
        found.append(info.name)
    if found and not overwrite:
        state = "an earlier" if SUCCESS in found else "an unfinished"
        raise StorageConflict(
            f"{store.location} is not empty: it holds {state} export",
            hint="Pass an empty path, or --overwrite to replace the export.",
        )
    return found


def check_parts(store: ObjectStore, parts: Sequence[ExportPart]) -> None:
    """Raise `StorageError` unless each part has the size that was written."""
    there = {info.name: info.size for info in store.list()}
    for part in parts:
        if there.get(part.name) != part.size:
            raise StorageError(
                f"{part.name} was written with {part.size:,} bytes, but now has {there.get(part.name, 0):,}",
                hint="Another process writes to the destination. Pass an empty path.",
            )


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file, as `DESCRIPTION` lists it."""

    name: str
    rows: int
    size: int
    """Size in bytes."""


@dataclass(frozen=True, slots=True)
class ExportDescription:
    """The content of `DESCRIPTION`."""

    tool_version: str
    run: str
    source: str
    """Address or URL, without credentials."""
    cluster_id: int
    api_version: str
    keyspace_id: int
    ranges: tuple[KeyRange, ...]
    """RPC keys of ``api_version``."""
    backup_ts: int
    """0 = the backup has none, or a cluster was read."""
    file_format: str
    encoding: str
    columns: tuple[str, ...]
    started_ms: int
    """Start of reading, as `finished_ms` its end, in milliseconds since the epoch by this machine's clock."""
    finished_ms: int
    total_kvs: int
    total_bytes: int
    files: tuple[ExportedFile, ...]
