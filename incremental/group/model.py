"""The state of a group in etcd.

All keys start with ``/tikv-br/CLUSTER-ID/``::

    capture/ID             CaptureInfo       with the lease of that process
    owner/ID               its id            with its lease; the oldest key is the owner's
    changefeed/CF          ChangefeedInfo    written by the commands, and by the owner when it fails or is removed
    task/CF/N              Task              written by the owner, and by its capture to free it
    progress/CF/N          Progress          written by the task's capture, while the task is its own
    status/CF              ChangefeedStatus  written by the owner
    sync/NAME/…            of a plain sync (`tikv_br.incremental.checkpoint`), which is no member of the group

Every value is JSON with a checksum. Times are in milliseconds since the epoch unless they are timestamps of PD.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from tikv_br import records
from tikv_br.cluster.etcd_values import Compare, KeyValue, absent, created_at, unchanged
from tikv_br.errors import BackupDamaged, BackupUnsupported, SyncStateDamaged, SyncStateMismatch
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.json_types import Hex
from tikv_br.formats.keys.codec import MAX_KEYSPACE, KeyCodec
from tikv_br.formats.keys.ranges import KeyRange

ROOT: Final = "/tikv-br"
SPANS: Final = 2
"""Default number of tasks of a changefeed."""
MAX_POLL_SECONDS: Final = 1.0
"""Maximum seconds between two reads of the group's state by a capture."""
MAX_WRITE_MS: Final = 30_000
"""Maximum timeout of a capture's request to a sink, in milliseconds."""
MAX_LEASE_SECONDS: Final = 60
"""Maximum TTL of a capture's lease, in seconds. Tasks do not record it; if it is shorter than the maximum request timeout, it
equals the recorded request timeout."""

T = TypeVar("T")


class ChangefeedState(enum.StrEnum):
    """The desired state of a changefeed."""

    NORMAL = "normal"
    PAUSED = "paused"
    """Paused by a user; its safe point expires its gc_ttl after the last renewal."""
    FAILED = "failed"
    """Stopped by a permanent error; `resume` retries."""
    REMOVING = "removing"
    """The owner stops its tasks, then deletes it."""


Timestamp: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
"""A timestamp of PD."""
LaterTimestamp: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A timestamp that may not be known yet: 0."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
"""A number or size that programs can compute with."""
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
"""A number of things that are there at once."""
MAX_SPANS: Final = 9999
MAX_SECONDS: Final = 100 * 365 * 24 * 3600
Seconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Interval: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=31 * 24 * 3600 * 1000)]
"""Milliseconds to wait; more than what the clocks of systems take is refused."""


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """A process that runs tasks."""

    id: str
    address: str
    """Status address, ``host:port``; empty if it has none."""
    started_ms: records.Milliseconds
    version: str
    """Version of tikv-br."""
    write_timeout_ms: Interval = MAX_WRITE_MS
    """Milliseconds after the end of its lease in which its writes may still arrive at a sink."""


class ChangefeedInfo(Struct, frozen=True):
    """The definition of a changefeed: source range, sink and options."""

    id: str
    sink: str
    """Address of the sink, without secrets; its TLS files are flags of the captures."""
    keyspace_id: Annotated[int, msgspec.Meta(ge=0, le=MAX_KEYSPACE)]
    start_key: Hex
    """User keys; an empty end is no end."""
    end_key: Hex
    start_ts: Timestamp
    """Changes with a larger ts are replicated."""
    created_ms: records.Milliseconds
    state: ChangefeedState = ChangefeedState.NORMAL
    spans: Annotated[int, msgspec.Meta(ge=1, le=MAX_SPANS)] = SPANS
    """Number of sub-spans: more captures than that are idle."""
    gc_ttl: Seconds = 24 * 3600
    """TTL of the safe point, in seconds."""
    drop_ttls: bool = False
    """Let a sink without TTLs store rows with a TTL permanently."""
    concurrency: Positive = 4
    """Concurrent requests to the sink, per task."""
    sorter_bytes: Count = 256 << 20
    """Memory for changes that are not resolved yet, per task."""
    hold_back_ms: Interval = 3000
    patience_ms: records.Milliseconds = 600_000
    """Milliseconds for which the sink may fail continuously before the changefeed fails."""
    backoff_ms: Interval = 5000
    """Maximum wait between retries of a failing sink."""
    batch_rows: Positive = 512
    """Maximum number of rows per request to the sink."""
    rate_limit: records.Later[Count] = 0
    """Maximum bytes of keys and values per second to the sink, shared equally by the sub-spans; 0 = unlimited."""
    keyspace_name: records.Later[str] = ""
    """Name of the keyspace in PD when the changefeed was made; empty = it had none, or it was not recorded."""
    error: str = ""
    """Error that made the changefeed fail; empty = none."""
    place: str = ""
    """The identity of the sink (`tikv_br.incremental.sinks.base.Sink.place`); empty = not checked."""

    def check_keyspace(self, name: str) -> None:
        """Raise `SyncStateMismatch` if PD has given the keyspace's id to one of another name."""
        if self.keyspace_name and name != self.keyspace_name:
            raise SyncStateMismatch(
                f"changefeed {self.id} is of keyspace {self.keyspace_name} ({self.keyspace_id}), which PD calls {name or 'by no name'}",
                hint="Create another changefeed.",
            )

    def check_place(self, place: str) -> None:
        """Raise `SyncStateMismatch` if there is another sink at the address."""
        if self.place not in {"", place}:
            raise SyncStateMismatch(
                f"changefeed {self.id} goes to {self.place}, and its sink is {place}",
                hint="Correct the address by `tikv-br changefeed update --sink`; for another sink create another changefeed.",
            )

    @property
    def range(self) -> KeyRange:
        """Return the span in RPC keys."""
        return KeyCodec(ApiVersion.V2, self.keyspace_id).rpc_range(KeyRange(self.start_key, self.end_key))


