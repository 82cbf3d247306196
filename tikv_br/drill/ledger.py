"""The ledger of what a drill makes, and its removal.

Every creation is saved in ``ledger/<drill>.json`` of the drills' home before it is made, so that the next drill can remove
what a killed one left. Nothing is removed that is not in a ledger.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct, structs

from tikv_br import records
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.run import abort_backup
from tikv_br.drill.history import backup_path
from tikv_br.errors import BackupDamaged, BackupPathInUse, DrillRemains, LeaseHeld, TikvBrError
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.json_types import ApiLabel, Hex
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

FOLDER = "ledger"
COPIES = "copies"
"""Folder of the drills' home for copies of backups and the state of a drill's restore and sync."""
DAMAGED_HINT = (
    "Nothing was removed. Remove by hand what that drill left (docs/drill.md lists what drills make), then delete the "
    "ledger file."
)
_ID = re.compile(r"[A-Za-z0-9-]+")
log = logging.getLogger(__name__)


class EntryKind(enum.StrEnum):
    """Kind of thing that a drill creates."""

    PLAYGROUND = "playground"
    """A directory of this machine with a playground in it."""
    ROWS = "rows"
    """Rows in an empty cluster or keyspace that the drill owns until they are removed."""
    COPY = "copy"
    """A folder of the drills' home: a copy of a backup, and the state of the drill's restore and sync."""
    BACKUP = "backup"
    """A backup of the source, until it is complete."""
    MADE_BACKUP = "made backup"
    """A complete backup, until a report names it. Only retention removes it."""
    SAFE_POINT = "safe point"
    """The safe point of a sync at the source."""
    OLD_KEYS = "keys"
    """Older name of `ROWS`, or rows below a prefix, which drills no longer write."""
    OLD_TAIL = "tail"
    """Older name of `SAFE_POINT`."""
    OLD_CANARY = "canary"
    """Key of the source in older ledgers, which drills no longer write."""


class OwnedRows(Struct, frozen=True):
    """Place of a drill's rows: ranges that were empty when the drill acquired them."""

    cluster_id: int
    api_version: ApiLabel
    keyspace: int | None
    """The keyspace that the drill owns; None = the drill owns the whole cluster."""
    ranges: tuple[KeyRange, ...]
    """RPC keys: what the drill writes, and what is removed."""
    secret: records.Later[str] = ""
    """Secret of the drill's `tikv_br.cluster.marks.Mark` in the cluster, without which no later drill removes the rows."""


class OldKeys(Struct, frozen=True):
    """The rows of `EntryKind.OLD_KEYS`."""

    cluster_id: int
    pd: tuple[str, ...]
    tls: tuple[str, ...]
    api_version: ApiLabel
    claims: tuple[KeyRange, ...]
    keyspace: int | None
    prefix: Hex
    backup: str
    proven: Checksum | None


class Creation(Struct, frozen=True):
    """One thing that a drill creates."""

    kind: EntryKind
    place: str
    """A directory of the machine, a folder of the drills' home, a URL, or a description."""
    host: str = ""
    """The machine that a directory is on."""
    rows: records.Later[OwnedRows | None] = None
    """Rows of a creation of kind `ROWS`."""
    scratch: records.Later[OldKeys | None] = None
    """Keys of a creation of kind `OLD_KEYS`."""


class DrillEntry(Struct, frozen=True):
    """The content of a ledger file."""

    drill: str
    creations: tuple[Creation, ...]


class Ledger:
    """The ledger of one drill. Every method may raise `StorageError`."""

    def __init__(self, store: ObjectStore, drill: str, creations: tuple[Creation, ...] = ()) -> None:
        self._store = store
        self._entry = DrillEntry(drill, creations)

    @property
    def drill(self) -> str:
        return self._entry.drill

    @property
    def creations(self) -> tuple[Creation, ...]:
        """Things created, or about to be, the newest last."""
        return self._entry.creations

    def add(self, creation: Creation) -> None:
        """Save what is about to be made. Idempotent."""
        if creation not in self.creations:
            self._save(structs.replace(self._entry, creations=(*self.creations, creation)))

    def change(self, creation: Creation, now: Creation) -> None:
        """Save what a creation has become."""
        creations = tuple(now if each == creation else each for each in self.creations)
        self._save(structs.replace(self._entry, creations=creations))

    def remove(self, creation: Creation) -> None:
        """Save that a creation is gone. The file goes with the last one."""
        self._save(structs.replace(self._entry, creations=tuple(each for each in self.creations if each != creation)))

    def remove_finished_backup(self) -> None:
        """Remove the drill's complete backup from the ledger once a report names it."""
        for creation in self.creations:
            if creation.kind is EntryKind.MADE_BACKUP:
                self.remove(creation)

    def _save(self, entry: DrillEntry) -> None:
        name = _name(entry.drill)
        if entry.creations:
            self._store.put(name, records.dump(entry))
        else:
            self._store.delete(name)
        self._entry = entry


