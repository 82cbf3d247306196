"""How far a sync has come, kept where a restart finds it, by one process at a time.

In a folder of the sync's name lie, for each epoch, ``epoch-N``, which exactly one process makes, and
``checkpoint-N.json``, which only that process writes. Whoever makes ``epoch-N`` with the highest N is the owner; from
then on what owners before it still write is never read again, and they learn of it at their next `save`.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from typing import Protocol

from tikv_br.backupset import sealed_json
from tikv_br.errors import (
    BackupDamaged,
    BackupUnsupported,
    StorageConflict,
    StorageObjectMissing,
    SyncFenced,
    SyncStateDamaged,
    UsageError,
)
from tikv_br.storage.base import ObjectStore

CLAIM_TRIES = 16
"""So many processes may begin at once."""
ABANDONED_SECONDS = 3600.0
"""After which what an owner before was writing is not written any more."""
_ID = re.compile(r"(?=.{1,128}$)[A-Za-z0-9]+(-[A-Za-z0-9]+)*")
_NAME = re.compile(r"(epoch|checkpoint)-([0-9]{10})(?:\.json)?$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All changes with a ts up to `checkpoint_ts` are at the sink."""

    changefeed_id: str
    checkpoint_ts: int
    resolved_ts: int
    """Up to which all changes were known of."""
    epoch: int
    """Of the owner that saved it; 0 = not saved yet."""
    saved_ms: int
    """Milliseconds since the epoch."""
    subject: str = ""
    """What is synced whither, in words: a restart with other flags is found out by it."""


def check_id(name: str) -> str:
    """The name of a sync, if it is one. Raises `UsageError`."""
    if not _ID.fullmatch(name):
        raise UsageError(f"{name!r} is no id: letters and digits, joined by -, at most 128")
    return name


class CheckpointStore(Protocol):
    """Where the checkpoint of one sync is kept. Raises `StorageError`."""

    def claim(self) -> int:
        """Take the sync over from whoever had it; returns our epoch. Call it before `load`.

        Raises `SyncFenced` when others do the same just now and are faster.
        """

    def load(self) -> Checkpoint | None:
        """The last one saved by an owner; None before the first. Raises `SyncStateDamaged`."""

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep it, under our epoch: when this returns it outlasts a crash. Raises `SyncFenced` after another's claim."""


class ObjectCheckpoints(CheckpointStore):
    """In an object store; in a directory through `LocalObjectStore`, which writes by fsync and rename."""

    def __init__(self, store: ObjectStore, changefeed_id: str) -> None:
        """Raises `UsageError` for an id other than groups of letters and digits joined by ``-``."""
        self._store = store
        self._folder = check_id(changefeed_id)
        self._epoch = 0
        self._tidy = False

    def claim(self) -> int:
        """See `CheckpointStore.claim`."""
        for _attempt in range(CLAIM_TRIES):
            epoch = max(self._epochs("epoch") | self._epochs("checkpoint"), default=0) + 1
            if self._make(self._claimed(epoch)) and max(self._epochs("epoch")) == epoch:
                self._epoch, self._tidy = epoch, False
                return epoch
        raise SyncFenced(f"sync {self._folder}: other processes keep taking it over", hint="Run one process only.")

    def load(self) -> Checkpoint | None:
        """See `CheckpointStore.load`."""
        while saved := self._epochs("checkpoint"):
            try:
                return self._read(max(saved))
            except StorageObjectMissing:
                continue  # a later owner has just tidied up
            except (BackupDamaged, BackupUnsupported) as error:
                raise SyncStateDamaged(f"{self._store.location}: {error.message}") from None
        return None

    def save(self, checkpoint: Checkpoint) -> None:
        """See `CheckpointStore.save`."""
        newest = max(self._epochs("epoch"), default=0)
        if not self._epoch or newest != self._epoch:
            raise SyncFenced(
                f"another process has taken over sync {self._folder}: it is at epoch {newest}, this one had {self._epoch}"
            )
        data = sealed_json.dump(replace(checkpoint, epoch=self._epoch))
        self._store.put(self._checkpoint(self._epoch), data)
        if not self._tidy:
            self._remove_older()
            self._store.sweep(self._folder, older_than=ABANDONED_SECONDS)
            self._tidy = True

    def _read(self, epoch: int) -> Checkpoint:
        name = self._checkpoint(epoch)
        found = sealed_json.load(Checkpoint, self._store.get(name), name)
        if (found.changefeed_id, found.epoch) != (self._folder, epoch):
            raise BackupDamaged(f"{name} is damaged: it is of {found.changefeed_id}, epoch {found.epoch}")
        return found

    def _make(self, name: str) -> bool:
        """Make an object that nobody has made; an answer that got lost counts by what is found then."""
        mark = secrets.token_bytes(16)
        try:
            self._store.put_if_absent(name, mark)
        except StorageConflict:
            try:
                return self._store.get(name) == mark
            except StorageObjectMissing:
                return False
        return True

    def _remove_older(self) -> None:
        for kind, name_of in (("checkpoint", self._checkpoint), ("epoch", self._claimed)):
            for epoch in self._epochs(kind):
                if epoch < self._epoch:
                    self._store.delete(name_of(epoch))

    def _epochs(self, kind: str) -> set[int]:
        """The epochs of which there is an object of that kind."""
        names = (info.name.removeprefix(f"{self._folder}/") for info in self._store.list(self._folder))
        found = filter(None, map(_NAME.match, names))
        return {int(each[2]) for each in found if each[1] == kind}

    def _checkpoint(self, epoch: int) -> str:
        return f"{self._folder}/checkpoint-{epoch:010}.json"

    def _claimed(self, epoch: int) -> str:
        return f"{self._folder}/epoch-{epoch:010}"
