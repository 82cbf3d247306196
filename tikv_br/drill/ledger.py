"""What a drill has made and not yet removed, written down before it is made: also after a kill nothing stays behind.

``ledger/<drill>.json`` in the drills' home. Whatever is removed is removed because it stands there, and for nothing else.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from formats.api_version import ApiVersion
from formats.checksum import Checksum
from tikv_br.backupset import sealed_json
from tikv_br.backupset.coverage import KeyRange
from tikv_br.errors import BackupDamaged
from tikv_br.storage.base import ObjectStore

FOLDER = "ledger"
BY_HAND = (
    "Nothing was removed. Look for what that drill has left (docs/drill.md says what drills make), remove that by hand, "
    "then the page."
)


class Kind(enum.StrEnum):
    """What can be made."""

    PLAYGROUND = "playground"
    """A folder of this machine with a playground in it."""
    KEYS = "keys"
    """Rows in a cluster that is not the drill's."""
    COPY = "copy"
    """A folder of the drills' home: a copy of a backup, and what else a drill writes down for itself."""
    BACKUP = "backup"
    """A backup of the source, until it is complete."""
    MADE_BACKUP = "made backup"
    """A complete backup, until a report says whose it is. It is not removed, but by the rule for old drills."""
    TAIL = "tail"
    """The safe point of a sync."""
    CANARY = "canary"
    """A key of the source that a drill writes."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Keys of a cluster that were nobody's when a drill began."""

    cluster_id: int
    pd: tuple[str, ...]
    tls: tuple[str, ...]
    """Paths of the CA's file, our certificate's and its key's; none = no TLS."""
    api_version: ApiVersion
    claims: tuple[KeyRange, ...]
    """RPC keys."""
    keyspace: int | None
    prefix: bytes
    backup: str
    """URL of the backup whose rows they get, without credentials."""
    proven: Checksum | None
    """Of all that is there, once it was proven to be the backup's rows and nothing else."""


@dataclass(frozen=True, slots=True)
class Creation:
    """One thing that a drill makes."""

    kind: Kind
    place: str
    """A folder of the machine, a folder of the drills' home, a URL, or words."""
    host: str = ""
    """The machine that a folder is of."""
    scratch: Scratch | None = None
    """Of `Kind.KEYS`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A drill's page of the ledger."""

    drill: str
    creations: tuple[Creation, ...]


class Ledger:
    """The page of one drill. Every method may raise `StorageError`."""

    def __init__(self, store: ObjectStore, drill: str, creations: tuple[Creation, ...] = ()) -> None:
        self._store = store
        self._entry = Entry(drill, creations)

    @property
    def drill(self) -> str:
        """Whose page it is."""
        return self._entry.drill

    @property
    def creations(self) -> tuple[Creation, ...]:
        """What was made, or was about to be; the newest last."""
        return self._entry.creations

    def note(self, creation: Creation) -> None:
        """Write down what is about to be made; once, however often it is said."""
        if creation not in self.creations:
            self._write(replace(self._entry, creations=(*self.creations, creation)))

    def change(self, creation: Creation, now: Creation) -> None:
        """Write down what has become of it."""
        creations = tuple(now if each == creation else each for each in self.creations)
        self._write(replace(self._entry, creations=creations))

    def forget(self, creation: Creation) -> None:
        """Write down that it is no more."""
        self._write(replace(self._entry, creations=tuple(each for each in self.creations if each != creation)))

    def _write(self, entry: Entry) -> None:
        name = _name(entry.drill)
        if entry.creations:
            self._store.put(name, sealed_json.dump(entry))
        else:
            self._store.delete(name)
        self._entry = entry


def left_behind(store: ObjectStore) -> list[Ledger]:
    """The pages of drills that were broken off. Raises `BackupDamaged` when one does not read, `StorageError`."""
    try:
        entries = [_read(store, name) for name in sorted(info.name for info in store.list(FOLDER))]
    except BackupDamaged as error:
        error.hint = BY_HAND
        raise
    return [Ledger(store, entry.drill, entry.creations) for entry in entries]


def _name(drill: str) -> str:
    return f"{FOLDER}/{drill}.json"


def _read(store: ObjectStore, name: str) -> Entry:
    entry = sealed_json.load(Entry, store.get(name), name)
    if name != _name(entry.drill):  # to clean up by it would delete the other's page
        raise BackupDamaged(f"{name} is damaged: it holds the page of drill {entry.drill}")
    return entry
