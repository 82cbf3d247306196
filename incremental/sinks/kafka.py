"""A sink that writes every version of every key to a Kafka topic, and resolved-ts to each of its partitions."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tikv_br.errors import ConversionUnsupported, KafkaError, KafkaUnreachable
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.incremental.kafka.client import DENIED, as_error, client_config, kafka
from tikv_br.incremental.kafka.json_protocol import JsonCodec
from tikv_br.incremental.kafka.messages import Change, Codec, KafkaMessage, KeyPrefix, Protocol, UnencodableChange
from tikv_br.incremental.kafka.open_protocol import OpenCodec
from tikv_br.incremental.kafka.topic import Topic, TopicAdmin
from tikv_br.incremental.kafka.url import KafkaUrl
from tikv_br.incremental.sinks.base import Sink, unfenced

if TYPE_CHECKING:
    import confluent_kafka
    import pyarrow as pa

log = logging.getLogger(__name__)

QUEUE_KBYTES = 64 << 10
"""Memory of the producer for messages that are not acknowledged yet."""
QUEUE_MESSAGES = 100_000
BATCH_BYTES = 1_000_000
"""Size of the batches that the producer sends; one message may be larger."""
STALL_SECONDS = 60.0
"""A producer that has got no answer for so long is replaced, in case it does not recover."""
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class _Delivery:
    """Messages sent to the brokers, with the brokers' answers."""

    messages: Sequence[tuple[int, KafkaMessage]]
    """Messages with their partitions."""
    sent: int = 0
    """Number of messages queued in the producer, from the first."""
    settled: int = 0
    """Number of messages acknowledged or failed."""
    error: confluent_kafka.KafkaError | None = None
    """First failure."""
    progress_at: float = field(default_factory=time.monotonic)
    """Time of the brokers' last answer, on the monotonic clock."""

    def report(self, error: confluent_kafka.KafkaError | None, _message: object) -> None:
        """The producer's callback for one message."""
        self.settled += 1
        self.progress_at = time.monotonic()
        if self.error is None:
            self.error = error


def _codec(url: KafkaUrl, topic: Topic | None, keyspace_id: int) -> Codec:
    limit = url.max_message_bytes if topic is None else topic.max_message_bytes
    if url.protocol is Protocol.JSON:
        return JsonCodec(url.encoding, limit, url.key_encoding)
    prefix = b"" if url.key_prefix is KeyPrefix.NONE else KeyCodec(ApiVersion.V2, keyspace_id).prefix
    return OpenCodec(limit, url.max_batch_size, prefix)


