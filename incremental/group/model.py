"""What a group keeps in etcd, as values.

All of it lies below ``/tikv-br/CLUSTER-ID/``::

    capture/ID             CaptureInfo       with the lease of that process
    owner/ID               its id            with its lease; the one made first is the owner
    changefeed/CF          ChangefeedInfo    written by the commands, and by the owner when it fails or is removed
    task/CF/N              Task              written by the owner, and by its capture to let go of it
    progress/CF/N          Progress          written by the task's capture, while the task is its own
    status/CF              ChangefeedStatus  written by the owner
    sync/NAME/…            of a plain sync (`incremental.etcd_checkpoint`), which is no member of the group

Every value is sealed JSON (`sealed_json`). Times are in milliseconds since the epoch, where they are not timestamps of PD.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from tikv_br.backupset import sealed_json
from tikv_br.backupset.coverage import KeyRange
from tikv_br.cluster.etcd_values import Compare, KeyValue, absent, created_at, unchanged
from tikv_br.errors import BackupDamaged, BackupUnsupported, SyncStateDamaged, SyncStateMismatch

ROOT: Final = "/tikv-br"
SPANS: Final = 2
"""Into so many sub-spans a changefeed is split, unless told otherwise."""
MAX_SPANS: Final = 100
"""A transaction of etcd has at most 128 operations."""
LONGEST_LOOK: Final = 1.0
"""Seconds between two looks of a capture at what there is to do, at most."""
LONGEST_WRITE_MS: Final = 30_000
"""Milliseconds that a request of a capture to a sink may take, at most."""
LONGEST_LEASE: Final = 60
"""Seconds that the lease of a capture may have, at most. No task tells it, but where it is shorter than the above: then a request
may take as long."""

T = TypeVar("T")


class State(enum.StrEnum):
    """What shall become of a changefeed."""

    NORMAL = "normal"
    PAUSED = "paused"
    """By a user; its safe point stays for its gc_ttl after the last renewal."""
    FAILED = "failed"
    """By an error that another try does not cure; `resume` tries again."""
    REMOVING = "removing"
    """The owner stops its tasks, then removes all that is known of it."""


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """A process that takes on tasks."""

    id: str
    address: str
    """Of its status page, ``host:port``; empty where it has none."""
    started_ms: int
    version: str
    """Of tikv-br."""
    write_timeout_ms: int = LONGEST_WRITE_MS
    """So long after the end of its lease may what it has written still arrive at a sink."""


@dataclass(frozen=True, slots=True)
class ChangefeedInfo:
    """What is to be synced whither, and how."""

    id: str
    sink: str
    """Address of the sink, without secrets; its TLS files are flags of the captures."""
    keyspace_id: int
    start_key: bytes
    """User keys; an empty end is no end."""
    end_key: bytes
    start_ts: int
    """Everything with a larger ts is to be fed."""
    created_ms: int
    state: State = State.NORMAL
    spans: int = SPANS
    """Into how many sub-spans it is split: captures beyond that number have nothing to do."""
    gc_ttl: int = 24 * 3600
    """Seconds that GC waits when nobody renews."""
    drop_ttls: bool = False
    """Whether rows that expire may be kept for ever where the sink keeps no TTL."""
    concurrency: int = 4
    """Requests under way at once to the sink, of each task."""
    sorter_bytes: int = 256 << 20
    """Memory for changes that are not resolved yet, of each task."""
    hold_back_ms: int = 3000
    patience_ms: int = 600_000
    """How long the sink may fail in a row before the changefeed fails."""
    backoff_ms: int = 5000
    """The longest wait between two tries at the sink."""
    batch_rows: int = 512
    """Rows of one request to the sink, at most."""
    error: str = ""
    """Why it failed."""
    place: str = ""
    """What the sink is, whatever its address (`incremental.sinks.base.Sink.place`); empty: whatever answers there."""

    def check_place(self, place: str) -> None:
        """Raise `SyncStateMismatch` where what answers at the sink's address is another sink."""
        if self.place not in {"", place}:
            raise SyncStateMismatch(
                f"changefeed {self.id} goes to {self.place}, and its sink is {place}",
                hint="Correct the address by `tikv-br changefeed update --sink`; for another sink create another changefeed.",
            )

    @property
    def range(self) -> KeyRange:
        """Its span, in RPC keys."""
        return KeyRange(*KeyCodec(ApiVersion.V2, self.keyspace_id).rpc_range(self.start_key, self.end_key))


