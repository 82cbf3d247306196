"""Reading and writing the state of a group in etcd."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from tikv_br.cluster.etcd_values import Compare, Delete, Put
from tikv_br.errors import SyncStateDamaged, TikvBrError
from tikv_br.incremental.group.model import (
    MAX_LEASE_SECONDS,
    MAX_POLL_SECONDS,
    MAX_WRITE_MS,
    ChangefeedState,
    ChangefeedTask,
    GroupState,
    Keys,
    load,
    parse,
)
from tikv_br.records import dump
from tikv_br.redaction import redact

if TYPE_CHECKING:
    from tikv_br.cluster.etcd import Etcd


log = logging.getLogger(__name__)


class GroupStore:
    """The part of etcd where the group of one source cluster keeps its state."""

    def __init__(self, etcd: Etcd, cluster_id: int) -> None:
        """`cluster_id` is the source's."""
        self.etcd = etcd
        self.keys = Keys(cluster_id)

    def snapshot(self) -> GroupState:
        """Everything, as it stood at one revision. Raises `EtcdError`."""
        listing = self.etcd.range(self.keys.root)
        return parse(self.keys, listing.items, listing.revision)

    def fail(self, state: GroupState, changefeed_id: str, error: TikvBrError, right: Compare) -> None:
        """Mark a changefeed as failed, unless it has changed since `state`.

        `right` is a condition that proves the caller's right to do so. Raises `EtcdError`.
        """
        key = self.keys.of("changefeed", changefeed_id)
        failed = replace(state.changefeeds[changefeed_id], state=ChangefeedState.FAILED, error=redact(error.message))
        if self.etcd.transact([right, state.unchanged(key)], [Put(key, dump(failed))], repeatable=True).succeeded:
            log.error("changefeed %s has failed: %s", changefeed_id, error.message)

    def discard(self, state: GroupState, changefeed_id: str, *guards: Compare) -> bool:
        """Delete a changefeed unless it or its tasks have changed since `state`; returns whether it was deleted.

        Release its safe point first: if this process dies in between, the removal is repeated.
        """
        keys = self.keys
        seen = [keys.of("changefeed", changefeed_id), *self._tasks(state, changefeed_id)]
        removed = [
            Delete(keys.of("changefeed", changefeed_id)),
            Delete(keys.of("status", changefeed_id)),
            Delete(keys.of("task", f"{changefeed_id}/"), prefix=True),
            Delete(keys.of("progress", f"{changefeed_id}/"), prefix=True),
        ]
        return self.etcd.transact([*guards, *map(state.unchanged, seen)], removed, repeatable=True).succeeded

    def seconds_until_quiet(self, state: GroupState, changefeed_id: str) -> float:
        """Seconds until captures have stopped work on a damaged changefeed and their last requests can no longer arrive.

        A capture that does not reach etcd stops when its lease expires.
        """
        timeouts: list[int] = []
        for key in self._tasks(state, changefeed_id):
            try:
                task = load(ChangefeedTask, state.items[key])
            except SyncStateDamaged:  # it may be anybody's
                timeouts.append(MAX_WRITE_MS)
            else:
                timeouts += [task.write_timeout_ms] if task.capture else []
        if not timeouts:
            return 0.0
        longest = max(timeouts)
        lease = MAX_LEASE_SECONDS if longest >= MAX_WRITE_MS else longest / 1000
        return MAX_POLL_SECONDS + lease + longest / 1000

    def _tasks(self, state: GroupState, changefeed_id: str) -> list[str]:
        """The keys of its tasks, also of unreadable ones."""
        return [key for key in state.items if key.startswith(self.keys.of("task", f"{changefeed_id}/"))]
