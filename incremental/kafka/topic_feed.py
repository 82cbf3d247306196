"""Turns the messages of a topic into rows and resolved-ts."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol as Interface

import numpy as np
import pyarrow as pa

from tikv_br.errors import TopicDamaged, TopicUnresolved, UsageError
from tikv_br.formats import columns
from tikv_br.incremental.feed.events import Event, Resolved, Rows
from tikv_br.incremental.kafka.group import Start
from tikv_br.incremental.kafka.messages import Change, Codec, DamagedMessage, KafkaMessage, PartitionEnd, Received
from tikv_br.incremental.kafka.messages import Event as TopicEvent
from tikv_br.incremental.kafka.open_protocol import KEYSPACE_HEADER, UserKeys

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Interval at which an idle replay checks for a stop."""
RESOLVED_SECONDS = 10.0
"""Seconds that the first change waits for a resolved-ts; then a topic without any is applied as it arrives."""
MAX_GROUPS = 4096
"""Groups of messages per partition for which the first offset is known."""


class Reader(Interface):
    """The part of `TopicGroup` that `TopicFeed` uses."""

    def poll(self, seconds: float) -> list[Received | PartitionEnd]:
        """See `TopicGroup.poll`."""


class Unapplied:
    """Messages of a partition that are not in the sink, as groups: the first offset and the highest ts of each. Bounded."""

    def __init__(self, limit: int = MAX_GROUPS) -> None:
        self._limit = limit
        self._groups: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, offset: int, ts: int) -> None:
        """A message with its highest ts; offsets ascend."""
        if self._groups and ts <= self._groups[-1][1]:
            return  # committed no earlier than the group before it
        self._groups.append((offset, ts))
        if len(self._groups) > self._limit:  # larger groups: a resumed replay reads more again
            groups = list(self._groups)
            self._groups = deque(
                (first, max(ts for _, ts in groups[at : at + 2])) for at, (first, _) in enumerate(groups) if at % 2 == 0
            )

    def first(self, applied_ts: int) -> int | None:
        """Forget the groups up to a ts; returns the offset of the first one that is left."""
        while self._groups and self._groups[0][1] <= applied_ts:
            self._groups.popleft()
        return self._groups[0][0] if self._groups else None


@dataclass(slots=True)
class _Partition:
    next_offset: int
    end: int
    resolved_ts: int
    unapplied: Unapplied = field(default_factory=Unapplied)


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Larger messages are refused, as TiKV-CDC's consumer does; None = no limit."""

    message_bytes: int | None = None
    """Size of a message with more than one event."""
    batch_size: int | None = None


