"""The owner of a group: splits changefeeds into tasks, assigns them to captures, and publishes the changefeeds' checkpoints.

Every write is conditional: this capture must still be the owner, and the keys that it decided on must be unchanged.

`plan`, without I/O, decides the next actions from the state in etcd. A task has three states: *free* (no capture), *assigned*, and *stopping* (assigned, and its capture has been asked to free it).
Only a free task is assigned, so that no two captures ever have it. A task of a dead capture counts as free as soon as none of
its writes can still arrive at a sink (`DeadCaptures`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tikv_br.cluster import safepoint
from tikv_br.cluster.etcd_values import Compare, Operation, Put
from tikv_br.cluster.pd import PdClient
from tikv_br.dataflow.plan import cut_at
from tikv_br.errors import ClusterError, EtcdError, SafePointError, SyncStateDamaged, TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.group.model import (
    ChangefeedInfo,
    ChangefeedState,
    ChangefeedStatus,
    ChangefeedTask,
    GroupState,
)
from tikv_br.incremental.group.store import GroupStore
from tikv_br.incremental.handover import MIN_TTL, RENEW_SECONDS, service_id
from tikv_br.records import dump


@dataclass(frozen=True, slots=True)
class Split:
    """Split the range of a changefeed into tasks."""

    changefeed_id: str


@dataclass(frozen=True, slots=True)
class Assign:
    """Assign a free task, or one of a dead capture, to a capture."""

    task: ChangefeedTask
    capture: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the capture of a task to free it."""

    task: ChangefeedTask


@dataclass(frozen=True, slots=True)
class Free:
    """Free a stopping task of a dead capture."""

    task: ChangefeedTask


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete a removed changefeed, now that all its tasks are free."""

    changefeed_id: str


Action = Split | Assign | Stop | Free | Discard


class DeadCaptures:
    """Measures, by this process's clock, how long captures have been missing.

    A capture that has lost its lease starts no more writes, but those in flight may arrive until its request timeout.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._missed: dict[str, float] = {}

    def gone(self, state: GroupState) -> frozenset[str]:
        """The dead captures whose writes can no longer arrive."""
        now = self._clock()
        held = [task for task in state.tasks.values() if task.capture and task.capture not in state.captures]
        self._missed = {task.capture: self._missed.get(task.capture, now) for task in held}
        longest: dict[str, int] = {}
        for task in held:
            longest[task.capture] = max(longest.get(task.capture, 0), task.write_timeout_ms)
        return frozenset(each for each, since in self._missed.items() if (now - since) * 1000 >= longest[each])


def plan(state: GroupState, gone: Collection[str]) -> list[Action]:
    """The actions to take, in order. `gone`: see `DeadCaptures`.

    Every task of a normal changefeed is assigned. The numbers of tasks of two captures differ by at most one, and as few tasks
    as possible are moved.
    """
    actions: list[Action] = []
    for changefeed in state.changefeeds.values():
        actions += _for_changefeed(changefeed, state.tasks_of(changefeed.id), gone)
    if state.captures:
        actions += _balance(state, gone)
    return actions


def _for_changefeed(changefeed: ChangefeedInfo, tasks: Sequence[ChangefeedTask], gone: Collection[str]) -> list[Action]:
    """The actions that do not depend on the number of captures."""
    if changefeed.state is ChangefeedState.NORMAL:
        return [] if tasks else [Split(changefeed.id)]
    held = [task for task in tasks if task.capture]
    if not held and changefeed.state is ChangefeedState.REMOVING:
        return [Discard(changefeed.id)]
    freed: list[Action] = [Free(task) for task in held if task.capture in gone]
    return freed + [Stop(task) for task in held if not task.stopping and task.capture not in gone]


def _balance(state: GroupState, gone: Collection[str]) -> list[Action]:
    """Assign free tasks to the captures with the fewest, and stop surplus tasks of those with too many."""
    running = {each.id for each in state.changefeeds.values() if each.state is ChangefeedState.NORMAL}
    wanted = [task for task in state.tasks.values() if task.changefeed in running]
    held: dict[str, list[ChangefeedTask]] = {capture: [] for capture in sorted(state.captures)}
    for task in wanted:
        if task.capture in held and not task.stopping:
            held[task.capture].append(task)
    assigned: list[Action] = []
    for task in sorted(wanted, key=lambda each: each.id):
        if not task.capture or task.capture in gone:
            counts = {
                name: (len(tasks), sum(each.changefeed == task.changefeed for each in tasks))
                for name, tasks in held.items()
            }
            capture = min(counts, key=counts.__getitem__)
            held[capture].append(task)
            assigned.append(Assign(task, capture))
    return assigned + [Stop(task) for task in _surplus(held, len(wanted))]


