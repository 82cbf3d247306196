"""The topic of an address: looks it up, checks it against the address, and creates it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tikv_br.errors import KafkaDenied, KafkaRefused, KafkaUnreachable, UsageError
from tikv_br.incremental.kafka.client import DENIED, REQUEST_SECONDS, as_error, client_config, kafka, kafka_errors
from tikv_br.incremental.kafka.messages import MAX_MESSAGE_BYTES
from tikv_br.incremental.kafka.url import KafkaUrl
from tikv_br.retry import wait_until

if TYPE_CHECKING:
    import confluent_kafka

log = logging.getLogger(__name__)

NEW_PARTITIONS = 3
"""Partitions of a topic that is created, unless the address has partition-num."""
BROKER_MESSAGE_BYTES = 1_048_588
"""Kafka's default of max.message.bytes."""
BATCH_OVERHEAD = 100
"""Bytes that Kafka adds for a batch of one record: its limit is for batches."""
_DENIED_GRACE = 2.0
"""Seconds until a failed login counts, if no other broker answers."""
_CREATION_SECONDS = 15.0
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = REQUEST_SECONDS - 0.5
"""Less than the client's own timeout, whose error does not say why brokers do not answer."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that exists and fits its address."""

    partitions: int
    """Number of partitions that get messages: the first ones."""
    max_message_bytes: int
    """Size that a message may have, by the address and by the topic."""


class TopicAdmin:
    """Requests about one topic. Methods raise `KafkaError`. Not thread-safe."""

    def __init__(self, url: KafkaUrl, stop: Callable[[], object] = lambda: None) -> None:
        """`stop` is called while waiting for an answer; what it raises ends the wait."""
        self._url = url
        self._stop = stop
        self._denied: confluent_kafka.KafkaError | None = None
        self._denied_at = 0.0
        self._last: confluent_kafka.KafkaError | None = None
        kafka()
        from confluent_kafka.admin import AdminClient

        with kafka_errors(url, "connect to"):
            self._client: Any = AdminClient(client_config(url) | {"error_cb": self._on_error})

    def cluster_id(self) -> str:
        found = self._wait(self._client.describe_cluster(request_timeout=REQUEST_SECONDS), "connect to")
        return str(found.cluster_id)

    def find(self) -> Topic | None:
        """The topic; None if it does not exist, and may be created.

        Raises `UsageError` for a partition-num above the topic's, `KafkaRefused` for one that may not be created.
        """
        count = self._partitions()
        url = self._url
        if count is None:
            if url.auto_create_topic:
                return None
            raise KafkaRefused(
                f"topic {url.topic} does not exist at {','.join(url.brokers)}, and auto-create-topic is false",
                hint="Create it, or correct the topic in the address.",
            )
        if url.partition_num > count:
            raise UsageError(
                f"partition-num={url.partition_num} is more than the {count} partitions of topic {url.topic}",
                hint="Lower partition-num, leave it out to use all, or add partitions to the topic.",
            )
        if url.partition_num and url.partition_num < count:
            log.warning(
                "topic %s has %d partitions; only the first %d get messages", url.topic, count, url.partition_num
            )
        return Topic(url.partition_num or count, self._max_message_bytes())

    def find_or_create(self) -> Topic:
        """The topic, which is created if it does not exist. Raises as `find`."""
        found = self.find()
        if found is not None:
            return found
        self._create()
        return wait_until(  # brokers learn of it a moment after the controller
            self.find,
            _CREATION_SECONDS,
            lambda: KafkaUnreachable(f"topic {self._url.topic} was created, but the brokers do not know it yet"),
            poll=_POLL_SECONDS,
        )

    def _partitions(self) -> int | None:
        """Return the number of partitions; None if the topic does not exist."""
        from confluent_kafka import KafkaError, KafkaException, TopicCollection

        name = self._url.topic
        asked = self._client.describe_topics(TopicCollection([name]), request_timeout=REQUEST_SECONDS)[name]
        try:
            return len(self._raw_wait(asked, "describe").partitions)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise as_error(error.args[0], self._url, "describe") from None

    def _max_message_bytes(self) -> int:
        """The smaller one of the limits of address and topic; of a topic whose settings are secret, the default is assumed."""
        from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

        asked = ConfigResource(ResourceType.TOPIC, self._url.topic)
        answers = self._client.describe_configs([asked], request_timeout=REQUEST_SECONDS)
        given = self._url.max_message_bytes
        try:
            limit = int(self._wait(answers[asked], "describe the settings of")["max.message.bytes"].value)
        except KafkaDenied:
            limit = BROKER_MESSAGE_BYTES if given == MAX_MESSAGE_BYTES else given + BATCH_OVERHEAD
            log.warning(
                "no permission to read the settings of topic %s: it is taken to allow messages of %d bytes",
                self._url.topic,
                limit,
            )
        if limit - BATCH_OVERHEAD < given:
            log.debug("topic %s limits messages to %d bytes", self._url.topic, limit)
        return min(given, limit - BATCH_OVERHEAD)

    def _create(self) -> None:
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        url = self._url
        count = url.partition_num or NEW_PARTITIONS
        new = NewTopic(url.topic, count, url.replication_factor)
        asked = self._client.create_topics([new], request_timeout=REQUEST_SECONDS)[url.topic]
        try:
            self._raw_wait(asked, "create")
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.TOPIC_ALREADY_EXISTS:  # another capture has created it
                return
            refused = as_error(error.args[0], url, "create")
            if code == KafkaError.INVALID_REPLICATION_FACTOR:
                refused.hint = "Set replication-factor in the address to at most the number of brokers."
            raise refused from None
        log.info("created topic %s: %d partitions, replication factor %d", url.topic, count, url.replication_factor)

    def _wait(self, answer: Future[T], action: str) -> T:
        with kafka_errors(self._url, action):
            return self._raw_wait(answer, action)

    def _raw_wait(self, answer: Future[T], action: str) -> T:
        """The answer. A client that cannot log in gets none, only calls of `_on_error`."""

        def check() -> None:
            self._stop()
            if self._denied is not None and time.monotonic() > self._denied_at + _DENIED_GRACE:
                raise as_error(self._denied, self._url, action)

        wait_until(
            answer.done, _ANSWER_SECONDS, self._no_answer, poll=_POLL_SECONDS, check=check, sleep=self._client.poll
        )
        return answer.result()

    def _no_answer(self) -> KafkaUnreachable:
        why = "" if self._last is None else f": {self._last.str()}"
        return KafkaUnreachable(f"Kafka at {','.join(self._url.brokers)} does not answer{why}")

    def _on_error(self, error: confluent_kafka.KafkaError) -> None:
        if error.name() in DENIED and self._denied is None:
            self._denied, self._denied_at = error, time.monotonic()
        if error.name() != "_ALL_BROKERS_DOWN" or self._last is None:
            self._last = error
