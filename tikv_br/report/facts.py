"""The values that reports consist of, the same for drills and single commands."""

from __future__ import annotations

import enum
from datetime import UTC, datetime

from msgspec import Struct, structs

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import RegionPart, merge_regions
from tikv_br.errors import Failure, Stopped, TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.redaction import redact

NONE = "\N{EN DASH}"


def figure(value: float | None, unit: str) -> str:
    """A value in a readable form; units are ``s``, ``B``, ``B/s`` and ``keys``."""
    if value is None:
        return NONE
    match unit:
        case "s":
            return _seconds(value)
        case "B" | "B/s":
            return _bytes(value) + unit[1:]
        case _:
            return f"{value:,.0f}"


def counted(number: int, what: str) -> str:
    """A number with a noun: ``1 file``, ``2,000 files``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def utc(milliseconds: int) -> str:
    """A time, to the second; a dash for 0."""
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC" if milliseconds else NONE


def day(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d}"


def short_key(text: str) -> str:
    """A key in hex, truncated if it is long; a dash for none."""
    return (text if len(text) <= 40 else f"{text[:36]}…") or NONE


def _seconds(value: float) -> str:
    if value < 0.1:
        return f"{value * 1000:.0f} ms" if value else "0 s"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


MAP_CELLS = 400
"""Maximum number of cells in the map of the keyspace: neighbours are merged."""


class DrillVerdict(enum.StrEnum):
    """Outcome of a command or a drill."""

    PASSED = "passed"
    MISSED = "missed"
    """Outcome of a drill whose recovery worked, but missed an objective."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class BackupFacts(Struct, frozen=True):
    """The backup of a report. Sizes in bytes, times in unix milliseconds."""

    id: str
    """Id in the index; ``""`` = unknown."""
    place: str
    made_by_drill: bool
    cluster_id: int
    engine: str
    api_version: str
    """API version of the files."""
    backup_ts: int
    finished_ms: int
    """0 = not recorded."""
    keys: int
    data_bytes: int
    """Bytes of keys and values."""
    stored_bytes: int
    files: int


class Cell(Struct, frozen=True):
    """A part of the keyspace: neighbouring regions of the source, else files. Keys are RPC keys in hex."""

    start: str
    end: str
    keys: int
    data_bytes: int
    files: int = 0
    """0 = it consists of regions."""
    regions: int = 0
    """0 = the backup does not record them."""


class Compared(Struct, frozen=True):
    """One check or comparison that succeeded."""

    what: str
    how: str
    keys: int
    bytes: int
    """Bytes read by the tool; 0 = stores read the data."""


class ReportedError(Struct, frozen=True):
    """The error that ended a command or drill."""

    name: str
    exit_code: int
    message: str
    hint: str
    step: str


def reported_error(failure: BaseException, step: str) -> ReportedError:
    """A failure as a report shows it, with redacted credentials."""
    if isinstance(failure, Failure):
        name, code, message, hint = failure.name, failure.exit_code, failure.message, failure.hint
    else:
        name, code, message = type(failure).__name__, TikvBrError.exit_code, str(failure)
        hint = TikvBrError.default_hint
    return ReportedError(name, code, redact(message), redact(hint), step)


def verdict_of(failure: BaseException | None) -> DrillVerdict:
    """The verdict of a command that ended with a failure or without one."""
    if isinstance(failure, Stopped | KeyboardInterrupt):
        return DrillVerdict.INTERRUPTED
    return DrillVerdict.PASSED if failure is None else DrillVerdict.FAILED


def backup_facts(backup: BackupSet, place: str) -> BackupFacts:
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
    """The map of a backup by the source's regions if it records them, else by its files."""
    known = backup.manifest.regions if backup.manifest is not None else ()
    if known:
        parts = merge_regions(known, most)
        return tuple(Cell(part.start.hex(), part.end.hex(), *_sizes(part), regions=part.regions) for part in parts)
    sums = [pair.sums for pair in backup.pairs]
    by_file = [RegionPart(file.start_key, file.end_key, file.total_kvs, file.total_bytes) for file in sums]
    parts = merge_regions(by_file, most)
    return tuple(Cell(part.start.hex(), part.end.hex(), *_sizes(part), files=part.regions) for part in parts)


def _sizes(part: RegionPart) -> tuple[int, int]:
    return part.total_kvs, part.total_bytes


def plain(value: object) -> str | dict[str, object]:
    """Convert a value for `json.dumps`: keys become hex, structs mappings. Raises `TypeError`."""
    if isinstance(value, Struct):
        return structs.asdict(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, ApiVersion):
        return value.label
    raise TypeError(f"{type(value).__name__} has no place in a report")
