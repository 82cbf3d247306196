"""librdkafka: its configuration from an address, and its errors as ours. `confluent_kafka` is imported only here, when needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tikv_br.environment import missing_package
from tikv_br.errors import KafkaDenied, KafkaError, KafkaRefused, KafkaUnreachable, UsageError
from tikv_br.incremental.kafka.url import PASSWORD_VARIABLE, USER_VARIABLE, KafkaUrl

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
    """Raise our errors for those of librdkafka."""
    exceptions = kafka()
    try:
        yield
    except exceptions.KafkaException as error:
        raise as_error(error.args[0], url, action) from None
