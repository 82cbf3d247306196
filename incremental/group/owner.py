"""What the owner of a group does: splits changefeeds, gives their tasks to captures, and tells how far all have come.

Everything that it writes is on condition that it still is the owner, and that what it decided by still stands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from incremental.group import scheduler, spans
from incremental.group.model import ChangefeedInfo, ChangefeedStatus, GroupState, State, Task, dump
from incremental.group.scheduler import Action, Assign, Discard, Free, Patience, Split, Stop
from incremental.group.store import GroupStore
from incremental.handover import RENEW_SECONDS, SHORTEST_TTL, service_id
from tikv_br.cluster import safepoint
from tikv_br.cluster.etcd_values import Compare, Operation, Put
from tikv_br.errors import ClusterError, EtcdError, SafePointError, TikvBrError

log = logging.getLogger(__name__)


class OwnerPd(safepoint.SafePointApi, spans.RegionApi, Protocol):
    """What is needed of `PdClient`."""


class Owner:
    """The owner's part of a capture; it does nothing while another capture is the owner. For one thread."""

    def __init__(
        self, capture_id: str, store: GroupStore, pd: OwnerPd, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`pd` is the source's."""
        self._id = capture_id
        self._store = store
        self._keys = store.keys
        self._pd = pd
        self._clock = clock
        self._patience = Patience(clock)
        self._protected: dict[str, float] = {}
        self._told_damaged: dict[str, str] = {}

    def run(self, stop: threading.Event, every: float) -> None:
        """Look and act every so many seconds until told to stop; trouble with etcd is logged."""
        while not stop.wait(every):
            try:
                self.step()
            except EtcdError as error:
                log.warning("the owner's work waits: %s", error.message)

    def step(self) -> None:
        """Do what there is to do now; what needs PD waits while that is away. Raises `EtcdError`."""
        state = self._store.snapshot()
        if state.owner != self._id:
            self._patience, self._protected = Patience(self._clock), {}
            return
        self._tell_damaged(state)
        for action in scheduler.plan(state, self._patience.gone(state)):
            with _pd_may_be_away():
                self._act(state, action)
        for changefeed in state.changefeeds.values():
            self._publish(state, changefeed)
            if changefeed.state is State.NORMAL:
                with _pd_may_be_away():
                    self._protect(state, changefeed)

    def _tell_damaged(self, state: GroupState) -> None:
        """Log once what does not read: such a changefeed rests, and the safe point that it has is not renewed."""
        for changefeed_id, why in state.damaged.items():
            if self._told_damaged.get(changefeed_id) != why:
                log.error("changefeed %s rests until it is removed or put right: %s", changefeed_id, why)
        self._told_damaged = dict(state.damaged)

    def _act(self, state: GroupState, action: Action) -> None:
        match action:
            case Split():
                self._split(state, state.changefeeds[action.changefeed_id])
            case Assign():
                info = state.captures[action.capture]
                given = replace(
                    action.task,
                    capture=info.id,
                    epoch=action.task.epoch + 1,
                    stopping=False,
                    write_timeout_ms=info.write_timeout_ms,
                )
                self._put_task(state, given, state.still_there(self._keys.capture(info.id)))
            case Stop():
                self._put_task(state, replace(action.task, stopping=True))
            case Free():
                self._put_task(state, replace(action.task, capture="", stopping=False, write_timeout_ms=0))
            case Discard():
                self._discard(state, action.changefeed_id)

    def _split(self, state: GroupState, changefeed: ChangefeedInfo) -> None:
        try:
            parts = spans.sub_spans(self._pd, changefeed)
        except TikvBrError as error:
            if error.retryable:
                raise
            self._store.fail(state, changefeed.id, error, state.still_there(self._keys.owner(self._id)))
            return
        tasks = [Task(changefeed.id, number, part.start, part.end) for number, part in enumerate(parts)]
        unchanged = state.unchanged(self._keys.changefeed(changefeed.id))
        absent = [state.unchanged(self._keys.task(tasks[0].id))]
        if self._write(state, [unchanged, *absent], [Put(self._keys.task(task.id), dump(task)) for task in tasks]):
            log.info("changefeed %s: split into %d sub-spans", changefeed.id, len(tasks))

    def _put_task(self, state: GroupState, task: Task, *conditions: Compare) -> None:
        key = self._keys.task(task.id)
        if self._write(state, [state.unchanged(key), *conditions], [Put(key, dump(task))]):
            stops = " shall stop" if task.stopping else ""
            log.info("task %s: %s%s, epoch %d", task.id, task.capture or "free", stops, task.epoch)

    def _discard(self, state: GroupState, changefeed_id: str) -> None:
        self._protected.pop(changefeed_id, None)  # another of that name is not protected by what was
        safepoint.release(self._pd, service_id(changefeed_id))
        if self._store.discard(state, changefeed_id, state.still_there(self._keys.owner(self._id))):
            log.info("changefeed %s: removed", changefeed_id)

    def _publish(self, state: GroupState, changefeed: ChangefeedInfo) -> None:
        """Tell how far the changefeed has come."""
        reached = state.checkpoint_ts(changefeed.id)
        resolved = [
            state.progress[task.id].resolved_ts for task in state.tasks_of(changefeed.id) if task.id in state.progress
        ]
        told = state.statuses.get(changefeed.id)
        known = max(reached, min(resolved, default=0))
        new = ChangefeedStatus(changefeed.id, reached, known, time.time_ns() // 1_000_000, self._id)
        if told is not None and replace(new, saved_ms=told.saved_ms) == told:
            return
        key = self._keys.status(changefeed.id)
        there = state.still_there(self._keys.changefeed(changefeed.id))
        self._write(state, [there, state.unchanged(key)], [Put(key, dump(new))])

    def _protect(self, state: GroupState, changefeed: ChangefeedInfo) -> None:
        """Keep GC behind the checkpoint; of a changefeed that does not run it stays behind for its `gc_ttl` only."""
        now = self._clock()
        if now < self._protected.get(changefeed.id, 0.0):
            return
        checkpoint_ts = state.checkpoint_ts(changefeed.id)
        ttl = max(changefeed.gc_ttl, SHORTEST_TTL)
        try:
            safepoint.protect(self._pd, service_id(changefeed.id), checkpoint_ts - 1, ttl)
        except SafePointError as error:
            self._store.fail(state, changefeed.id, error, state.still_there(self._keys.owner(self._id)))
        self._protected[changefeed.id] = now + min(RENEW_SECONDS, ttl / safepoint.RENEWALS_PER_TTL)

    def _write(self, state: GroupState, conditions: Iterable[Compare], operations: Iterable[Operation]) -> bool:
        """Write if we are still the owner and all else holds; what another has changed meanwhile is looked at again."""
        ours = state.still_there(self._keys.owner(self._id))
        return self._store.etcd.transact([ours, *conditions], operations, repeatable=True).succeeded


@contextmanager
def _pd_may_be_away() -> Iterator[None]:
    """Log trouble with PD: the work comes again with the next step, and no other waits for it."""
    try:
        yield
    except ClusterError as error:
        log.warning("the owner's work waits: %s", error.message)
