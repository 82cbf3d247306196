"""Names of a backup's objects, relative to its path. The first two are the Go tool's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tikv_br.backupset.files import FileKind
from tikv_br.formats.keys.ranges import KeyRange

META = "backupmeta"
"""Written last: without it there is no backup."""
LOCK = "backup.lock"
INDEX = "tikv-br-index"
"""Folder of the index, beside backups."""
FOLDER = "tikv-br"
"""Folder of objects that only this tool reads."""
MANIFEST = f"{FOLDER}/manifest.json"
LEDGER = f"{FOLDER}/ledger"
"""Folder of what tasks have done; gone after the commit."""
RESTORE = f"{FOLDER}/restore"
"""Folder of the records of unfinished restores."""
LEASE = f"{FOLDER}/lease"
"""Folder of the lease; absent while nobody holds the path."""
RUN = f"{FOLDER}/run.json"
"""Description of the current run; absent once it is a backup or was discarded."""
REMOVED = f"{FOLDER}/removed-backupmeta"
"""Copy of `META` in a backup that is being removed: names its files until they are gone."""
EXPORT_RECORD = "_export.json"
"""Name of the file in which an export describes its tables; named here, for modules that load no tables."""
SST_FOLDER = "sst"
DATA_FOLDERS = tuple(kind.value for kind in FileKind)
_ENDINGS = {FileKind.SST: "_default.sst", FileKind.PARQUET: ".parquet"}
"""The Go tool takes the column family from the name of an SST, not from its record."""


def is_data(name: str) -> bool:
    """Return whether an object is a data file of one of our runs, by its folder."""
    return name.partition("/")[0] in DATA_FOLDERS


def is_record(name: str) -> bool:
    """Return whether an object is one that only this tool reads, except leases."""
    return name.startswith(f"{FOLDER}/") and not name.startswith(f"{LEASE}/")


def is_part(name: str) -> bool:
    """Return whether an object is a part of some backup, so that its path is in use. A lease is not."""
    return is_record(name) or (not name.startswith(f"{FOLDER}/") and FileKind.of(name) is not None)


def own(names: Iterable[str]) -> list[str]:
    """The names at a path that belong to its own backup, not to another one, complete or not, in a folder below it."""
    listed = list(names)
    others = tuple(
        {
            f"{folder}/"
            for folder, mark, file in (name.rpartition("/") for name in listed)
            if folder and mark and file in {META, LOCK}
        }
    )
    return [name for name in listed if not name.startswith(others)]


def interval_id(interval: KeyRange) -> str:
    """A name for an interval: 16 hex digits."""
    length = len(interval.start).to_bytes(4, "big")
    return hashlib.sha256(length + interval.start + interval.end).hexdigest()[:16]


def data_name(kind: FileKind, interval: KeyRange, attempt: str, number: int) -> str:
    """Name of a task's file; ``attempt`` is the attempt's own, so that no two ever write to one name."""
    return f"{kind.value}/{interval_id(interval)}_{attempt}_{number:05d}{_ENDINGS[kind]}"


def store_folder(interval: KeyRange, attempt: str) -> str:
    """Folder for what stores write for an attempt, under names of their own."""
    return f"{SST_FOLDER}/{interval_id(interval)}_{attempt}"


def ledger_name(interval: KeyRange, attempt: str) -> str:
    """Name of the record that an attempt leaves when it has done its interval."""
    return f"{LEDGER}/{interval_id(interval)}-{attempt}.json"


def import_mode_folder(cluster_id: int) -> str:
    """Folder of the records that restores keep of a cluster's import mode until it is put back, each by its own id."""
    return f"{RESTORE}/import-mode-{cluster_id}"


def lease_name(number: int) -> str:
    return f"{LEASE}/{number:08d}.json"
