"""A topic as the single member of a consumer group reads it: all its partitions, and committed offsets with a record.

The group has one static member (KIP-345), so a process that starts takes over from a previous one at once, whether that was killed
or still runs; in the latter case its next commit fails.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from tikv_br.errors import KafkaError, KafkaRefused, KafkaUnreachable, SyncStateDamaged, TopicDamaged
from tikv_br.incremental.kafka.client import (
    CONNECT_SECONDS,
    PROBE_SECONDS,
    REQUEST_SECONDS,
    BrokerFailures,
    client_config,
    kafka,
    kafka_errors,
)
from tikv_br.incremental.kafka.messages import MAX_NUMBER, PartitionEnd, Received
from tikv_br.incremental.kafka.url import KafkaUrl
from tikv_br.retry import Patience, wait_until

if TYPE_CHECKING:
    import confluent_kafka

log = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
"""Interval of checks whether a writing member is still in the group."""
POLL_MESSAGES = 1000
POLL_BYTES = 1 << 20
"""Maximum number and size of messages of one poll; the last message may exceed it."""
QUEUE_KIB = 32 << 10
"""Memory for messages that are fetched ahead."""
_VERSION = 1
_MEMBER = "replay"


@dataclass(frozen=True, slots=True)
class Record:
    """Metadata of a committed offset."""

    applied_ts: int = 0
    """Everything up to this is in the sink; every event before the offset is at or below it."""
    sink: str = ""
    """`Sink.place`; ``""`` = unknown."""

    def dump(self) -> str:
        """The metadata of a committed offset."""
        return json.dumps({"v": _VERSION, "ts": self.applied_ts, "sink": self.sink}, separators=(",", ":"))

    @classmethod
    def load(cls, metadata: str | None, place: str) -> Record:
        """The record; an empty one for offsets that another program has committed. Raises `SyncStateDamaged`."""
        try:
            found = json.loads(metadata or "{}")
            if found.get("v", _VERSION) != _VERSION:
                raise SyncStateDamaged(
                    f"the offset of {place} was committed by another version of tikv-br (record version {found['v']})",
                    hint="Use that version, or another --group.",
                )
            ts = found.get("ts", 0)
            return cls(ts, str(found.get("sink", ""))) if type(ts) is int and 0 <= ts <= MAX_NUMBER else cls()
        except (AttributeError, TypeError, ValueError, RecursionError):
            return cls()


@dataclass(frozen=True, slots=True)
class Start:
    """Start of reading a partition."""

    offset: int
    end: int
    """The offset after the last message at that time."""
    record: Record = Record()


class TopicGroup:
    """Reads the partitions of a topic. Not thread-safe."""

    def __init__(self, url: KafkaUrl, group: str, patience: float, stop: threading.Event) -> None:
        """`patience`: seconds for which brokers may not answer; 10 at most once `stop` is set. Raises `UsageError`."""
        self._url, self._patience, self._stop = url, patience, stop
        self.name = group
        self._module = kafka()
        self.failures, self._checked_at = BrokerFailures(url, group, patience), 0.0
        self._pending: deque[Received | PartitionEnd] = deque()
        self._starts: dict[int, Start] = {}
        self._next: dict[int, int] = {}
        self._committed: tuple[dict[int, int], Record] = {}, Record()
        self._partitions: tuple[int, ...] = ()
        config = client_config(url) | {
            "group.id": group,
            "group.instance.id": _MEMBER,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",  # else changes that retention has removed would be skipped silently
            "enable.partition.eof": True,
            "max.poll.interval.ms": 24 * 3600 * 1000,  # a sink may be retried for long
            "queued.max.messages.kbytes": QUEUE_KIB,
            "error_cb": self.failures.record,
        }
        with kafka_errors(url, "read"):
            self._consumer: confluent_kafka.Consumer = self._module.Consumer(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._consumer.close()

    def find_topic(self) -> None:
        """Look up the partitions to read. Raises `KafkaError`, also for a topic that does not exist."""
        topic = self.failures.retry(self._describe, self._poll_once)
        count, wanted = len(topic.partitions), self._url.partition_num
        if wanted > count:
            raise KafkaRefused(
                f"topic {self._url.topic} has {count} partitions, but the address says partition-num={wanted}",
                hint="Pass the number that the topic is written with, or none for all.",
            )
        self._partitions = tuple(sorted(topic.partitions))[: wanted or count]

    def records(self) -> dict[int, Record]:
        """The records of committed offsets, which another member may still change. Raises `KafkaError`, `SyncStateDamaged`."""
        found = self._ask_committed(self._poll_once)
        return {each.partition: Record.load(each.metadata, self._place(each.partition)) for each in found}

    def join(self) -> dict[int, Start]:
        """Become the member of the group; returns where the partitions start, after what the previous member has committed.

        Raises `KafkaError`, and `TopicDamaged` if the messages at a committed offset no longer exist.
        """
        self._consumer.subscribe([self._url.topic], on_assign=self._on_assign, on_revoke=_ignore, on_lost=_ignore)
        wait_until(
            lambda: bool(self._starts),
            max(self._patience, 2 * CONNECT_SECONDS),
            lambda: KafkaUnreachable(f"consumer group {self.name} of topic {self._url.topic} does not become stable"),
            poll=0.2,
            check=self.failures.raise_denied,
            sleep=self._poll_once,
        )
        return self._starts

    def poll(self, seconds: float) -> list[Received | PartitionEnd]:
        """Read messages; wait at most `seconds` for the first one.

        Raises `KafkaError`, `SyncFenced`, and `TopicDamaged` if messages were removed that have not been read.
        """
        found: list[Received | PartitionEnd] = []
        size = 0
        while len(found) < POLL_MESSAGES and size < POLL_BYTES:
            if not self._pending:
                self._poll_once(0.0 if found else seconds)
            if not self._pending:
                break
            event = self._pending.popleft()
            found.append(event)
            if isinstance(event, Received):
                size += len(event.key or b"") + len(event.value or b"")
                self._next[event.partition] = event.offset + 1
            else:
                self._next[event.partition] = max(event.offset, self._next[event.partition])
        self.failures.raise_final()
        self.failures.probe(self._describe)
        return found

    def commit(self, offsets: Mapping[int, int], record: Record) -> None:
        """Commit offsets, with retries while brokers do not answer. Raises `KafkaError`, `SyncFenced`."""
        patience, began = Patience(self._patience, "--kafka-patience"), time.monotonic()
        while True:
            try:
                self._commit(offsets, record)
            except KafkaUnreachable as error:
                patience.fail(error, began)
                if self._stop.is_set() and patience.failing_seconds > REQUEST_SECONDS:
                    raise
                self.failures.warn("cannot commit offsets, retrying", error)
                self._poll_once(PROBE_SECONDS)  # rejoins the group if that is necessary
                self.failures.raise_final()
            else:
                self._committed = dict(offsets), record
                return

    def check(self) -> None:
        """Raise `SyncFenced` if another process has taken over."""
        self.failures.raise_final()
        if self._committed[0] and time.monotonic() - self._checked_at > CHECK_SECONDS:
            try:
                self._commit(*self._committed)
            except KafkaUnreachable as error:  # nobody else can take over, either
                log.debug("cannot check the membership: %s", error.message)

    def _commit(self, offsets: Mapping[int, int], record: Record) -> None:
        metadata, make = record.dump(), self._module.TopicPartition
        given = [make(self._url.topic, number, offset, metadata) for number, offset in offsets.items()]
        try:
            answers = self._consumer.commit(offsets=given, asynchronous=False)
        except self._module.KafkaException as error:
            raise self.failures.classify(error.args[0], "commit offsets of") from None
        for answer in answers or []:
            if answer.error is not None:
                raise self.failures.classify(answer.error, "commit offsets of")
        self._checked_at = time.monotonic()
        self.failures.end()

    def _describe(self) -> Any:  # noqa: ANN401 - the client exports no name for it
        topic = self._consumer.list_topics(self._url.topic, timeout=PROBE_SECONDS).topics[self._url.topic]
        if topic.error is not None:
            raise self._module.KafkaException(topic.error)
        return topic

    def _poll_once(self, seconds: float = 0.05) -> None:
        """Read at most one message, and serve callbacks."""
        message = self._consumer.poll(seconds)
        if message is None:
            return
        error = message.error()
        if error is None:
            self._pending.append(_received(message))
            self.failures.end()
        elif error.code() == self._module.KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's public constant
            self._pending.append(PartitionEnd(message.partition() or 0, message.offset() or 0))
            self.failures.end()
        elif error.name() in {"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"}:
            self.failures.final = self._lost(message.partition() or 0)
        else:
            self.failures.record_read(error)

    def _on_assign(self, consumer: Any, assigned: list[Any]) -> None:  # noqa: ANN401 - the client's types
        """Start at our positions or, without any, at the group's."""
        given = {each.partition for each in assigned}
        try:
            if not given >= set(self._partitions):
                raise KafkaRefused(
                    f"consumer group {self.name} has other members, which read partitions of topic {self._url.topic}",
                    hint="Pass a --group that no other program uses.",
                )
            if not self._starts:
                self._starts = self._find_starts()
                self._next = {number: start.offset for number, start in self._starts.items()}
            elif not self._url.partition_num and given - set(self._partitions):
                raise KafkaRefused(
                    f"topic {self._url.topic} has new partitions",
                    hint="Run the same command again to read them as well.",
                )
        except (KafkaError, TopicDamaged, SyncStateDamaged) as error:
            self.failures.final = error
            consumer.assign([])
            return
        # What is pending is not lost: it comes again.
        self._pending.clear()
        topic, make = self._url.topic, self._module.TopicPartition
        consumer.assign([make(topic, number, offset) for number, offset in self._next.items()])

    def _find_starts(self) -> dict[int, Start]:
        starts = {}
        for each in self._ask_committed(None):  # a callback must not poll
            number = each.partition
            place = self._module.TopicPartition(self._url.topic, number)
            ask = partial(self._consumer.get_watermark_offsets, place, timeout=REQUEST_SECONDS)
            low, high = self.failures.retry(ask, None)
            if each.offset < 0:
                if low > 0:
                    log.warning(
                        "%s starts at offset %d: changes before that were removed, so the target must have them already",
                        self._place(number),
                        low,
                    )
                starts[number] = Start(low, high)
            elif low <= each.offset <= high:
                starts[number] = Start(each.offset, high, Record.load(each.metadata, self._place(number)))
            else:
                raise self._lost(number, f"offset {each.offset} is next, but it has {low} to {high}")
        return starts

    def _lost(self, number: int, why: str = "") -> TopicDamaged:
        why = why or f"offset {self._next.get(number, 0)} is next, and no longer exists"
        return TopicDamaged(
            f"{self._place(number)} lacks changes that consumer group {self.name} has not read: {why}",
            hint="The topic's retention has removed them. Restore a newer backup into the target, and replay with another --group.",
        )

    def _ask_committed(self, poll: Callable[[], object] | None) -> list[confluent_kafka.TopicPartition]:
        wanted = [self._module.TopicPartition(self._url.topic, number) for number in self._partitions]
        return self.failures.retry(partial(self._consumer.committed, wanted, timeout=REQUEST_SECONDS), poll)

    def _place(self, number: int) -> str:
        return f"partition {number} of topic {self._url.topic}"


def _received(message: Any) -> Received:  # noqa: ANN401 - by the client's types anything may be missing
    headers = [(name, bytes(value or b"")) for name, value in message.headers() or []]
    return Received(message.partition(), message.offset(), message.key(), message.value(), headers)


def _ignore(*_arguments: object) -> None:
    return