class KafkaSink(Sink):
    """Writes to one topic. `write` returns when all in-sync replicas have the batch.

    The producer is idempotent and keeps trying: a batch that is retried after `KafkaUnreachable` continues to wait for the same
    messages, which so stay in order and are not repeated. After a message has failed for good, the batch is sent again.
    """

    all_versions = True

    def __init__(
        self,
        url: KafkaUrl,
        cluster_id: str,
        topic: Topic | None = None,
        *,
        keyspace_id: int = 0,
        retry_seconds: float,
        fence: Callable[[], object],
        complete_ts: Callable[[int], int],
    ) -> None:
        """`topic` is None if it does not exist yet. `keyspace_id` is the source's. `retry_seconds` is how long one write waits.

        `fence` is called before messages are sent, and while they are under way. `complete_ts` is given the ts up to which this sink has everything, and returns the resolved-ts for the topic; 0 = none.
        """
        self._url = url
        self.place = f"topic {url.topic} of Kafka cluster {cluster_id}"
        self._retry_seconds = retry_seconds
        self._fence = fence
        self._complete_ts = complete_ts
        self._topic = topic
        self._keyspace_id = keyspace_id
        self._codec = _codec(url, topic, keyspace_id)
        self._producer: confluent_kafka.Producer | None = None
        self._pending: tuple[pa.RecordBatch, _Delivery] | None = None
        """The batch that the brokers have not acknowledged yet."""
        self._is_failing = False
        """True if the brokers did not accept the last batch."""
        self._last_error: confluent_kafka.KafkaError | None = None
        self._resolved_ts = 0
        self._resolved_at = float("-inf")

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`. Raises `KafkaError`, and `ConversionUnsupported` for a change that the protocol cannot express."""
        if not batch.num_rows:
            return
        if self._pending is None or self._pending[0] is not batch:
            self._discard()
            self._pending = (batch, _Delivery(self._encoded(batch)))
        try:
            self._deliver(self._pending[1], self._fence)
        except KafkaError:
            self._is_failing = True
            raise
        self._is_failing, self._pending, self._last_error = False, None, None

    def resolve(self, ts: int, *, flush: bool = False) -> int:
        """See `Sink.resolve`: everything written is durable. Announces a resolved-ts if it is due. Raises `KafkaError`."""
        is_due = flush or time.monotonic() >= self._resolved_at + self._url.resolved_interval
        if is_due and not self._is_failing:
            complete_ts = self._complete_ts(ts)
            if complete_ts > self._resolved_ts:
                self._announce(complete_ts, unfenced if flush else self._fence)
                self._resolved_ts = complete_ts
            self._resolved_at = time.monotonic()
        return ts

    def close(self) -> None:
        """See `Sink.close`. Messages that are not acknowledged are dropped: the next run writes them again."""
        self._discard()
        self._producer = None

    def _announce(self, ts: int, fence: Callable[[], object]) -> None:
        """Send a resolved-ts. Even a sync that must stop may send it: it is true in any case."""
        topic = self._ready()
        try:
            self._deliver(_Delivery([(number, self._codec.resolved(ts)) for number in range(topic.partitions)]), fence)
        except KafkaUnreachable:
            self._discard()
            raise

    def _ready(self) -> Topic:
        """The topic. Created at the first write, when it is certain that this process may write."""
        if self._topic is None:
            self._fence()
            self._topic = TopicAdmin(self._url, self._fence).find_or_create()
            self._codec = _codec(self._url, self._topic, self._keyspace_id)
        return self._topic

    def _connect(self, topic: Topic) -> confluent_kafka.Producer:
        config = client_config(self._url) | {
            "error_cb": self._on_error,
            "enable.idempotence": True,  # with it acks=all, and the order is kept over retries
            "acks": "all",
            "message.timeout.ms": 0,  # the sink decides how long to wait, without losing the order
            "message.max.bytes": topic.max_message_bytes + 1024,
            "batch.size": min(BATCH_BYTES, topic.max_message_bytes),
            "linger.ms": 5,
            "compression.type": self._url.compression,
            "queue.buffering.max.kbytes": QUEUE_KBYTES,
            "queue.buffering.max.messages": QUEUE_MESSAGES,
            "topic.metadata.propagation.max.ms": 10_000,  # after which a topic that was deleted is an error
        }
        self._last_error = None
        producer: confluent_kafka.Producer = kafka().Producer(config)
        return producer

    def _encoded(self, batch: pa.RecordBatch) -> list[tuple[int, KafkaMessage]]:
        """The batch as messages with their partitions. Encodes all of it before the first message is sent."""
        topic = self._ready()
        parts: dict[int, list[Change]] = defaultdict(list)
        columns = (batch[name].to_pylist() for name in ("key", "value", "ts", "expire_ts", "deleted"))
        for row in zip(*columns, strict=True):
            change = Change(*row)
            parts[self._codec.partition(change.key, topic.partitions)].append(change)
        try:
            return [(number, message) for number, changes in parts.items() for message in self._codec.encode(changes)]
        except UnencodableChange as error:
            raise ConversionUnsupported(
                f"cannot write to {self.place}: {error}",
                hint="Raise max-message-bytes in the address and max.message.bytes of the topic, or use encoding=base64, then resume.",
            ) from None

    def _deliver(self, delivery: _Delivery, fence: Callable[[], object]) -> None:
        """Send what is not sent yet, and wait until the brokers have acknowledged everything. Raises `KafkaError`.

        After `KafkaUnreachable` the messages remain with the producer, and the next call continues; after `STALL_SECONDS`
        without any answer a new producer sends all of them again.
        """
        topic = self._ready()
        if self._producer is None:
            self._producer = self._connect(topic)
        try:
            self._push(self._producer, delivery, fence)
        except kafka().KafkaException as error:  # the producer can do nothing more
            self._discard()
            raise as_error(error.args[0], self._url, "write to") from None
        except BaseException:
            self._discard()  # this process must not write any more
            raise
        if delivery.error is not None:
            last = self._last_error
            self._discard()
            raise as_error(last if last is not None and last.fatal() else delivery.error, self._url, "write to")
        if delivery.settled < len(delivery.messages):
            if time.monotonic() > delivery.progress_at + STALL_SECONDS:
                log.warning("no answer of Kafka for %g s: reconnecting; changes may be repeated", STALL_SECONDS)
                self._discard()
            raise self._unanswered()

    def _push(self, producer: confluent_kafka.Producer, delivery: _Delivery, fence: Callable[[], object]) -> None:
        """Send and wait until everything is acknowledged, something has failed, or time is up. Raises `KafkaException`."""
        until = time.monotonic() + self._retry_seconds
        while delivery.settled < len(delivery.messages) and time.monotonic() < until:
            fence()
            self._send(producer, delivery)
            producer.poll(_POLL_SECONDS)  # returns as soon as an answer comes
            if delivery.error is not None and delivery.settled == delivery.sent:
                return

    def _send(self, producer: confluent_kafka.Producer, delivery: _Delivery) -> None:
        """Give messages to the producer until it has all of them or its queue is full. Raises `KafkaException`."""
        with suppress(BufferError):
            for partition, message in delivery.messages[delivery.sent :]:
                producer.produce(
                    self._url.topic,
                    message.value,
                    message.key,
                    partition,
                    on_delivery=delivery.report,
                    headers=message.headers or None,  # type: ignore[arg-type] # a list of pairs is one of its types
                )
                delivery.sent += 1

    def _unanswered(self) -> KafkaError:
        last = self._last_error
        if last is not None and last.name() in DENIED:
            return as_error(last, self._url, "write to")
        why = f": {last.str()}" if last is not None else ""
        return KafkaUnreachable(f"{self.place} has not acknowledged a write for {self._retry_seconds:g} s{why}")

    def _discard(self) -> None:
        """Drop the messages that are not acknowledged, with the producer that would send them."""
        if self._producer is not None and (self._pending is not None or len(self._producer)):
            self._producer.purge()
            self._producer.poll(0)
            self._producer = None
        self._pending = None

    def _on_error(self, error: confluent_kafka.KafkaError) -> None:
        if self._last_error is None or not (self._last_error.fatal() or error.name() == "_ALL_BROKERS_DOWN"):
            self._last_error = error
