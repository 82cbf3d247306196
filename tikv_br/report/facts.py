"""What reports are made of: plain values, the same for a drill and for a single command."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from formats.api_version import ApiVersion
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.regions import RegionPart, put_together
from tikv_br.errors import Interrupted, Terminated, TikvBrError
from tikv_br.redaction import redact

MAP_CELLS = 400
"""Of the map of the keyspace at most: neighbours are put together."""


class Verdict(enum.StrEnum):
    """How a command or a drill ended."""

    PASSED = "passed"
    MISSED = "missed"
    """Of a drill: the recovery worked, and an objective was missed."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class BackupFacts:
    """The backup that it was about. Sizes in bytes, times in unix milliseconds."""

    id: str
    """In the index; ``""`` = it was not looked up there."""
    place: str
    made_by_drill: bool
    cluster_id: int
    engine: str
    api_version: str
    """Of its files."""
    backup_ts: int
    finished_ms: int
    """0 = not recorded."""
    keys: int
    data_bytes: int
    """Keys and values."""
    stored_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of the keyspace: a region of the source or several neighbouring ones, else files; keys in hex, as stores see them."""

    start: str
    end: str
    keys: int
    data_bytes: int
    files: int = 0
    """0 = it is a part by regions."""
    regions: int = 0
    """0 = the backup does not say."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One check or comparison that the verdict rests on, and that ended well."""

    what: str
    how: str
    keys: int
    bytes: int
    """Read for it; 0 = stores did the reading."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why it failed."""

    name: str
    exit_code: int
    message: str
    hint: str
    step: str
    """In which step."""


def trouble_of(failure: BaseException, step: str) -> Trouble:
    """What a report says of a failure; credentials are blanked."""
    if isinstance(failure, TikvBrError):
        name, code, message, hint = failure.name, failure.exit_code, failure.message, failure.hint
    else:
        name, code, message = type(failure).__name__, TikvBrError.exit_code, str(failure)
        hint = TikvBrError.default_hint
    return Trouble(name, code, redact(message), redact(hint), step)


def verdict_of(failure: BaseException | None) -> Verdict:
    """How something ended, by what it ended with."""
    if isinstance(failure, Interrupted | Terminated | KeyboardInterrupt):
        return Verdict.INTERRUPTED
    return Verdict.PASSED if failure is None else Verdict.FAILED


def backup_facts(backup: BackupSet, place: str) -> BackupFacts:
    """What the records of a backup say of it."""
    manifest, sums = backup.manifest, backup.totals
    return BackupFacts(
        id="",
        place=place,
        made_by_drill=False,
        cluster_id=backup.cluster_id,
        engine=manifest.description.engine if manifest else "",
        api_version=backup.api_version.label,
        backup_ts=backup.backup_ts,
        finished_ms=manifest.statistics.finished_ms if manifest else 0,
        keys=sums.total_kvs,
        data_bytes=sums.total_bytes,
        stored_bytes=sums.size,
        files=len(backup.files),
    )


def cells(backup: BackupSet, most: int = MAP_CELLS) -> tuple[Cell, ...]:
    """The map of a backup by the regions that its rows came from, where it says so, else by its files."""
    known = backup.manifest.regions if backup.manifest is not None else ()
    if known:
        parts = put_together(known, most)
        return tuple(Cell(part.start.hex(), part.end.hex(), *_sizes(part), regions=part.regions) for part in parts)
    by_file = [RegionPart(file.start_key, file.end_key, file.total_kvs, file.total_bytes) for file in backup.files]
    parts = put_together(by_file, most)
    return tuple(Cell(part.start.hex(), part.end.hex(), *_sizes(part), files=part.regions) for part in parts)


def _sizes(part: RegionPart) -> tuple[int, int]:
    return part.total_kvs, part.total_bytes


def plain(value: object) -> str:
    """For `json.dumps`: keys are hex. Raises `TypeError`."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, ApiVersion):
        return value.label
    raise TypeError(f"{type(value).__name__} has no place in a report")
