"""Failures of brokers while a topic is read: which are final, and how long the others have lasted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tikv_br.errors import KafkaDenied, KafkaError, KafkaUnreachable, SyncFenced, TikvBrError
from tikv_br.incremental.kafka.client import as_error, kafka
from tikv_br.incremental.kafka.url import KafkaUrl
from tikv_br.patience import Patience

if TYPE_CHECKING:
    import confluent_kafka

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
"""Seconds for which brokers may not answer at the start, unless the patience is shorter."""
PROBE_SECONDS = 1.0
"""Interval of requests to silent brokers, and timeout of each."""
WARN_SECONDS = 10.0
T = TypeVar("T")
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


class BrokerFailures:
    """The failures of one consumer. Not thread-safe, except for `failing_seconds` and `last_error`."""

    def __init__(self, url: KafkaUrl, group: str, patience: float) -> None:
        """`patience`: seconds for which brokers may not answer."""
        self._url, self._group, self._seconds = url, group, patience
        self._exception: type[Exception] = kafka().KafkaException
        self._patience = Patience(patience, "--kafka-patience")
        self._last: KafkaError | None = None
        self._denied: KafkaDenied | None = None
        self._probed_at = self._warned_at = 0.0
        self.final: TikvBrError | None = None
        """Error that no retry resolves."""

    @property
    def failing_seconds(self) -> float:
        """Return the seconds since brokers stopped answering; 0 while they answer."""
        return self._patience.failing_seconds

    @property
    def last_error(self) -> str:
        """Return the last error of silent brokers; empty if none."""
        return "" if self._last is None else self._last.message

    def classify(self, error: confluent_kafka.KafkaError, action: str = "read") -> KafkaError | SyncFenced:
        """Our error for one of the client. Fatal ones of consumers are fencing, unless the text names another."""
        if error.name() == _FENCED or (_is_fatal(error) and (error.name() == "_FATAL" or _FENCED in error.str())):
            return SyncFenced(
                f"another process has taken over consumer group {self._group} of topic {self._url.topic}",
                hint="Nothing to do: the other process continues. Run one process per --group.",
            )
        found = as_error(error, self._url, action)
        if error.name() in _TRANSIENT:
            return KafkaUnreachable(found.message)
        if error.name().endswith("AUTHORIZATION_FAILED"):
            user = f"User:{self._url.sasl_user}" if self._url.sasl_user else "this client"
            needs = f"Read and Describe on the topic, and Read on the consumer group {self._group}"
            found = type(found)(found.message, hint=f"Let an ACL allow {user} what a replay needs: {needs}.")
        return found

    def record(self, error: confluent_kafka.KafkaError) -> None:
        """Record an error of a connection, which the client opens again, or a fatal one."""
        found = self.classify(error)
        if _is_fatal(error) or isinstance(found, SyncFenced):
            self.final = found
            return
        self._last = found
        if isinstance(found, KafkaDenied):
            self._denied = found
        if not self._patience.is_failing:
            self._patience.begin()
            self._probed_at, self._warned_at = time.monotonic(), 0.0

    def record_read(self, error: confluent_kafka.KafkaError) -> None:
        """Record an error of a partition: those that a retry does not resolve, the client would retry forever."""
        found = self.classify(error)
        if isinstance(found, KafkaUnreachable):
            self.record(error)
        else:
            self.final = found

    def end(self) -> None:
        """Record an answer."""
        self._denied = self._last = None
        self._patience.end()

    def raise_final(self) -> None:
        if self.final is not None:
            raise self.final

    def raise_denied(self) -> None:
        """Raise also if the brokers have refused a connection, which is retried later on only."""
        self.raise_final()
        if self._denied is not None:
            raise self._denied

    def retry(self, request: Callable[[], T], poll: Callable[[], object] | None) -> T:
        """Make a request at the start until it succeeds. `poll` calls back with the reason if brokers refuse connections. Raises `KafkaError`."""
        limit = "--kafka-patience" if self._seconds < CONNECT_SECONDS else f"{CONNECT_SECONDS:.0f} s"
        patience, began = Patience(min(self._seconds, CONNECT_SECONDS), limit), time.monotonic()
        while True:
            self._denied = None
            try:
                return request()
            except self._exception as error:
                found = self.classify(error.args[0])
            if poll is not None:
                poll()
                self.raise_denied()
            if not isinstance(found, KafkaUnreachable):
                raise found
            patience.fail(self._last or found, began)
            time.sleep(0.05)

    def probe(self, request: Callable[[], object]) -> None:
        """Ask the brokers if they seem not to answer. Raises the last error after the patience."""
        if not self._patience.is_failing or time.monotonic() - self._probed_at < PROBE_SECONDS:
            return
        try:
            request()
        except self._exception as error:
            found = self.classify(error.args[0])
        else:
            if self._patience.is_failing:
                log.info("Kafka answers again, after %.0f s", self.failing_seconds)
            self.end()
            return
        finally:
            self._probed_at = time.monotonic()
        if not isinstance(found, KafkaUnreachable | KafkaDenied):
            raise found
        last = self._denied or self._last or found
        self._patience.fail(last)
        self.warn("Kafka does not answer, waiting", last)

    def warn(self, what: str, error: KafkaError) -> None:
        """Log a warning, at most every `WARN_SECONDS`."""
        if time.monotonic() - self._warned_at > WARN_SECONDS:
            self._warned_at = time.monotonic()
            log.warning("%s: %s", what, error.message)


def _is_fatal(error: confluent_kafka.KafkaError) -> bool:
    return error.fatal() or error.name() == "_FATAL"
