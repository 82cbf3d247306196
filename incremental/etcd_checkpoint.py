"""The checkpoint of a plain sync in etcd, below ``/tikv-br/CLUSTER-ID/sync/NAME/``.

``owner`` is written by whoever takes the sync over; the revision of that write is its epoch. ``checkpoint`` is written only
while ``owner`` stands as its writer left it, in one transaction: an owner of before can write nothing any more.
"""

from __future__ import annotations

import socket
from dataclasses import replace

from incremental.checkpoint import Checkpoint, CheckpointStore, check_id
from incremental.group.model import Keys, dump, load
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_values import Put, absent, modified_at
from tikv_br.errors import SyncFenced, SyncStateDamaged, UsageError


class EtcdCheckpoints(CheckpointStore):
    """In etcd. Its methods raise `EtcdError` besides what `CheckpointStore` says."""

    def __init__(self, etcd: Etcd, cluster_id: int, changefeed_id: str) -> None:
        """`cluster_id` is the source's. Raises `UsageError` for an id that is none."""
        self._id = check_id(changefeed_id)
        self._etcd = etcd
        keys = Keys(cluster_id)
        self._changefeed = keys.changefeed(changefeed_id)
        self._owner = f"{keys.sync(changefeed_id)}owner"
        self._checkpoint = f"{keys.sync(changefeed_id)}checkpoint"
        self._epoch = 0

    def claim(self) -> int:
        """See `CheckpointStore.claim`. Raises `UsageError` where a changefeed has that name, and its safe point."""
        claim = Put(self._owner, socket.gethostname().encode())
        claimed = self._etcd.transact([absent(self._changefeed)], [claim], repeatable=True)
        if not claimed.succeeded:
            raise UsageError(
                f"there is a changefeed {self._id}, whose safe point this sync would move", hint="Say --id."
            )
        self._epoch = claimed.revision
        return self._epoch

    def load(self) -> Checkpoint | None:
        """See `CheckpointStore.load`."""
        item = self._etcd.get(self._checkpoint)
        if item is None:
            return None
        found = load(Checkpoint, item)
        if found.changefeed_id != self._id:
            raise SyncStateDamaged(f"etcd: {item.key} holds what belongs to {found.changefeed_id}")
        return found

    def save(self, checkpoint: Checkpoint) -> None:
        """See `CheckpointStore.save`."""
        put = Put(self._checkpoint, dump(replace(checkpoint, epoch=self._epoch)))
        ours = [modified_at(self._owner, self._epoch)]
        if not self._epoch or not self._etcd.transact(ours, [put], repeatable=True).succeeded:
            raise SyncFenced(f"another process has taken over sync {self._id}; this one had epoch {self._epoch}")