@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """Id of a sub-span of a changefeed."""

    changefeed: str
    number: int

    def __str__(self) -> str:
        return f"{self.changefeed}/{self.number}"


@dataclass(frozen=True, slots=True)
class ChangefeedTask:
    """One sub-span, and the capture that follows it."""

    changefeed: str
    number: int
    start: Hex
    """First RPC key."""
    end: Hex
    capture: str = ""
    """Id of the capture that follows it; empty = none."""
    epoch: Count = 0
    """Epoch, incremented with each assignment: a capture writes only under the epoch that it was given."""
    stopping: bool = False
    """Asks the capture to save its checkpoint and to free the task (by `capture` empty)."""
    write_timeout_ms: Interval = 0
    """The capture's, known even if the capture is gone."""

    @property
    def id(self) -> TaskId:
        return TaskId(self.changefeed, self.number)


class Progress(Struct, frozen=True):
    """Progress of a task. All changes of its sub-span up to `checkpoint_ts` are at the sink."""

    changefeed: str
    number: int
    """Number of the task."""
    checkpoint_ts: Timestamp
    resolved_ts: LaterTimestamp
    epoch: Count
    """Epoch of the task when this was saved."""
    capture: str
    saved_ms: records.Milliseconds
    events: int = 0
    """Rows received since the capture started the task."""
    written: int = 0
    events_per_second: int = 0
    regions: int = 0
    """Number of subscribed regions."""
    sorter_bytes: int = 0
    error: str = ""
    """The last error; if the task has failed, the reason."""
    missed: records.Later[tuple[str, ...]] = ()
    """Missed changes, as in `tikv_br.archive.records.Checkpoint`."""

    @property
    def id(self) -> TaskId:
        return TaskId(self.changefeed, self.number)


@dataclass(frozen=True, slots=True)
class ChangefeedStatus:
    """The progress of a changefeed, computed by the owner."""

    id: str
    """Id of the changefeed."""
    checkpoint_ts: Timestamp
    """The lowest of all tasks."""
    resolved_ts: LaterTimestamp
    saved_ms: records.Milliseconds
    owner: str
    """Id of the owner that wrote it."""


KeyKind = Literal["capture", "owner", "changefeed", "task", "progress", "status", "sync"]


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys in etcd."""

    cluster_id: int

    @property
    def root(self) -> str:
        """Prefix of all keys."""
        return f"{ROOT}/{self.cluster_id}/"

    def of(self, kind: KeyKind, name: str | TaskId) -> str:
        """The key of a value, or with a name that ends with ``/`` a prefix of keys."""
        if isinstance(name, TaskId):
            name = f"{name.changefeed}/{name.number:04}"
        return f"{self.root}{kind}/{name}"


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of a group at one revision of etcd."""

    revision: int
    captures: Mapping[str, CaptureInfo]
    owner: str
    """Id of the owner's capture; empty if there is none."""
    changefeeds: Mapping[str, ChangefeedInfo]
    tasks: Mapping[TaskId, ChangefeedTask]
    progress: Mapping[TaskId, Progress]
    statuses: Mapping[str, ChangefeedStatus]
    items: Mapping[str, KeyValue]
    """All keys as they were read, for the conditions of later writes."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Changefeeds with an unreadable value, and the error. They are in no other field, and no capture works on them."""

    def unchanged(self, key: str) -> Compare:
        """Condition: the key is unchanged, or still missing."""
        item = self.items.get(key)
        return absent(key) if item is None else unchanged(item)

    def still_there(self, key: str) -> Compare:
        """Condition: the key was not deleted (and created again) since; its value may have changed. Raises `KeyError`."""
        return created_at(key, self.items[key].create_revision)

    def tasks_of(self, changefeed_id: str) -> tuple[ChangefeedTask, ...]:
        return tuple(self.tasks[each] for each in sorted(self.tasks) if each.changefeed == changefeed_id)

    def missed(self, changefeed_id: str) -> tuple[str, ...]:
        """Ingests whose rows the sink of a changefeed lacks."""
        found = (self.progress[each.id].missed for each in self.tasks_of(changefeed_id) if each.id in self.progress)
        return tuple(dict.fromkeys(text for texts in found for text in texts))

    def checkpoint_ts(self, changefeed_id: str) -> int:
        """The checkpoint of a changefeed: the lowest of its tasks. It never moves back."""
        tasks = self.tasks_of(changefeed_id)
        reached = [self.progress[task.id].checkpoint_ts for task in tasks if task.id in self.progress]
        status = self.statuses.get(changefeed_id)
        known = self.changefeeds[changefeed_id].start_ts if status is None else status.checkpoint_ts
        return max(known, min(reached)) if tasks and len(reached) == len(tasks) else known


def load(kind: type[T], item: KeyValue) -> T:
    """The inverse of `records.dump`. Raises `SyncStateDamaged`, also for a value of a newer tikv-br."""
    try:
        return records.load(kind, item.value, item.key)
    except (BackupDamaged, BackupUnsupported) as error:
        raise SyncStateDamaged(f"etcd: {error.message}") from None
