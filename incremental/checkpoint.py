"""The checkpoint of a sync, saved in an object store or in etcd, with one owner at a time.

In an object store, the folder of a sync has for each epoch N a file ``epoch-N``, which exactly one process creates, and a
file ``checkpoint-N.json``, which only that process writes. The process that created the ``epoch-N`` with the highest N is
the owner. Checkpoints that earlier owners still write are never read, and their next `save` fails.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from tikv_br import records
from tikv_br.archive.records import Checkpoint, check_id, newest_checkpoint
from tikv_br.cluster.etcd_values import Put, absent, modified_at
from tikv_br.errors import (
    BackupDamaged,
    BackupUnsupported,
    StorageFull,
    StorageReadOnly,
    SyncFenced,
    SyncStateDamaged,
    UsageError,
)
from tikv_br.incremental.group.model import Keys, load
from tikv_br.records import dump
from tikv_br.storage.base import ObjectStore, create_once
from tikv_br.storage.local import Hints

if TYPE_CHECKING:
    from tikv_br.cluster.etcd import Etcd

__all__ = ["CLAIM_TRIES", "Checkpoint", "CheckpointStore", "EtcdCheckpoints", "ObjectCheckpoints"]

CLAIM_TRIES = 16
"""Maximum number of processes that may start at the same time."""
ABANDONED_SECONDS = 3600.0
"""Age after which partial files of earlier owners are removed."""
_HINTS: Hints = {
    StorageFull: "Free space, then run the same command again: it resumes from the last checkpoint.",
    StorageReadOnly: "Pass a --state-dir that this user can write to.",
}
_NAME = re.compile(r"(epoch|checkpoint)-([0-9]{10})(?:\.json)?$")


class CheckpointStore(Protocol):
    """Saves the checkpoint of one sync. Raises `StorageError`."""

    def claim(self) -> int:
        """Become the owner; returns our epoch. Call it before `load`.

        Raises `SyncFenced` if other processes claim the sync at the same time and win.
        """

    def load(self) -> Checkpoint | None:
        """The last checkpoint saved by an owner; None before the first. Raises `SyncStateDamaged`."""

    def save(self, checkpoint: Checkpoint) -> None:
        """Save durably, with our epoch. Raises `SyncFenced` if another process has claimed the sync."""


@contextmanager
def _state_hints() -> Iterator[None]:
    try:
        yield
    except (StorageFull, StorageReadOnly) as error:
        raise type(error)(error.message, hint=_HINTS[type(error)]) from None


class ObjectCheckpoints(CheckpointStore):
    """Checkpoints in an object store, or in a directory (`LocalObjectStore` writes with fsync and rename)."""

    def __init__(self, store: ObjectStore, changefeed_id: str, fence: Callable[[], object] = lambda: None) -> None:
        """`fence` is called before each write. Raises `UsageError` for an invalid id; see `check_id`."""
        self._store, self._fence = store, fence
        self._folder = check_id(changefeed_id)
        self._epoch = 0
        self._cleaned_up = False

    @_state_hints()
    def claim(self) -> int:
        self._fence()
        for _attempt in range(CLAIM_TRIES):
            epoch = max(self._epochs("epoch") | self._epochs("checkpoint"), default=0) + 1
            # Random content shows whether a lost answer to our request was a success.
            is_ours = create_once(self._store, self._epoch_name(epoch), secrets.token_bytes(16))
            if is_ours and max(self._epochs("epoch")) == epoch:
                self._epoch, self._cleaned_up = epoch, False
                return epoch
        raise SyncFenced(
            f"cannot claim sync {self._folder}: other processes claimed it first, {CLAIM_TRIES} times",
            hint="Run a single process for each --id.",
        )

    def load(self) -> Checkpoint | None:
        try:
            return newest_checkpoint(self._store, self._folder, self._folder)
        except (BackupDamaged, BackupUnsupported) as error:
            raise SyncStateDamaged(f"{self._store.location}: {error.message}") from None

    @_state_hints()
    def save(self, checkpoint: Checkpoint) -> None:
        self._fence()
        newest = max(self._epochs("epoch"), default=0)
        if not self._epoch or newest != self._epoch:
            raise SyncFenced(
                f"another process has taken over sync {self._folder}: the epoch is {newest}, this process had {self._epoch}"
            )
        data = records.dump(structs.replace(checkpoint, epoch=self._epoch))
        self._store.put(self._checkpoint_name(self._epoch), data)
        if not self._cleaned_up:
            self._remove_older()
            self._store.sweep(self._folder, older_than=ABANDONED_SECONDS)
            self._cleaned_up = True

    def _remove_older(self) -> None:
        for kind, name_of in (("checkpoint", self._checkpoint_name), ("epoch", self._epoch_name)):
            for epoch in self._epochs(kind):
                if epoch < self._epoch:
                    self._store.delete(name_of(epoch))

    def _epochs(self, kind: str) -> set[int]:
        """The epochs of the existing objects of a kind."""
        names = (info.name.removeprefix(f"{self._folder}/") for info in self._store.list(self._folder))
        found = filter(None, map(_NAME.match, names))
        return {int(each[2]) for each in found if each[1] == kind}

    def _checkpoint_name(self, epoch: int) -> str:
        return f"{self._folder}/checkpoint-{epoch:010}.json"

    def _epoch_name(self, epoch: int) -> str:
        return f"{self._folder}/epoch-{epoch:010}"


class EtcdCheckpoints(CheckpointStore):
    """Checkpoints in etcd. Methods raise `EtcdError` in addition to the errors of `CheckpointStore`."""

    def __init__(
        self, etcd: Etcd, cluster_id: int, changefeed_id: str, fence: Callable[[], object] = lambda: None
    ) -> None:
        """`cluster_id` is the source's; `fence` is called before each write. Raises `UsageError` for an invalid id."""
        self._id = check_id(changefeed_id)
        self._etcd, self._fence = etcd, fence
        keys = Keys(cluster_id)
        self._changefeed = keys.of("changefeed", changefeed_id)
        self._owner = keys.of("sync", f"{changefeed_id}/owner")
        self._checkpoint = keys.of("sync", f"{changefeed_id}/checkpoint")
        self._epoch = 0

    def claim(self) -> int:
        """See `CheckpointStore.claim`. Raises `UsageError` if a changefeed has that name and thus the same safe point."""
        self._fence()
        claim = Put(self._owner, socket.gethostname().encode())
        claimed = self._etcd.transact([absent(self._changefeed)], [claim], repeatable=True)
        if not claimed.succeeded:
            raise UsageError(
                f"the id {self._id} is in use: a changefeed has the same id, and the sync would move its safe point",
                hint="Pass another --id.",
            )
        self._epoch = claimed.revision
        return self._epoch

    def load(self) -> Checkpoint | None:
        item = self._etcd.get(self._checkpoint)
        if item is None:
            return None
        found = load(Checkpoint, item)
        if found.changefeed_id != self._id:
            raise SyncStateDamaged(f"etcd: the value of {item.key} belongs to {found.changefeed_id}")
        return found

    def save(self, checkpoint: Checkpoint) -> None:
        self._fence()
        put = Put(self._checkpoint, dump(structs.replace(checkpoint, epoch=self._epoch)))
        ours = [modified_at(self._owner, self._epoch)]
        if not self._epoch or not self._etcd.transact(ours, [put], repeatable=True).succeeded:
            raise SyncFenced(f"another process has taken over sync {self._id}; this process had epoch {self._epoch}")
