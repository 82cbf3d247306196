"""The user's commands for changefeeds: create, pause, resume, update, remove. They write to etcd; the owner acts on it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

from msgspec import structs

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.etcd_values import Delete, Put, absent, modified_at, none_with
from tikv_br.cluster.keyspaces import keyspace_names
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.safepoint import release
from tikv_br.errors import (
    ChangefeedBusy,
    ChangefeedExists,
    ChangefeedNotFound,
    ClusterError,
    Failure,
    SyncStateDamaged,
    TikvBrError,
)
from tikv_br.incremental.group.model import ChangefeedInfo, ChangefeedState, GroupState
from tikv_br.incremental.group.owner import DeadCaptures
from tikv_br.incremental.group.store import GroupStore
from tikv_br.incremental.handover import (
    MIN_TTL,
    Start,
    at_once,
    check_has_feed,
    protect,
    resolve,
    service_id,
    source_codec,
)
from tikv_br.incremental.sinks.open import Origin, SinkOptions, open_sink, wait_for_sink
from tikv_br.incremental.sinks.url import LogTarget, parse
from tikv_br.incremental.sinks.writer import ReplicateOptions
from tikv_br.records import dump
from tikv_br.retry import wait_until


def resolved(asked: ChangefeedInfo, source: Cluster, keyspace: str, start: Start, sink: SinkOptions) -> ChangefeedInfo:
    """Complete a changefeed with its keyspace id, start-ts and sink; tries for `CREATE_PATIENCE` to reach the sink.

    Raises `UsageError`, `ClusterUnfit` for a source without a feed, `SafePointError`, other `ClusterError`, `StorageError`,
    `BackupSetError` for a backup to start from.
    """
    codec = source_codec(source, keyspace)
    info = structs.replace(asked, keyspace_id=codec.keyspace_id)
    origin = _origin(source, info)
    target = parse(asked.sink)
    check_has_feed(source, writes_log=isinstance(target, LogTarget))
    start = at_once(start, source)
    with ExitStack() as stack:
        patience = min(info.patience_ms / 1000, CREATE_PATIENCE)
        retries = ReplicateOptions(patience=patience, longest_wait=info.backoff_ms / 1000)
        opened = wait_for_sink(stack, target, origin, sink, retries)
        place = info.place if opened is None else opened.place
        start_ts = resolve(start, source, info.range, writes_log=isinstance(target, LogTarget))
        return structs.replace(info, place=place, start_ts=start_ts, keyspace_name=origin.keyspace_name)


def _origin(source: Cluster, info: ChangefeedInfo) -> Origin:
    name = keyspace_names(source, [info.keyspace_id]).get(info.keyspace_id, "")
    return Origin(source.cluster_id, info.keyspace_id, info.id, whole=info.range, keyspace_name=name)


def moved(info: ChangefeedInfo, url: str, source: Cluster, sink: SinkOptions) -> ChangefeedInfo:
    """A changefeed with another address of its sink. Raises `SyncStateMismatch` where that is another sink, `ClusterError`."""
    with open_sink(parse(url), replace(_origin(source, info), resumes=True), sink) as opened:
        info.check_place(opened.place)
    return structs.replace(info, sink=url)


log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
CREATE_PATIENCE = 5.0
"""Seconds for which the creation of a changefeed tries to reach its sink: somebody waits. One try takes up to 10 s."""
REMOVAL_SECONDS = 120.0
"""Default time that a removal waits for the captures to stop."""

_DAMAGED_HINT = (
    "Correct the value with etcdctl, or run `tikv-br changefeed remove` and create the changefeed again from a backup. "
    "`tikv-br diff` shows which rows the target is missing."
)

Edit = Callable[[ChangefeedInfo], ChangefeedInfo]


def find(state: GroupState, changefeed_id: str) -> ChangefeedInfo:
    """The changefeed of that name. Raises `ChangefeedNotFound`, `SyncStateDamaged`."""
    check_sound(state, changefeed_id)
    if changefeed_id not in state.changefeeds:
        raise ChangefeedNotFound(
            f"changefeed {changefeed_id} does not exist", hint="`tikv-br changefeed list` prints all changefeeds."
        )
    return state.changefeeds[changefeed_id]


def check_sound(state: GroupState, *changefeed_ids: str) -> None:
    """Raise `SyncStateDamaged` if a value of one of the changefeeds cannot be read."""
    damaged = [
        f"changefeed {each} is stopped: {state.damaged[each]}" for each in changefeed_ids if each in state.damaged
    ]
    if damaged:
        raise SyncStateDamaged("; ".join(damaged), hint=_DAMAGED_HINT)


class Changefeeds:
    """The changefeeds of one source cluster. All methods raise `EtcdError` and `SyncStateDamaged`."""

    def __init__(self, store: GroupStore, pd: PdClient, sleep: Callable[[float], None] = time.sleep) -> None:
        """`pd` is the source's."""
        self._store = store
        self._pd = pd
        self._sleep = sleep

    def create(self, info: ChangefeedInfo, former_id: str = "") -> None:
        """Make a changefeed, paused until its safe point is set.

        Raises `ChangefeedExists`, also for the name of a plain sync and if there is a changefeed `former_id`, and
        `SafePointError` when GC has passed its start.
        """
        keys, etcd = self._store.keys, self._store.etcd
        key, names = keys.of("changefeed", info.id), [each for each in (info.id, former_id) if each]
        paused = Put(key, dump(structs.replace(info, state=ChangefeedState.PAUSED)))
        unused = [absent(keys.of("changefeed", each)) for each in names]
        made = etcd.transact([*unused, none_with(keys.of("sync", f"{info.id}/"))], [paused])
        if not made.succeeded:
            found = [f"changefeed {each}" for each in names if etcd.get(keys.of("changefeed", each)) is not None]
            raise ChangefeedExists(f"a {[*found, f'sync {info.id}'][0]} already exists", hint="Pass another --id.")
        ours = [modified_at(key, made.revision)]
        try:
            self._protect(info, info.start_ts)
        except Failure:
            with suppress(TikvBrError):  # it may be set although the answer was lost; if so, and this fails, it expires
                release(self._pd, service_id(info.id))
            etcd.transact(ours, [Delete(key)])
            raise
        if not etcd.transact(ours, [Put(key, dump(info))]).succeeded:
            raise ChangefeedBusy(
                f"changefeed {info.id} was changed by another process while it was being created",
                hint="Check it with `tikv-br changefeed query`.",
            )

    def pause(self, changefeed_id: str) -> ChangefeedInfo:
        """Stop its tasks; the safe point is kept for its gc_ttl from now on. Raises `ChangefeedNotFound`.

        It is paused even if PD is down or GC has passed its checkpoint; `resume` checks that again.
        """
        state, info = self._find(changefeed_id)
        try:
            self._protect(info, state.checkpoint_ts(changefeed_id))
        except ClusterError as error:
            log.warning(
                "cannot renew the safe point of changefeed %s; it expires its TTL after the last renewal: %s",
                changefeed_id,
                error.message,
            )
        return self._edit(changefeed_id, lambda found: structs.replace(found, state=ChangefeedState.PAUSED))

    def resume(self, changefeed_id: str) -> ChangefeedInfo:
        """Resume from the checkpoint. Raises `ChangefeedNotFound`, and `SafePointError` if GC has passed it."""
        state, info = self._find(changefeed_id)
        self._protect(info, state.checkpoint_ts(changefeed_id))
        return self._edit(changefeed_id, lambda found: structs.replace(found, state=ChangefeedState.NORMAL, error=""))

    def update(self, changefeed_id: str, edit: Edit) -> ChangefeedInfo:
        """Change its options. Raises `ChangefeedNotFound`, and `ChangefeedBusy` if it is running."""

        def change(found: ChangefeedInfo) -> ChangefeedInfo:
            if found.state is ChangefeedState.NORMAL:
                raise ChangefeedBusy(
                    f"changefeed {changefeed_id} is running", hint="Pause it first, and resume it afterwards."
                )
            return edit(found)

        return self._edit(changefeed_id, change)

    def remove(self, changefeed_id: str, seconds: float = REMOVAL_SECONDS) -> None:
        """Stop it, and delete it and its safe point. Raises `ChangefeedNotFound`.

        Waits up to `seconds` for its captures to stop, or, if they have died, until their last writes must have arrived. Then
        raises `ChangefeedBusy`; the owner continues the removal, or the next call of this.
        """
        state = self._store.snapshot()
        if changefeed_id in state.damaged:
            return self._remove_damaged(state, changefeed_id, seconds)
        find(state, changefeed_id)
        busy = ChangefeedBusy(
            f"changefeed {changefeed_id} is still being stopped", hint="Run the same command again to keep waiting."
        )
        dead = DeadCaptures()
        wait_until(
            lambda: self._try_remove(changefeed_id, dead), seconds, lambda: busy, poll=POLL_SECONDS, sleep=self._sleep
        )
        return None

    def _remove_damaged(self, state: GroupState, changefeed_id: str, seconds: float) -> None:
        """Delete a damaged changefeed after waiting until no capture can be working on it. Raises `ChangefeedBusy`."""
        wait = self._store.seconds_until_quiet(state, changefeed_id)
        if wait > seconds:
            raise ChangefeedBusy(
                f"writes of captures for changefeed {changefeed_id} may still arrive for {wait:g} s",
                hint=f"Pass --wait {math.ceil(wait)}s or more.",
            )
        self._sleep(wait)
        changed = ChangefeedBusy(
            f"changefeed {changefeed_id} was changed while it was being removed", hint="Run the same command again."
        )
        if changefeed_id not in self._store.snapshot().damaged:
            raise changed
        if not self._store.is_sync(state, changefeed_id):  # else the safe point is the sync's
            release(self._pd, service_id(changefeed_id))
        if not self._store.discard(state, changefeed_id):
            raise changed

    def _try_remove(self, changefeed_id: str, dead: DeadCaptures) -> bool:
        """Take the next step of a removal; True when it is complete."""
        state = self._store.snapshot()
        check_sound(state, changefeed_id)
        info = state.changefeeds.get(changefeed_id)
        if info is None:
            return True
        if info.state is not ChangefeedState.REMOVING:
            self._replace(state, structs.replace(info, state=ChangefeedState.REMOVING))
            return False
        held = {task.capture for task in state.tasks_of(changefeed_id)} - {""}
        if not held <= dead.gone(state):
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
        key = self._store.keys.of("changefeed", info.id)
        return self._store.etcd.transact([state.unchanged(key)], [Put(key, dump(info))]).succeeded

    def _find(self, changefeed_id: str) -> tuple[GroupState, ChangefeedInfo]:
        state = self._store.snapshot()
        info = find(state, changefeed_id)
        if info.state is ChangefeedState.REMOVING:
            raise ChangefeedBusy(f"changefeed {changefeed_id} is being removed", hint="Create another changefeed.")
        return state, info

    def _protect(self, info: ChangefeedInfo, ts: int) -> None:
        protect(self._pd, info.id, ts, info.gc_ttl).stop_with_ttl(max(info.gc_ttl, MIN_TTL))
