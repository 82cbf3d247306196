"""librdkafka: its configuration from an address, and its errors as ours. `confluent_kafka` is imported only here, when needed.

Failures of brokers while a topic is read: which are final, and how long the others have lasted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from tikv_br.environment import missing_package
from tikv_br.errors import KafkaDenied, KafkaError, KafkaRefused, KafkaUnreachable, SyncFenced, TikvBrError, UsageError
from tikv_br.incremental.kafka.url import PASSWORD_VARIABLE, USER_VARIABLE, KafkaUrl
from tikv_br.retry import Patience

if TYPE_CHECKING:
    import confluent_kafka


log = logging.getLogger(__name__)

Config = dict[str, Any]
REQUEST_SECONDS = 10.0
"""Timeout of one request for metadata or configuration, in seconds."""
DENIED = (
    "_AUTHENTICATION",
    "_SSL",
    "SASL_AUTHENTICATION_FAILED",
    "UNSUPPORTED_SASL_MECHANISM",
    "ILLEGAL_SASL_STATE",
    "TOPIC_AUTHORIZATION_FAILED",
    "CLUSTER_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
)
_UNREACHABLE = (
    "_TRANSPORT",
    "_ALL_BROKERS_DOWN",
    "_TIMED_OUT",
    "_TIMED_OUT_QUEUE",
    "_MSG_TIMED_OUT",
    "_RESOLVE",
    "_RETRY",
    "_FAIL",
    "_DESTROY",
    "_FATAL",
    "_PURGE_QUEUE",
    "_PURGE_INFLIGHT",
    "BROKER_NOT_AVAILABLE",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "COORDINATOR_NOT_AVAILABLE",
    "INVALID_PRODUCER_EPOCH",
    "INVALID_PRODUCER_ID_MAPPING",
    "KAFKA_STORAGE_ERROR",
    "LEADER_NOT_AVAILABLE",
    "NETWORK_EXCEPTION",
    "NOT_CONTROLLER",
    "NOT_COORDINATOR",
    "NOT_ENOUGH_REPLICAS",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    "NOT_LEADER_FOR_PARTITION",
    "OUT_OF_ORDER_SEQUENCE_NUMBER",
    "REPLICA_NOT_AVAILABLE",
    "REQUEST_TIMED_OUT",
    "THROTTLING_QUOTA_EXCEEDED",
    "UNKNOWN_PRODUCER_ID",
)
_MISSING = ("_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID")
_TOO_LARGE = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")


def kafka() -> ModuleType:
    """The module `confluent_kafka`. Raises `MachineUnfit` if it is not installed."""
    try:
        import confluent_kafka
    except ModuleNotFoundError:
        raise missing_package("confluent_kafka", "Kafka requires") from None
    return confluent_kafka


def client_config(url: KafkaUrl) -> Config:
    """The part of librdkafka's configuration that every client of this address needs.

    Raises `UsageError` for files that cannot be read.
    """
    config: Config = {
        "bootstrap.servers": ",".join(url.brokers),
        "client.id": url.kafka_client_id or "tikv-br",
        "broker.address.ttl": 5000,
        "reconnect.backoff.max.ms": 2000,
        "socket.keepalive.enable": True,
        "logger": _Log(),
    }
    if url.tls:
        for name, path in (("ca", url.ca), ("cert", url.cert), ("key", url.key)):
            _check_readable(name, path)
        paths = {
            "ssl.ca.location": url.ca or "probe",
            "ssl.certificate.location": url.cert,
            "ssl.key.location": url.key,
        }
        config |= {name: path for name, path in paths.items() if path}
    if url.sasl_mechanism:
        config |= {
            "sasl.mechanism": url.sasl_mechanism,
            "sasl.username": url.sasl_user,
            "sasl.password": url.sasl_password.reveal(),
        }
    transport = "ssl" if url.tls else "plaintext"
    config["security.protocol"] = f"sasl_{transport}" if url.sasl_mechanism else transport
    return config


class _Log:
    """Takes librdkafka's log lines: what matters of them also comes as an error."""

    def log(self, _level: int, text: str, *values: object) -> None:
        log.debug(text, *values)


def _check_readable(name: str, path: str) -> None:
    try:
        if path:
            Path(path).read_bytes()
    except OSError as error:
        shown = "the file of key" if name == "key" else f"{name}={path}"
        raise UsageError(
            f"{shown} in the kafka:// address cannot be read: {error.strerror}",
            hint="Pass a PEM file that this user can read.",
        ) from None


def as_error(error: confluent_kafka.KafkaError, url: KafkaUrl, action: str) -> KafkaError:
    """Our error for one of librdkafka's. `action` is what failed, such as "write to"; the text names topic and brokers."""
    place = f"topic {url.topic} at {','.join(url.brokers)}"
    text, name = f"cannot {action} {place}: {error.str()} ({error.name()})", error.name()
    if name in DENIED:
        return KafkaDenied(text, hint=_denied_hint(url, name))
    if name in _MISSING:
        return KafkaRefused(
            text,
            hint="Create the topic, or correct it in the address. If it was deleted, so were the changes in it: start a new sync, from a backup.",
        )
    if name in _TOO_LARGE:
        return KafkaRefused(
            text,
            hint="Raise max.message.bytes of the topic and max-message-bytes in the address, then run the same command again.",
        )
    if name in _UNREACHABLE or error.retriable() or error.fatal():
        return KafkaUnreachable(text)
    return KafkaRefused(text)


def _denied_hint(url: KafkaUrl, name: str) -> str:
    if name == "_SSL":
        return "Check ca, cert and key in the address: the authority, the expiry dates and the host names."
    if name.endswith("AUTHORIZATION_FAILED"):
        user = f"User:{url.sasl_user}" if url.sasl_user else "this client"
        return f"Let an ACL allow {user} the operation: a sync needs Write and Describe on the topic, and Create for a new one (before Kafka 3.0 also IdempotentWrite on the cluster)."
    if not url.sasl_mechanism:
        return f"The brokers demand a login: pass sasl-mechanism in the address, and {USER_VARIABLE} and {PASSWORD_VARIABLE}."
    return f"Check sasl-user (or {USER_VARIABLE}), {PASSWORD_VARIABLE} and sasl-mechanism={url.sasl_mechanism}."


@contextmanager
def kafka_errors(url: KafkaUrl, action: str) -> Iterator[None]:
    """Turn errors of librdkafka into ours."""
    exceptions = kafka()
    try:
        yield
    except exceptions.KafkaException as error:
        raise as_error(error.args[0], url, action) from None


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