def read_ledgers(store: ObjectStore) -> list[Ledger]:
    """The ledgers of drills that did not remove everything. Raises `BackupDamaged` for a damaged one, `StorageError`."""
    try:
        entries = [_read(store, name) for name in sorted(info.name for info in store.list(FOLDER))]
    except BackupDamaged as error:
        error.hint = DAMAGED_HINT
        raise
    return [Ledger(store, entry.drill, entry.creations) for entry in entries]


class Remover(Protocol):
    """Removes one kind of creation."""

    def remove(self, creation: Creation, drill: str) -> None:
        """Remove it, also if it is incomplete. Idempotent. Raises `DrillRemains` for what is not the drill's own."""


class Cleaner:
    """Removes what is in the ledger and nothing else."""

    def __init__(self, home: ObjectStore, removers: Mapping[EntryKind, Remover], drill: str = "") -> None:
        """``drill`` is the id of the drill that cleans up."""
        self._home = home
        self._removers = removers
        self._drill = drill

    def clean(self, ledger: Ledger) -> None:
        """Remove all that a drill has made, the newest first.

        What cannot be removed stays in the ledger and does not keep the rest from being removed. Raises the first
        `TikvBrError` at the end.
        """
        problems: list[TikvBrError] = []
        for creation in ledger.creations[::-1]:
            if creation.kind is EntryKind.MADE_BACKUP:
                continue
            try:
                self._remove(creation, ledger.drill)
                ledger.remove(creation)
            except TikvBrError as error:
                log.warning("cannot remove the %s of drill %s: %s", creation.kind.value, ledger.drill, error.message)
                problems.append(error)
        if problems:
            raise problems[0]

    def clean_earlier(self) -> list[str]:
        """Remove what interrupted drills left, and return a message for each drill of which something remains."""
        problems = []
        for ledger in read_ledgers(self._home):
            try:
                if ledger.drill == self._drill:  # what is in it would count as found empty by this drill
                    raise DrillRemains("the ledger has the id of the drill that runs now", hint=DAMAGED_HINT)
                self.clean(ledger)
                ledger.remove_finished_backup()
            except TikvBrError as error:
                problems.append(f"cannot remove all that drill {ledger.drill} left: {error.message}")
                log.warning(problems[-1])
        return problems

    def _remove(self, creation: Creation, drill: str) -> None:
        if creation.kind is EntryKind.COPY:
            self._remove_copy(creation, drill)
        elif creation.kind in self._removers:
            self._removers[creation.kind].remove(creation, drill)
        else:
            raise DrillRemains(
                f"this command cannot remove the {creation.kind.value} at {creation.place}",
                hint=f"Remove it by hand, then delete {_name(drill)} below --reports.",
            )

    def _remove_copy(self, creation: Creation, drill: str) -> None:
        if creation.place != f"{COPIES}/{drill}":
            raise DrillRemains(f"{creation.place} is not the folder for copies of drill {drill}")
        for info in list(self._home.list(creation.place)):
            self._home.delete(info.name)
        self._home.sweep(COPIES, deep=True)


@dataclass(frozen=True, slots=True)
class BackupRemover:
    """Removes incomplete backups of drills. A complete one stays: it is a backup like any other."""

    backups: StorageLocation
    cluster: ClusterConfig | None
    """Cluster whose safe point for the backup is released; None = it expires."""

    def remove(self, creation: Creation, drill: str) -> None:
        """Remove the backup unless it is complete. Raises `DrillRemains` for another place, `LeaseHeld`."""
        place = self.backups.child(backup_path(drill))
        if creation.place != place.redacted():
            raise DrillRemains(f"the unfinished backup at {creation.place} is not in {self.backups}")
        try:
            abort_backup(place, self.cluster)
        except LeaseHeld:
            raise
        except BackupPathInUse:
            return
        open_store(place).sweep(deep=True)  # the drill made the folder itself


def _name(drill: str) -> str:
    return f"{FOLDER}/{drill}.json"


def _read(store: ObjectStore, name: str) -> DrillEntry:
    entry = records.load(DrillEntry, store.get(name), name)
    # A cleanup by it would delete the other drill's ledger, and its folders are named after it.
    if name != _name(entry.drill) or not _ID.fullmatch(entry.drill):
        raise BackupDamaged(f"{name} is damaged: it is the ledger of drill {entry.drill}")
    return structs.replace(entry, creations=tuple(map(_converted, entry.creations)))


def _converted(creation: Creation) -> Creation:
    """A creation of an older ledger as it is saved now. What drills no longer make stays as it is, and is not removed."""
    old = creation.scratch
    if creation.kind is EntryKind.OLD_TAIL:
        return structs.replace(creation, kind=EntryKind.SAFE_POINT)
    if creation.kind is EntryKind.OLD_KEYS and old is not None and not old.prefix:
        rows = OwnedRows(old.cluster_id, old.api_version, old.keyspace, old.claims)
        return Creation(EntryKind.ROWS, creation.place, rows=rows)
    return creation