class TopicFeed:
    """Turns the messages of a topic into rows and resolved-ts. Not thread-safe, except for the counts."""

    def __init__(
        self,
        reader: Reader,
        topic: str,
        codec: Codec,
        starts: Mapping[int, Start],
        *,
        limits: ReplayLimits | None = None,
        until_ts: int | None = None,
        once: bool = False,
        keys: UserKeys | None = None,
        keyspace_id: int | None = None,
        resolved_seconds: float = RESOLVED_SECONDS,
    ) -> None:
        """The feed ends once everything up to `until_ts` is resolved; with `once`, where the partitions end in `starts`.

        `keys` removes prefixes; None = there are none, and resolved-ts will come. `keyspace_id` is the only one allowed; None = any.
        """
        self._reader, self._topic, self._codec, self._limits = reader, topic, codec, limits or ReplayLimits()
        self._until_ts, self._once, self._keyspace_id = until_ts, once, keyspace_id
        self._resolved_seconds = resolved_seconds
        self._keys = keys
        self._sends_resolved = keys is None
        """True once the topic's writer is known to send resolved-ts, even if none has arrived."""
        self._partitions = {
            number: _Partition(start.offset, start.end, start.record.applied_ts) for number, start in starts.items()
        }
        self.start_ts = self.resolved_ts = min(each.resolved_ts for each in self._partitions.values())
        """Timestamp up to which every partition is complete."""
        self.messages = 0
        """Messages read so far."""
        self.changes = 0
        """Changes read so far, without repeats."""
        self.repeats = 0
        """Events that were ignored, because they were at or below a resolved-ts that came before them."""
        self.as_it_arrives = False
        """True if changes are applied in the order of their partitions; their ts are then made ascending."""
        self._changed_at = 0.0
        """Time at which the first change was read."""
        self._ended_at: float | None = None
        """Time at which all partitions had been read to their ends."""
        self._oldest_ts = self._newest_ts = 0
        """Oldest and newest ts of the changes read so far."""

    @property
    def has_applied_nothing(self) -> bool:
        """Return whether no change up to `until_ts` is covered by a resolved-ts."""
        is_complete = self._until_ts is not None and self.resolved_ts >= self._until_ts
        return bool(self.changes) and not self.as_it_arrives and not is_complete and self._oldest_ts > self.resolved_ts

    @property
    def unresolved(self) -> list[int]:
        """Partitions without any resolved-ts; nothing is applied while there is one, unless none has any."""
        return [number for number, each in self._partitions.items() if not each.resolved_ts]

    def offsets(self, applied_ts: int) -> dict[int, int]:
        """Return the first offset of each partition that is not in the sink."""
        found = {}
        for number, each in self._partitions.items():
            first = each.unapplied.first(applied_ts)
            found[number] = each.next_offset if first is None else first
        return found

    def complete_up_to(self, applied_ts: int) -> int:
        """Return the ts up to which later events are repeats if the sink has everything up to `applied_ts`."""
        # In order of arrival, another partition may still get an older change.
        return 0 if self.as_it_arrives else applied_ts

    def events(self, stop: threading.Event) -> Iterator[Event]:
        """Rows and resolved-ts until `stop`. Raises `TopicDamaged`, and as the reader."""
        while not stop.is_set() and not self._is_done():
            rows: list[Change] = []
            damage = self._read(self._reader.poll(POLL_SECONDS), rows)
            if rows:
                yield Rows(_batch(rows))
            resolved_ts = self._complete_ts()
            if resolved_ts > self.resolved_ts:
                self.resolved_ts = resolved_ts
                yield Resolved(resolved_ts)
            if damage is not None:
                raise damage

    def _complete_ts(self) -> int:
        """Return the ts up to which changes may be applied. Raises `TopicUnresolved`."""
        if not self.as_it_arrives and self._has_no_resolved():
            if self._until_ts is not None:
                raise TopicUnresolved(
                    f"topic {self._topic} has no resolved-ts, so it is not known when a partition has everything up to --until",
                    hint="TiKV-CDC writes such topics. Replay them without --until.",
                )
            log.warning(
                "topic %s has no resolved-ts: changes are applied as they arrive, in the order of each partition",
                self._topic,
            )
            self.as_it_arrives = True
        if self.as_it_arrives:
            return self._newest_ts
        resolved_ts = min(each.resolved_ts for each in self._partitions.values())
        return resolved_ts if self._until_ts is None else min(resolved_ts, self._until_ts)

    def _has_no_resolved(self) -> bool:
        """Return whether changes lack any resolved-ts after some time, or with `once` at the end."""
        if not self.changes or self._sends_resolved or any(each.resolved_ts for each in self._partitions.values()):
            return False
        return time.monotonic() >= self._changed_at + self._resolved_seconds or (self._once and self._has_ended())

    def _has_ended(self) -> bool:
        return all(each.next_offset >= each.end for each in self._partitions.values())

    def _is_done(self) -> bool:
        if self._until_ts is not None and self.resolved_ts >= self._until_ts:
            return True
        if not self._once or not self._has_ended():
            return False
        # A resolved-ts follows its changes after a moment. Without it, nothing would be applied.
        self._ended_at = self._ended_at or time.monotonic()
        return not self.has_applied_nothing or time.monotonic() >= self._ended_at + self._resolved_seconds

    def _read(self, received: Iterable[Received | PartitionEnd], rows: list[Change]) -> TopicDamaged | None:
        """Add the changes of messages to `rows`, up to one that is damaged."""
        for each in received:
            partition = self._partitions[each.partition]
            if isinstance(each, PartitionEnd):
                partition.next_offset = max(partition.next_offset, each.offset)
                continue
            try:
                events = self._decode(each)
            except DamagedMessage as error:
                return TopicDamaged(
                    f"cannot replay the message at offset {each.offset} of partition {each.partition} of topic {self._topic}: {error}",
                )
            highest = 0
            for event in events:
                if not isinstance(event, Change):
                    partition.resolved_ts = max(partition.resolved_ts, event.ts)
                    if not self.as_it_arrives:
                        highest = max(highest, event.ts)
                elif event.ts <= partition.resolved_ts:
                    self.repeats += 1
                else:
                    rows.append(self._counted(event))
                    highest = max(highest, rows[-1].ts)
            if highest:
                partition.unapplied.add(each.offset, highest)
            partition.next_offset = each.offset + 1
            self.messages += 1
        return None

    def _counted(self, change: Change) -> Change:
        """The change, with a ts in the order of arrival if that is the order."""
        if not self.changes:
            self._changed_at, self._oldest_ts = time.monotonic(), change.ts
        self._oldest_ts = min(self._oldest_ts, change.ts)
        self.changes += 1
        if self.as_it_arrives:
            change = replace(change, ts=max(change.ts, self._newest_ts + 1))
        self._newest_ts = max(self._newest_ts, change.ts)
        return change

    def _decode(self, received: Received) -> list[TopicEvent]:
        if received.key is None:
            raise DamagedMessage("it has no key")
        events = self._codec.decode(KafkaMessage(received.key, received.value, received.headers))
        size, limits = len(received.key) + len(received.value or b""), self._limits
        if limits.message_bytes is not None and size > limits.message_bytes and len(events) > 1:
            raise DamagedMessage(f"it has {size:,} bytes, which is more than max-message-bytes={limits.message_bytes}")
        if limits.batch_size is not None and len(events) > limits.batch_size:
            raise DamagedMessage(f"it has {len(events)} events, which is more than max-batch-size={limits.batch_size}")
        return events if self._keys is None else self._with_user_keys(self._keys, events, received)

    def _with_user_keys(self, keys: UserKeys, events: list[TopicEvent], received: Received) -> list[TopicEvent]:
        """The events with user keys. Raises `DamagedMessage`, and `UsageError` for another keyspace than the expected one."""
        changes = iter(keys.of([event for event in events if isinstance(event, Change)], received.headers))
        self._sends_resolved |= any(name == KEYSPACE_HEADER for name, _ in received.headers)
        if None not in {keys.keyspace_id, self._keyspace_id} and keys.keyspace_id != self._keyspace_id:
            raise UsageError(
                f"topic {self._topic} has changes of keyspace {keys.keyspace_id}, but the sink is keyspace {self._keyspace_id}",
                hint="Pass --keyspace with the keyspace of the target to write them to.",
            )
        return [next(changes) if isinstance(event, Change) else event for event in events]


def _batch(rows: list[Change]) -> pa.RecordBatch:
    return columns.records(
        columns.from_list([row.key for row in rows]),
        columns.from_list([row.value for row in rows]),
        expire_ts=np.array([row.expire_ts for row in rows], np.uint64),
        ts=np.array([row.ts for row in rows], np.uint64),
        deleted=np.array([row.deleted for row in rows], np.bool_),
    )
