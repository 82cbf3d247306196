"""What users do to changefeeds: make, pause, resume, change and remove them. The owner, if there is one, follows."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from incremental.group.model import ChangefeedInfo, GroupState, State, dump
from incremental.group.scheduler import Patience
from incremental.group.store import GroupStore
from incremental.handover import SHORTEST_TTL, protect, service_id
from tikv_br.cluster.etcd_values import Delete, Put, absent, modified_at, none_with
from tikv_br.cluster.safepoint import SafePointApi, release
from tikv_br.errors import (
    ChangefeedBusy,
    ChangefeedExists,
    ChangefeedNotFound,
    ClusterError,
    SyncStateDamaged,
    TikvBrError,
)

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
REMOVAL_SECONDS = 120.0
"""How long a removal waits for the captures to stop, unless told otherwise."""

_DAMAGED_HINT = (
    "Put the value right by etcd's own tools, or `tikv-br changefeed remove` it and begin anew from a backup; "
    "`tikv-br diff` shows what the target lacks."
)

Edit = Callable[[ChangefeedInfo], ChangefeedInfo]


def find(state: GroupState, changefeed_id: str) -> ChangefeedInfo:
    """The changefeed of that name. Raises `ChangefeedNotFound`, `SyncStateDamaged`."""
    check_sound(state, changefeed_id)
    if changefeed_id not in state.changefeeds:
        raise ChangefeedNotFound(f"there is no changefeed {changefeed_id}")
    return state.changefeeds[changefeed_id]


def check_sound(state: GroupState, *changefeed_ids: str) -> None:
    """Raise `SyncStateDamaged` where a value of one of the changefeeds does not read."""
    odd = [f"changefeed {each} rests: {state.damaged[each]}" for each in changefeed_ids if each in state.damaged]
    if odd:
        raise SyncStateDamaged("; ".join(odd), hint=_DAMAGED_HINT)


class Changefeeds:
    """The changefeeds of one source cluster. All methods raise `EtcdError` and `SyncStateDamaged`."""

    def __init__(self, store: GroupStore, pd: SafePointApi, sleep: Callable[[float], None] = time.sleep) -> None:
        """`pd` is the source's."""
        self._store = store
        self._pd = pd
        self._sleep = sleep

    def create(self, info: ChangefeedInfo) -> None:
        """Make a changefeed, paused until its safe point is set.

        Raises `ChangefeedExists`, also for the name of a plain sync, and `SafePointError` when GC has passed its start.
        """
        key, etcd = self._store.keys.changefeed(info.id), self._store.etcd
        paused = Put(key, dump(replace(info, state=State.PAUSED)))
        made = etcd.transact([absent(key), none_with(self._store.keys.sync(info.id))], [paused])
        if not made.succeeded:
            what = "sync" if etcd.get(key) is None else "changefeed"
            raise ChangefeedExists(f"there is a {what} {info.id} already")
        ours = [modified_at(key, made.revision)]
        try:
            self._protect(info, info.start_ts)
        except TikvBrError:
            with suppress(TikvBrError):  # it may have been set, though that was not heard; then it runs out by itself
                release(self._pd, service_id(info.id))
            etcd.transact(ours, [Delete(key)])
            raise
        if not etcd.transact(ours, [Put(key, dump(info))]).succeeded:
            raise ChangefeedBusy(f"changefeed {info.id} was changed by another process while it was made")

    def pause(self, changefeed_id: str) -> ChangefeedInfo:
        """Have its tasks stop; the safe point stands for its gc_ttl from now on. Raises `ChangefeedNotFound`.

        Where PD is away, or GC is past it, it is paused all the same: `resume` looks at that again.
        """
        state, info = self._find(changefeed_id)
        try:
            self._protect(info, state.checkpoint_ts(changefeed_id))
        except ClusterError as error:
            log.warning("GC waits for changefeed %s from its last renewal on: %s", changefeed_id, error.message)
        return self._edit(changefeed_id, lambda found: replace(found, state=State.PAUSED))

    def resume(self, changefeed_id: str) -> ChangefeedInfo:
        """Go on from the checkpoint. Raises `ChangefeedNotFound`, and `SafePointError` when GC has passed it."""
        state, info = self._find(changefeed_id)
        self._protect(info, state.checkpoint_ts(changefeed_id))
        return self._edit(changefeed_id, lambda found: replace(found, state=State.NORMAL, error=""))

    def update(self, changefeed_id: str, edit: Edit) -> ChangefeedInfo:
        """Change how it works. Raises `ChangefeedNotFound`, and `ChangefeedBusy` for one that is not paused."""

        def change(found: ChangefeedInfo) -> ChangefeedInfo:
            if found.state is State.NORMAL:
                raise ChangefeedBusy(f"changefeed {changefeed_id} is running", hint="Pause it first, resume it after.")
            return edit(found)

        return self._edit(changefeed_id, change)

    def remove(self, changefeed_id: str, seconds: float = REMOVAL_SECONDS) -> None:
        """Stop it, and forget it with its safe point. Raises `ChangefeedNotFound`.

        Waits so long for the captures to stop, or, where they are gone, for what they have sent to arrive. After that
        raises `ChangefeedBusy`; the removal goes on when there is an owner, or when it is asked for again.
        """
        state = self._store.snapshot()
        if changefeed_id in state.damaged:
            return self._remove_damaged(state, changefeed_id, seconds)
        find(state, changefeed_id)
        gone, deadline = Patience(), time.monotonic() + seconds
        while not self._is_forgotten(changefeed_id, gone):
            if time.monotonic() > deadline:
                raise ChangefeedBusy(
                    f"changefeed {changefeed_id} is still being stopped", hint="Say it again to wait on."
                )
            self._sleep(POLL_SECONDS)
        return None

    def _remove_damaged(self, state: GroupState, changefeed_id: str, seconds: float) -> None:
        """Forget one on which captures do not work any more, though no task can say so. Raises `ChangefeedBusy`."""
        wait = self._store.aftermath(state, changefeed_id)
        if wait > seconds:
            raise ChangefeedBusy(
                f"what captures have sent for changefeed {changefeed_id} may arrive for {wait:g} s more",
                hint=f"Wait at least so long: --wait {math.ceil(wait)}s.",
            )
        self._sleep(wait)
        changed = ChangefeedBusy(
            f"changefeed {changefeed_id} was changed while it was being removed", hint="Say it again."
        )
        if changefeed_id not in self._store.snapshot().damaged:
            raise changed
        release(self._pd, service_id(changefeed_id))
        if not self._store.discard(state, changefeed_id):
            raise changed

    def _is_forgotten(self, changefeed_id: str, patience: Patience) -> bool:
        """Bring a removal forward; whether it is through."""
        state = self._store.snapshot()
        check_sound(state, changefeed_id)
        info = state.changefeeds.get(changefeed_id)
        if info is None:
            return True
        if info.state is not State.REMOVING:
            self._replace(state, replace(info, state=State.REMOVING))
            return False
        held = {task.capture for task in state.tasks_of(changefeed_id)} - {""}
        if not held <= patience.gone(state):
            return False
        release(self._pd, service_id(changefeed_id))
        return self._store.discard(state, changefeed_id)

    def _edit(self, changefeed_id: str, edit: Edit) -> ChangefeedInfo:
        while True:
            state, info = self._find(changefeed_id)
            changed = edit(info)
            if changed == info or self._replace(state, changed):
                return changed

    def _replace(self, state: GroupState, info: ChangefeedInfo) -> bool:
        key = self._store.keys.changefeed(info.id)
        return self._store.etcd.transact([state.unchanged(key)], [Put(key, dump(info))]).succeeded

    def _find(self, changefeed_id: str) -> tuple[GroupState, ChangefeedInfo]:
        state = self._store.snapshot()
        info = find(state, changefeed_id)
        if info.state is State.REMOVING:
            raise ChangefeedBusy(f"changefeed {changefeed_id} is being removed", hint="Create another.")
        return state, info

    def _protect(self, info: ChangefeedInfo, ts: int) -> None:
        protect(self._pd, info.id, ts, info.gc_ttl).leave_for(max(info.gc_ttl, SHORTEST_TTL))