@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """Which sub-span of which changefeed."""

    changefeed: str
    number: int

    def __str__(self) -> str:
        return f"{self.changefeed}/{self.number}"


@dataclass(frozen=True, slots=True)
class Task:
    """One sub-span, and who follows it."""

    changefeed: str
    number: int
    start: bytes
    """RPC keys."""
    end: bytes
    capture: str = ""
    """Id of the capture that follows it; empty: nobody does."""
    epoch: int = 0
    """One more with each assignment: a capture writes only under the epoch that it was given."""
    stopping: bool = False
    """The capture shall save its checkpoint and let go of it (by `capture` empty)."""
    write_timeout_ms: int = 0
    """That of the capture, for those who miss it."""

    @property
    def id(self) -> TaskId:
        """Its name in the group."""
        return TaskId(self.changefeed, self.number)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a task has come. All changes of its sub-span up to `checkpoint_ts` are at the sink."""

    changefeed: str
    number: int
    """Of the task."""
    checkpoint_ts: int
    resolved_ts: int
    epoch: int
    """Of the task when this was saved."""
    capture: str
    saved_ms: int
    events: int = 0
    """Rows fed to that capture since it began with the task."""
    written: int = 0
    events_per_second: int = 0
    regions: int = 0
    """Subscribed."""
    sorter_bytes: int = 0
    error: str = ""
    """The last trouble; with a task that ended by it, why."""

    @property
    def id(self) -> TaskId:
        """Whose it is."""
        return TaskId(self.changefeed, self.number)


@dataclass(frozen=True, slots=True)
class ChangefeedStatus:
    """What the owner makes of the tasks' progress."""

    id: str
    """Of the changefeed."""
    checkpoint_ts: int
    """The least of all tasks."""
    resolved_ts: int
    saved_ms: int
    owner: str
    """Id of the capture that says so."""


_Named = TypeVar("_Named", CaptureInfo, ChangefeedInfo, ChangefeedStatus, Progress, Task)


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of all this in etcd."""

    cluster_id: int

    @property
    def root(self) -> str:
        """Of one cluster's group."""
        return f"{ROOT}/{self.cluster_id}/"

    @property
    def owners(self) -> str:
        """Those who are, or wait to be, the owner."""
        return f"{self.root}owner/"

    def capture(self, capture_id: str) -> str:
        """A `CaptureInfo`."""
        return f"{self.root}capture/{capture_id}"

    def owner(self, capture_id: str) -> str:
        """A candidate."""
        return f"{self.owners}{capture_id}"

    def sync(self, name: str) -> str:
        """What a sync without a group keeps begins with this."""
        return f"{self.root}sync/{name}/"

    def changefeed(self, changefeed_id: str) -> str:
        """A `ChangefeedInfo`."""
        return f"{self.root}changefeed/{changefeed_id}"

    def status(self, changefeed_id: str) -> str:
        """A `ChangefeedStatus`."""
        return f"{self.root}status/{changefeed_id}"

    def tasks(self, changefeed_id: str) -> str:
        """What all `task` of a changefeed begin with."""
        return f"{self.root}task/{changefeed_id}/"

    def task(self, task_id: TaskId) -> str:
        """A `Task`."""
        return f"{self.tasks(task_id.changefeed)}{task_id.number:04}"

    def progresses(self, changefeed_id: str) -> str:
        """What all `progress` of a changefeed begin with."""
        return f"{self.root}progress/{changefeed_id}/"

    def progress(self, task_id: TaskId) -> str:
        """A `Progress`."""
        return f"{self.progresses(task_id.changefeed)}{task_id.number:04}"


