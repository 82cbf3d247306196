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
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from tikv_br.errors import (
    KafkaDenied,
    KafkaError,
    KafkaRefused,
    KafkaUnreachable,
    SyncFenced,
    SyncStateDamaged,
    TopicDamaged,
)
from tikv_br.incremental.kafka.client import REQUEST_SECONDS, as_error, client_config, kafka, kafka_errors
from tikv_br.incremental.kafka.url import KafkaUrl
from tikv_br.patience import Patience, wait_until

if TYPE_CHECKING:
    import confluent_kafka

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
"""Seconds for which brokers may not answer at the start, unless the patience is shorter."""
PROBE_SECONDS = 1.0
"""Interval of requests to silent brokers, and timeout of each."""
WARN_SECONDS = 10.0
CHECK_SECONDS = 2.0
"""Interval of checks whether a writing member is still in the group."""
POLL_MESSAGES = 1000
POLL_BYTES = 1 << 20
"""Maximum number and size of messages of one poll; the last message may exceed it."""
QUEUE_KIB = 32 << 10
"""Memory for messages that are fetched ahead."""
_VERSION = 1
_MEMBER = "replay"
_FENCED = "FENCED_INSTANCE_ID"
_TRANSIENT = (
    "ILLEGAL_GENERATION",
    "REBALANCE_IN_PROGRESS",
    "UNKNOWN_MEMBER_ID",
    "_STATE",
    "_WAIT_COORD",
    "_WAIT_CACHE",
)
"""Errors of a group that is without a coordinator, or is rejoined."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a partition."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PartitionEnd:
    """There is no message at or after this offset yet."""

    partition: int
    offset: int


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
            return cls(int(found.get("ts", 0)), str(found.get("sink", "")))
        except (AttributeError, TypeError, ValueError):
            return cls()


@dataclass(frozen=True, slots=True)
class Start:
    """Start of reading a partition."""

    offset: int
    end: int
    """The offset after the last message at that time."""
    record: Record = Record()


class TopicGroup:
    """Reads the partitions of a topic. Not thread-safe, except for `failing_seconds` and `last_error`."""

    def __init__(self, url: KafkaUrl, group: str, patience: float, stop: threading.Event) -> None:
        """`patience`: seconds for which brokers may not answer; 10 at most once `stop` is set. Raises `UsageError`."""
        self._url, self._patience, self._stop = url, patience, stop
        self.name = group
        self._module = kafka()
        self._denied: KafkaError | None = None
        self._failure: Exception | None = None
        self._failures = Patience(patience, "--kafka-patience")
        self._last_error: KafkaError | None = None
        self._probed_at = self._checked_at = self._warned_at = 0.0
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
            "error_cb": self._on_error,
        }
        with kafka_errors(url, "read"):
            self._consumer: confluent_kafka.Consumer = self._module.Consumer(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._consumer.close()

    @property
    def failing_seconds(self) -> float:
        """Return the seconds since brokers stopped answering; 0 while they answer."""
        return self._failures.failing_seconds

    @property
    def last_error(self) -> str:
        """Return the last error of silent brokers; empty if none."""
        return "" if self._last_error is None else self._last_error.message

    def find_topic(self) -> tuple[int, ...]:
        """The partitions to read. Raises `KafkaError`, also for a topic that does not exist."""
        topic = self._retry_at_start(self._describe)
        count, wanted = len(topic.partitions), self._url.partition_num
        if wanted > count:
            raise KafkaRefused(
                f"topic {self._url.topic} has {count} partitions, but the address says partition-num={wanted}",
                hint="Pass the number that the topic is written with, or none for all.",
            )
        self._partitions = tuple(sorted(topic.partitions))[: wanted or count]
        return self._partitions

    def records(self) -> dict[int, Record]:
        """The records of committed offsets, which another member may still change. Raises `KafkaError`, `SyncStateDamaged`."""
        found = self._ask_committed(may_poll=True)
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
            check=self._raise_refusals,
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
        self._raise_failures()
        self._probe()
        return found

    def commit(self, offsets: Mapping[int, int], record: Record) -> None:
        """Commit offsets, with retries while brokers do not answer. Raises `KafkaError`, `SyncFenced`."""
        failures, began = Patience(self._patience, "--kafka-patience"), time.monotonic()
        while True:
            try:
                self._commit(offsets, record)
            except KafkaUnreachable as error:
                failures.fail(error, began)
                if self._stop.is_set() and failures.failing_seconds > REQUEST_SECONDS:
                    raise
                self._warn("cannot commit offsets, retrying", error)
                self._poll_once(PROBE_SECONDS)  # rejoins the group if that is necessary
                self._raise_failures()
            else:
                self._committed = dict(offsets), record
                return

    def check(self) -> None:
        """Raise `SyncFenced` if another process has taken over."""
        self._raise_failures()
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
            raise self._commit_error(error.args[0]) from None
        for answer in answers or []:
            if answer.error is not None:
                raise self._commit_error(answer.error)
        self._checked_at = time.monotonic()
        self._recovered()

    def _commit_error(self, error: confluent_kafka.KafkaError) -> Exception:
        if error.name() in {_FENCED, "_FATAL"} or error.fatal():
            return self._fenced(error)
        return self._error(error, "commit offsets of")

    def _fenced(self, error: confluent_kafka.KafkaError) -> Exception:
        """Convert a fatal error: consumers have no other than fencing, unless the text names another."""
        if error.name() not in {_FENCED, "_FATAL"} and _FENCED not in error.str():
            return self._error(error)
        return SyncFenced(
            f"another process has taken over consumer group {self.name} of topic {self._url.topic}",
            hint="Nothing to do: the other process continues. Run one process per --group.",
        )

    def _error(self, error: confluent_kafka.KafkaError, action: str = "read") -> KafkaError:
        found = as_error(error, self._url, action)
        if error.name() in _TRANSIENT:
            return KafkaUnreachable(found.message)
        if error.name().endswith("AUTHORIZATION_FAILED"):
            user = f"User:{self._url.sasl_user}" if self._url.sasl_user else "this client"
            needs = f"Read and Describe on the topic, and Read on the consumer group {self.name}"
            found = type(found)(found.message, hint=f"Let an ACL allow {user} what a replay needs: {needs}.")
        return found

    def _describe(self) -> Any:  # noqa: ANN401 - the client exports no name for it
        """The metadata of the topic."""
        topic = self._consumer.list_topics(self._url.topic, timeout=PROBE_SECONDS).topics[self._url.topic]
        if topic.error is not None:
            raise self._module.KafkaException(topic.error)
        return topic

    def _retry_at_start(self, request: Callable[[], Any], *, may_poll: bool = True) -> Any:  # noqa: ANN401 - what the client returns
        """Call the client until it answers; in callbacks, without polling. Raises `KafkaError`."""
        limited = "--kafka-patience" if self._patience < CONNECT_SECONDS else f"{CONNECT_SECONDS:.0f} s"
        failures, began = Patience(min(self._patience, CONNECT_SECONDS), limited), time.monotonic()
        while True:
            self._denied = None
            try:
                return request()
            except self._module.KafkaException as error:
                found = self._error(error.args[0])
            if may_poll:
                self._poll_once(0.05)  # calls back with the reason, if the brokers refuse connections
                self._raise_refusals()
            if not isinstance(found, KafkaUnreachable):
                raise found
            failures.fail(self._last_error or found, began)
            time.sleep(0.05)

    def _poll_once(self, seconds: float) -> None:
        """Read at most one message, and serve callbacks."""
        message = self._consumer.poll(seconds)
        if message is None:
            return
        error = message.error()
        if error is None:
            self._pending.append(_received(message))
            self._recovered()
        elif error.code() == self._module.KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's public constant
            self._pending.append(PartitionEnd(message.partition() or 0, message.offset() or 0))
            self._recovered()
        elif error.name() in {"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"}:
            self._failure = self._lost(message.partition() or 0)
        elif error.fatal() or error.name() in {_FENCED, "_FATAL"}:
            self._failure = self._fenced(error)
        else:
            found = self._error(error)
            if isinstance(found, KafkaUnreachable):
                self._record_failure(found)
            else:  # the client would try again forever
                self._failure = found

    def _on_error(self, error: confluent_kafka.KafkaError) -> None:
        """Called by `poll` for errors of connections, and for fatal ones."""
        if error.fatal() or error.name() == "_FATAL":
            self._failure = self._fenced(error)
        else:
            self._record_failure(self._error(error))

    def _record_failure(self, error: KafkaError) -> None:
        """Record an error that a retry may resolve."""
        self._last_error = error
        if isinstance(error, KafkaDenied):
            self._denied = error
        if not self._failures.is_failing:
            self._failures.begin()
            self._probed_at, self._warned_at = time.monotonic(), 0.0

    def _recovered(self) -> None:
        self._denied = self._last_error = None
        self._failures.end()

    def _probe(self) -> None:
        """Ask the brokers if they seem not to answer. Raises the last error after the patience."""
        if not self._failures.is_failing or time.monotonic() - self._probed_at < PROBE_SECONDS:
            return
        try:
            self._describe()
        except self._module.KafkaException as error:
            found = self._error(error.args[0])
        else:
            if self._failures.is_failing:
                log.info("Kafka answers again, after %.0f s", self.failing_seconds)
            self._recovered()
            return
        finally:
            self._probed_at = time.monotonic()
        if not isinstance(found, KafkaUnreachable | KafkaDenied):
            raise found
        error_now = self._denied or self._last_error or found
        self._failures.fail(error_now)
        self._warn("Kafka does not answer, waiting", error_now)

    def _warn(self, what: str, error: KafkaError) -> None:
        if time.monotonic() - self._warned_at > WARN_SECONDS:
            self._warned_at = time.monotonic()
            log.warning("%s: %s", what, error.message)

    def _raise_failures(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _raise_refusals(self) -> None:
        """Raise also if the brokers have refused a connection, which is retried later on only."""
        self._raise_failures()
        if self._denied is not None:
            raise self._denied

    def _on_assign(self, consumer: Any, assigned: list[Any]) -> None:  # noqa: ANN401 - the client's types
        """Start at our positions or, without any, at those of the group."""
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
            self._failure = error
            consumer.assign([])
            return
        # What is pending is not lost: it comes again.
        self._pending.clear()
        topic, make = self._url.topic, self._module.TopicPartition
        consumer.assign([make(topic, number, offset) for number, offset in self._next.items()])

    def _find_starts(self) -> dict[int, Start]:
        starts = {}
        for each in self._ask_committed(may_poll=False):
            number = each.partition
            place = self._module.TopicPartition(self._url.topic, number)
            ask = partial(self._consumer.get_watermark_offsets, place, timeout=REQUEST_SECONDS)
            low, high = self._retry_at_start(ask, may_poll=False)
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

    def _ask_committed(self, *, may_poll: bool) -> list[confluent_kafka.TopicPartition]:
        wanted = [self._module.TopicPartition(self._url.topic, number) for number in self._partitions]
        ask = partial(self._consumer.committed, wanted, timeout=REQUEST_SECONDS)
        found: list[confluent_kafka.TopicPartition] = self._retry_at_start(ask, may_poll=may_poll)
        return found

    def _place(self, number: int) -> str:
        return f"partition {number} of topic {self._url.topic}"


def _received(message: Any) -> Received:  # noqa: ANN401 - by the client's types anything may be missing
    headers = [(name, bytes(value or b"")) for name, value in message.headers() or []]
    return Received(message.partition(), message.offset(), message.key(), message.value(), headers)


def _ignore(*_arguments: object) -> None:
    return
