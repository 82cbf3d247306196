"""Reading and writing the state of a group in etcd."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from tikv_br.archive.records import check_id
from tikv_br.cluster.etcd_values import Compare, Delete, KeyValue, Put
from tikv_br.errors import SyncStateDamaged, TikvBrError, UsageError
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.group.model import (
    MAX_LEASE_SECONDS,
    MAX_POLL_SECONDS,
    MAX_WRITE_MS,
    CaptureInfo,
    ChangefeedInfo,
    ChangefeedState,
    ChangefeedStatus,
    ChangefeedTask,
    GroupState,
    Keys,
    Progress,
    TaskId,
    load,
)
from tikv_br.records import dump
from tikv_br.redaction import redact

if TYPE_CHECKING:
    from tikv_br.cluster.etcd import Etcd


log = logging.getLogger(__name__)
_Named = TypeVar("_Named", CaptureInfo, ChangefeedInfo, ChangefeedStatus, Progress, ChangefeedTask)


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
        failed = structs.replace(
            state.changefeeds[changefeed_id], state=ChangefeedState.FAILED, error=redact(error.message)
        )
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

    def is_sync(self, state: GroupState, name: str) -> bool:
        """Return whether a plain sync has this name."""
        return _has_sync(self.keys, state.items, name)

    def _tasks(self, state: GroupState, changefeed_id: str) -> list[str]:
        """The keys of its tasks, also of unreadable ones."""
        return [key for key in state.items if key.startswith(self.keys.of("task", f"{changefeed_id}/"))]


def load_progress(item: KeyValue) -> Progress:
    """The progress of the task that its key names. Raises `SyncStateDamaged`."""
    return _check_name(load(Progress, item), _task_id(item), item)


def parse(keys: Keys, items: tuple[KeyValue, ...], revision: int) -> GroupState:
    """Parse the state; unknown keys are ignored.

    An unreadable value affects only its changefeed. A capture exists as long as its key does.
    """
    captures: dict[str, CaptureInfo] = {}
    candidates: dict[str, int] = {}
    changefeeds: dict[str, ChangefeedInfo] = {}
    tasks: dict[TaskId, ChangefeedTask] = {}
    progress: dict[TaskId, Progress] = {}
    statuses: dict[str, ChangefeedStatus] = {}
    damaged: dict[str, str] = {}
    for item in items:
        kind, _, name = item.key.removeprefix(keys.root).partition("/")
        try:
            match kind:
                case "capture":
                    captures[name] = _capture(name, item)
                case "owner":
                    candidates[name] = item.create_revision
                case "changefeed":
                    changefeeds[check_id(name)] = _check_name(load(ChangefeedInfo, item), name, item)
                case "status":
                    statuses[name] = _check_name(load(ChangefeedStatus, item), name, item)
                case "task":
                    tasks[_task_id(item)] = _check_name(load(ChangefeedTask, item), _task_id(item), item)
                case "progress":
                    progress[_task_id(item)] = load_progress(item)
        except (SyncStateDamaged, UsageError) as error:
            damaged.setdefault(name.partition("/")[0], error.message)
    damaged = {**_misplaced(keys, changefeeds, tasks.values(), items), **damaged}
    return GroupState(
        revision=revision,
        captures=captures,
        owner=min(candidates, key=candidates.__getitem__, default=""),
        changefeeds={name: info for name, info in changefeeds.items() if name not in damaged},
        tasks={task_id: task for task_id, task in tasks.items() if task_id.changefeed not in damaged},
        progress={task_id: each for task_id, each in progress.items() if task_id.changefeed not in damaged},
        statuses={name: status for name, status in statuses.items() if name not in damaged},
        items={item.key: item for item in items},
        damaged=damaged,
    )


def _has_sync(keys: Keys, names: Iterable[str], sync: str) -> bool:
    return any(name.startswith(keys.of("sync", f"{sync}/")) for name in names)


def _misplaced(
    keys: Keys, changefeeds: Mapping[str, ChangefeedInfo], tasks: Iterable[ChangefeedTask], items: Iterable[KeyValue]
) -> dict[str, str]:
    """Changefeeds that no command makes, and why: they have the name, so the safe point, of a plain sync, or a task elsewhere."""
    found, names = dict[str, str](), [item.key for item in items]
    for name, info in changefeeds.items():
        if _has_sync(keys, names, name):
            found[name] = f"etcd: {keys.of('changefeed', name)} has the name of a sync"
        for task in tasks:
            span = KeyRange(task.start, task.end)
            if task.changefeed == name and (span.is_empty or not info.range.contains(span)):
                found[name] = f"etcd: {keys.of('task', task.id)} is not within the range of its changefeed"
    return found


def _capture(name: str, item: KeyValue) -> CaptureInfo:
    """A capture. If its value is unreadable, only its id: it exists, and may be writing."""
    try:
        return _check_name(load(CaptureInfo, item), name, item)
    except SyncStateDamaged:
        return CaptureInfo(name, "", 0, "")


def _check_name(value: _Named, name: object, item: KeyValue) -> _Named:
    """The value, if it belongs to its key. Raises `SyncStateDamaged`."""
    if value.id != name:
        raise SyncStateDamaged(f"etcd: {item.key} has the value of {value.id}")
    return value


def _task_id(item: KeyValue) -> TaskId:
    *_, changefeed, number = item.key.split("/")
    if not (number.isascii() and number.isdecimal() and f"{int(number[:9]):04}" == number):
        raise SyncStateDamaged(f"etcd: {item.key} is not the key of a task")
    return TaskId(changefeed, int(number))