@dataclass(frozen=True, slots=True)
class GroupState:
    """All that a group knows, as it stood at one revision of etcd."""

    revision: int
    captures: Mapping[str, CaptureInfo]
    owner: str
    """Id of the owner's capture; empty where there is none."""
    changefeeds: Mapping[str, ChangefeedInfo]
    tasks: Mapping[TaskId, Task]
    progress: Mapping[TaskId, Progress]
    statuses: Mapping[str, ChangefeedStatus]
    items: Mapping[str, KeyValue]
    """Every key as it was read, for the conditions of what is written on the strength of it."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Changefeeds of which a value does not read, and which: nothing else is told of them, and nobody works on them."""

    def unchanged(self, key: str) -> Compare:
        """The key stands as it was read, or is still not there."""
        item = self.items.get(key)
        return absent(key) if item is None else unchanged(item)

    def still_there(self, key: str) -> Compare:
        """The key has not gone (and come again) since; its value may be another. Raises `KeyError` without it."""
        return created_at(key, self.items[key].create_revision)

    def tasks_of(self, changefeed_id: str) -> tuple[Task, ...]:
        """The tasks of a changefeed, by number."""
        return tuple(self.tasks[each] for each in sorted(self.tasks) if each.changefeed == changefeed_id)

    def checkpoint_ts(self, changefeed_id: str) -> int:
        """Up to where all of a changefeed is at the sink: the least of its tasks. It never moves back."""
        tasks = self.tasks_of(changefeed_id)
        reached = [self.progress[task.id].checkpoint_ts for task in tasks if task.id in self.progress]
        told = self.statuses.get(changefeed_id)
        known = self.changefeeds[changefeed_id].start_ts if told is None else told.checkpoint_ts
        return max(known, min(reached)) if tasks and len(reached) == len(tasks) else known


def dump(value: object) -> bytes:
    """A value as it is kept."""
    return sealed_json.dump(value)


def load(kind: type[T], item: KeyValue) -> T:
    """The inverse of `dump`. Raises `SyncStateDamaged`, also for what a newer tikv-br wrote."""
    try:
        return sealed_json.load(kind, item.value, item.key)
    except (BackupDamaged, BackupUnsupported) as error:
        raise SyncStateDamaged(f"etcd: {error.message}") from None


def load_progress(item: KeyValue) -> Progress:
    """The progress of the task that its key names. Raises `SyncStateDamaged`."""
    return _own(load(Progress, item), _task_id(item), item)


def parse(keys: Keys, items: tuple[KeyValue, ...], revision: int) -> GroupState:
    """The state that these keys tell; keys that it does not know are left alone.

    A value that does not read costs the group its changefeed and no other; a capture is there for as long as its key is.
    """
    captures: dict[str, CaptureInfo] = {}
    candidates: dict[str, int] = {}
    changefeeds: dict[str, ChangefeedInfo] = {}
    tasks: dict[TaskId, Task] = {}
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
                    changefeeds[name] = _own(load(ChangefeedInfo, item), name, item)
                case "status":
                    statuses[name] = _own(load(ChangefeedStatus, item), name, item)
                case "task":
                    tasks[_task_id(item)] = _own(load(Task, item), _task_id(item), item)
                case "progress":
                    progress[_task_id(item)] = load_progress(item)
        except SyncStateDamaged as error:
            damaged.setdefault(name.partition("/")[0], error.message)
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


def _capture(name: str, item: KeyValue) -> CaptureInfo:
    """A capture; of one whose value does not read, what its key says. It is there, and may be writing."""
    try:
        return _own(load(CaptureInfo, item), name, item)
    except SyncStateDamaged:
        return CaptureInfo(name, "", 0, "")


def _own(value: _Named, name: object, item: KeyValue) -> _Named:
    """The value, if it is that of its key. Raises `SyncStateDamaged`."""
    if value.id != name:
        raise SyncStateDamaged(f"etcd: {item.key} holds what belongs to {value.id}")
    return value


def _task_id(item: KeyValue) -> TaskId:
    *_, changefeed, number = item.key.split("/")
    if not number.isdigit():
        raise SyncStateDamaged(f"etcd: {item.key} names no task")
    return TaskId(changefeed, int(number))
