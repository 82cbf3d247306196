"""A group's state in etcd, read whole."""

from __future__ import annotations

import logging
from dataclasses import replace

from incremental.group.model import (
    LONGEST_LEASE,
    LONGEST_LOOK,
    LONGEST_WRITE_MS,
    GroupState,
    Keys,
    State,
    Task,
    dump,
    load,
    parse,
)
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_values import Compare, Delete, Put
from tikv_br.errors import SyncStateDamaged, TikvBrError
from tikv_br.redaction import redact

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
        """Have a changefeed rest until somebody resumes it, unless it has changed since `state`.

        `right` is why the caller may say so. Raises `EtcdError`.
        """
        key = self.keys.changefeed(changefeed_id)
        failed = replace(state.changefeeds[changefeed_id], state=State.FAILED, error=redact(error.message))
        if self.etcd.transact([right, state.unchanged(key)], [Put(key, dump(failed))], repeatable=True).succeeded:
            log.error("changefeed %s has failed: %s", changefeed_id, error.message)

    def discard(self, state: GroupState, changefeed_id: str, *guards: Compare) -> bool:
        """Forget a changefeed, if neither it nor its tasks have changed since; whether that was done.

        Let its safe point go before: what ends in between comes back to it.
        """
        keys = self.keys
        seen = [keys.changefeed(changefeed_id), *self._tasks(state, changefeed_id)]
        removed = [
            Delete(keys.changefeed(changefeed_id)),
            Delete(keys.status(changefeed_id)),
            Delete(keys.tasks(changefeed_id), prefix=True),
            Delete(keys.progresses(changefeed_id), prefix=True),
        ]
        return self.etcd.transact([*guards, *map(state.unchanged, seen)], removed, repeatable=True).succeeded

    def aftermath(self, state: GroupState, changefeed_id: str) -> float:
        """Seconds until captures have ended their work on a damaged changefeed, and what they had sent by then has arrived.

        One that etcd does not reach ends when its lease does.
        """
        timeouts: list[int] = []
        for key in self._tasks(state, changefeed_id):
            try:
                task = load(Task, state.items[key])
            except SyncStateDamaged:  # it may be anybody's
                timeouts.append(LONGEST_WRITE_MS)
            else:
                timeouts += [task.write_timeout_ms] if task.capture else []
        if not timeouts:
            return 0.0
        longest = max(timeouts)
        lease = LONGEST_LEASE if longest >= LONGEST_WRITE_MS else longest / 1000
        return LONGEST_LOOK + lease + longest / 1000

    def _tasks(self, state: GroupState, changefeed_id: str) -> list[str]:
        """The keys of its tasks, whether they read or not."""
        return [key for key in state.items if key.startswith(self.keys.tasks(changefeed_id))]