def _surplus(held: Mapping[str, list[ChangefeedTask]], total: int) -> Iterable[ChangefeedTask]:
    """The tasks beyond each capture's share; the captures with the most tasks may round their share up."""
    share, rest = divmod(total, len(held))
    for at, capture in enumerate(sorted(held, key=lambda name: -len(held[name]))):
        tasks = list(held[capture])
        while len(tasks) > share + (at < rest):
            counts = Counter(task.changefeed for task in tasks)
            leaving = max(tasks, key=lambda task: (counts[task.changefeed], task.id))
            tasks.remove(leaving)
            yield leaving


def sub_spans(pd: PdClient, changefeed: ChangefeedInfo) -> list[KeyRange]:
    """The changefeed's range in `spans` parts, or fewer if it has fewer regions. Raises `ClusterError`."""
    codec = KeyCodec(ApiVersion.V2, changefeed.keyspace_id)
    whole = changefeed.range
    regions = pd.scan_regions(codec.bound(whole.start), codec.bound(whole.end))
    return cut(whole, [key for region in regions if (key := cut_at(region.start, codec))], changefeed.spans)


def cut(whole: KeyRange, borders: Sequence[bytes], parts: int) -> list[KeyRange]:
    """Divide a range into at most `parts` ranges of about equally many regions, which meet at `borders` (ascending RPC keys)."""
    inner = [key for key in borders if whole.start < key < whole.end]
    count = min(parts, len(inner) + 1)
    chosen = [inner[at * (len(inner) + 1) // count - 1] for at in range(1, count)]
    return [KeyRange(*pair) for pair in zip([whole.start, *chosen], [*chosen, whole.end], strict=True)]


log = logging.getLogger(__name__)


class CaptureOwner:
    """The owner's part of a capture; it does nothing while another capture is the owner. For one thread."""

    def __init__(
        self, capture_id: str, store: GroupStore, pd: PdClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`pd` is the source's."""
        self._id = capture_id
        self._store = store
        self._keys = store.keys
        self._pd = pd
        self._clock = clock
        self._dead_captures = DeadCaptures(clock)
        self._protected: dict[str, float] = {}
        self._reported_damaged: dict[str, str] = {}

    def run(self, stop: threading.Event, every: float) -> None:
        """Call `step` periodically until `stop`; errors of etcd are logged."""
        while not stop.wait(every):
            try:
                self.step()
            except EtcdError as error:
                log.warning("the owner cannot reach etcd, retrying: %s", error.message)

    def step(self) -> None:
        """Take all actions that are due now; those that need PD are retried in the next step. Raises `EtcdError`."""
        state = self._store.snapshot()
        if state.owner != self._id:
            self._dead_captures, self._protected = DeadCaptures(self._clock), {}
            return
        self._report_damaged(state)
        for action in plan(state, self._dead_captures.gone(state)):
            with _pd_may_be_away():
                self._act(state, action)
        for changefeed in state.changefeeds.values():
            self._publish(state, changefeed)
            if changefeed.state is ChangefeedState.NORMAL:
                with _pd_may_be_away():
                    self._protect(state, changefeed)

    def _report_damaged(self, state: GroupState) -> None:
        """Log each damaged changefeed once; nobody works on it, and its safe point is not renewed."""
        for changefeed_id, why in state.damaged.items():
            if self._reported_damaged.get(changefeed_id) != why:
                log.error("changefeed %s is stopped until it is repaired or removed: %s", changefeed_id, why)
        self._reported_damaged = dict(state.damaged)

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
                self._put_task(state, given, state.still_there(self._keys.of("capture", info.id)))
            case Stop():
                self._put_task(state, replace(action.task, stopping=True))
            case Free():
                self._put_task(state, replace(action.task, capture="", stopping=False, write_timeout_ms=0))
            case Discard():
                self._discard(state, action.changefeed_id)

    def _split(self, state: GroupState, changefeed: ChangefeedInfo) -> None:
        try:
            parts = sub_spans(self._pd, changefeed)
        except TikvBrError as error:
            if error.retryable:
                raise
            self._store.fail(state, changefeed.id, error, state.still_there(self._keys.of("owner", self._id)))
            return
        tasks = [ChangefeedTask(changefeed.id, number, part.start, part.end) for number, part in enumerate(parts)]
        unchanged = state.unchanged(self._keys.of("changefeed", changefeed.id))
        absent = [state.unchanged(self._keys.of("task", tasks[0].id))]
        if self._write(
            state, [unchanged, *absent], [Put(self._keys.of("task", task.id), dump(task)) for task in tasks]
        ):
            log.info("changefeed %s: split into %d sub-spans", changefeed.id, len(tasks))

    def _put_task(self, state: GroupState, task: ChangefeedTask, *conditions: Compare) -> None:
        key = self._keys.of("task", task.id)
        if self._write(state, [state.unchanged(key), *conditions], [Put(key, dump(task))]):
            action = "stop requested from" if task.stopping else "assigned to"
            log.info(
                "task %s: %s, epoch %d", task.id, f"{action} {task.capture}" if task.capture else "free", task.epoch
            )

    def _discard(self, state: GroupState, changefeed_id: str) -> None:
        self._protected.pop(changefeed_id, None)  # a new changefeed with this id needs a new safe point
        safepoint.release(self._pd, service_id(changefeed_id))
        if self._store.discard(state, changefeed_id, state.still_there(self._keys.of("owner", self._id))):
            log.info("changefeed %s: removed", changefeed_id)

    def _publish(self, state: GroupState, changefeed: ChangefeedInfo) -> None:
        """Write the changefeed's status if it has changed."""
        reached = state.checkpoint_ts(changefeed.id)
        resolved = [
            state.progress[task.id].resolved_ts for task in state.tasks_of(changefeed.id) if task.id in state.progress
        ]
        published = state.statuses.get(changefeed.id)
        known = max(reached, min(resolved, default=0))
        new = ChangefeedStatus(changefeed.id, reached, known, time.time_ns() // 1_000_000, self._id)
        if published is not None and replace(new, saved_ms=published.saved_ms) == published:
            return
        key = self._keys.of("status", changefeed.id)
        there = state.still_there(self._keys.of("changefeed", changefeed.id))
        self._write(state, [there, state.unchanged(key)], [Put(key, dump(new))])

    def _protect(self, state: GroupState, changefeed: ChangefeedInfo) -> None:
        """Renew the changefeed's safe point at its checkpoint; for one that is not running, it expires after `gc_ttl`."""
        now = self._clock()
        if now < self._protected.get(changefeed.id, 0.0):
            return
        checkpoint_ts = state.checkpoint_ts(changefeed.id)
        if checkpoint_ts > (latest := self._pd.tso()):
            error = SyncStateDamaged(
                f"the checkpoint {checkpoint_ts} of changefeed {changefeed.id} is in the future: PD is at {latest}"
            )
            self._store.fail(state, changefeed.id, error, state.still_there(self._keys.of("owner", self._id)))
            return
        ttl = max(changefeed.gc_ttl, MIN_TTL)
        try:
            safepoint.protect(self._pd, service_id(changefeed.id), checkpoint_ts - 1, ttl)
        except SafePointError as passed:
            self._store.fail(state, changefeed.id, passed, state.still_there(self._keys.of("owner", self._id)))
        self._protected[changefeed.id] = now + min(RENEW_SECONDS, ttl / safepoint.RENEWALS_PER_TTL)

    def _write(self, state: GroupState, conditions: Iterable[Compare], operations: Iterable[Operation]) -> bool:
        """Write if we are still the owner and all conditions hold; else the next step decides again."""
        ours = state.still_there(self._keys.of("owner", self._id))
        return self._store.etcd.transact([ours, *conditions], operations, repeatable=True).succeeded


@contextmanager
def _pd_may_be_away() -> Iterator[None]:
    """Log errors of PD; the next step retries, and other actions of this step go on."""
    try:
        yield
    except ClusterError as error:
        log.warning("the owner cannot reach PD, retrying: %s", error.message)
