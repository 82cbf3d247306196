"""``kafka://`` addresses: brokers, topic and parameters, with the names and defaults of TiKV-CDC."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from tikv_br.cluster.config import split_address
from tikv_br.errors import UsageError
from tikv_br.incremental.kafka.messages import MAX_BATCH_SIZE, MAX_MESSAGE_BYTES, KeyPrefix, MessageEncoding, Protocol
from tikv_br.storage.crypter import SecretText

FORM = "kafka://HOST:PORT[,HOST:PORT]/TOPIC?protocol=open-protocol"
USER_VARIABLE = "TIKV_BR_KAFKA_USER"
PASSWORD_VARIABLE = "TIKV_BR_KAFKA_PASSWORD"  # noqa: S105 - the name of a variable
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN")
DEFAULT_PORT = 9092
_LARGEST_MESSAGE = 1_000_000_000  # librdkafka's
_MOST_PARTITIONS = 1_000_000
_MOST_REPLICAS = 32_767
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]+")
_BOOLEANS = {"1": True, "t": True, "true": True, "0": False, "f": False, "false": False}
"""Lower-case texts that Go's `strconv.ParseBool` accepts."""
T = TypeVar("T")
Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaUrl:
    """A topic and how to write or read it. `str` gives an address without the password."""

    brokers: tuple[str, ...]
    topic: str
    protocol: Protocol = Protocol.OPEN
    encoding: MessageEncoding = MessageEncoding.BASE64
    """Encoding of the protocol json."""
    key_prefix: KeyPrefix = KeyPrefix.AUTO
    """Key prefix of open-protocol."""
    partition_num: int = 0
    """Number of partitions that get messages; 0 = all of the topic, or 3 if the topic is created."""
    replication_factor: int = 1
    """Replicas of a topic that is created."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_batch_size: int = MAX_BATCH_SIZE
    """Maximum number of changes per message of open-protocol."""
    compression: str = "none"
    kafka_client_id: str = ""
    auto_create_topic: bool = True
    resolved_interval: float = 1.0
    """Minimum seconds between two resolved-ts messages of a partition."""
    tls: bool = False
    """Use TLS; without `ca`, the brokers' certificates must be signed by the system's authorities."""
    ca: str = ""
    cert: str = ""
    key: str = field(default="", repr=False)
    sasl_user: str = ""
    sasl_password: SecretText = field(default_factory=SecretText)
    sasl_mechanism: str = ""
    password_in_address: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        defaults = KafkaUrl(brokers=self.brokers, topic=self.topic)
        given = [
            f"{each.name.replace('_', '-')}={quote(_text(getattr(self, each.name)), safe='/:')}"
            for each in fields(self)
            if each.name not in {"brokers", "topic", "sasl_password", "password_in_address", "protocol"}
            and getattr(self, each.name) != getattr(defaults, each.name)
        ]
        return f"kafka://{','.join(self.brokers)}/{self.topic}?{'&'.join([f'protocol={self.protocol}', *given])}"


def _text(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}s"
    return str(value)


def parse(url: str, environ: Mapping[str, str] = os.environ) -> KafkaUrl:
    """Parse a ``kafka://`` address. User and password may also come from `environ`. Raises `UsageError`."""
    parts = urlsplit(url, allow_fragments=False)
    if parts.scheme != "kafka":
        raise UsageError("this is not a kafka:// address", hint=f"Pass {FORM}.")
    if "@" in parts.path or ("@" in parts.query and not parts.path):  # the message must not show part of a password
        raise UsageError(
            "the login in the kafka:// address contains a character that ends it",
            hint=f"Write / as %2F, ? as %3F and @ as %40; better, set {PASSWORD_VARIABLE}.",
        )
    user_info, _, hosts = parts.netloc.rpartition("@")
    options = _options(parts.query)
    user, _, password = map(unquote, user_info.partition(":"))
    user = options.pop("sasl-user", "") or user
    password = options.pop("sasl-password", "") or password
    given = KafkaUrl(
        brokers=_brokers(hosts),
        topic=_topic(parts.path),
        protocol=_take(options, "protocol", _protocol, Protocol.OPEN),
        encoding=_take(options, "encoding", _one_of("encoding", MessageEncoding), MessageEncoding.BASE64),
        key_prefix=_take(options, "key-prefix", _one_of("key-prefix", KeyPrefix), KeyPrefix.AUTO),
        partition_num=_take(options, "partition-num", _number("partition-num", _MOST_PARTITIONS), 0),
        replication_factor=_take(options, "replication-factor", _number("replication-factor", _MOST_REPLICAS), 1),
        max_message_bytes=_take(
            options, "max-message-bytes", _number("max-message-bytes", _LARGEST_MESSAGE), MAX_MESSAGE_BYTES
        ),
        max_batch_size=_take(options, "max-batch-size", _number("max-batch-size", 1 << 31), MAX_BATCH_SIZE),
        compression=_take(options, "compression", _choice("compression", COMPRESSIONS, str.lower), "none"),
        kafka_client_id=_take(options, "kafka-client-id", _client_id, ""),
        auto_create_topic=_take(options, "auto-create-topic", _bool_parser("auto-create-topic"), True),  # noqa: FBT003 - the default
        resolved_interval=_take(options, "resolved-interval", _seconds, 1.0),
        tls=_take(options, "tls", _bool_parser("tls"), "ca" in options or "cert" in options),
        ca=options.pop("ca", ""),
        cert=options.pop("cert", ""),
        key=options.pop("key", ""),
        sasl_user=user or environ.get(USER_VARIABLE, ""),
        sasl_password=SecretText(password or environ.get(PASSWORD_VARIABLE, "")),
        sasl_mechanism=_take(options, "sasl-mechanism", _choice("sasl-mechanism", MECHANISMS, str.upper), ""),
        password_in_address=bool(password),
    )
    _take(options, "kafka-version", _version, "")  # librdkafka asks the brokers
    if options:
        raise UsageError(
            f"a kafka:// address has no parameter {', '.join(sorted(options))}",
            hint="docs/kafka.md lists the parameters.",
        )
    _check(given)
    return given


def _check(given: KafkaUrl) -> None:
    """Refuse parameters that contradict each other."""
    if given.encoding is not MessageEncoding.BASE64 and given.protocol is not Protocol.JSON:
        raise UsageError(f"encoding={given.encoding} requires protocol=json", hint="open-protocol always uses base64.")
    if given.key_prefix is not KeyPrefix.AUTO and given.protocol is not Protocol.OPEN:
        raise UsageError(f"key-prefix={given.key_prefix} requires protocol=open-protocol", hint="Leave it out.")
    if bool(given.cert) != bool(given.key):
        raise UsageError("cert and key must be passed together in a kafka:// address")
    if not given.tls and (given.ca or given.cert):
        raise UsageError("tls=false contradicts ca, cert and key in a kafka:// address")
    if bool(given.sasl_user) != bool(given.sasl_password):
        missing = "password" if given.sasl_user else "user"
        raise UsageError(
            f"the {missing} for Kafka is missing",
            hint=f"Pass sasl-user in the address, or set {USER_VARIABLE} and {PASSWORD_VARIABLE}.",
        )
    if given.sasl_user and not given.sasl_mechanism:
        raise UsageError("sasl-mechanism is missing", hint=f"Pass one of {', '.join(MECHANISMS)} in the address.")
    if given.sasl_mechanism and not given.sasl_user:
        raise UsageError(
            f"sasl-mechanism={given.sasl_mechanism} requires a login, which is missing",
            hint=f"Pass them in {USER_VARIABLE} and {PASSWORD_VARIABLE}.",
        )
    if given.sasl_mechanism == "PLAIN" and not given.tls:
        raise UsageError(
            "sasl-mechanism=PLAIN without TLS would send the password, which others could read",
            hint="Append tls=true or ca=FILE to the address, or use SCRAM.",
        )


def _options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        plain = name.replace("_", "-")
        if plain in options:
            raise UsageError(f"a kafka:// address has {plain} twice")
        options[plain] = value
    return {name: value for name, value in options.items() if value}  # as TiKV-CDC, which takes empty for absent


def _brokers(text: str) -> tuple[str, ...]:
    brokers = []
    for part in filter(None, text.split(",")):
        address = part if ":" in part.rpartition("]")[2] else f"{part}:{DEFAULT_PORT}"
        split_address(address)
        brokers.append(address)
    if not brokers:
        raise UsageError("a kafka:// address needs at least one broker", hint=f"Pass {FORM}.")
    return tuple(dict.fromkeys(brokers))


def _topic(path: str) -> str:
    topic = unquote(path.strip("/"))
    if not topic:
        raise UsageError("a kafka:// address needs a topic", hint=f"Pass {FORM}.")
    if not _TOPIC.fullmatch(topic) or topic in {".", ".."}:
        raise UsageError(
            f"{topic!r} is not a valid topic",
            hint="A topic has up to 249 letters, digits, dots, dashes and underscores.",
        )
    return topic


def _take(options: dict[str, str], name: str, parsed: Callable[[str], T], default: T) -> T:
    text = options.pop(name, None)
    return default if text is None else parsed(text)


def _protocol(text: str) -> Protocol:
    return Protocol.OPEN if text == "default" else _one_of("protocol", Protocol)(text)


def _one_of(name: str, kind: type[Choice]) -> Callable[[str], Choice]:
    def parsed(text: str) -> Choice:
        try:
            return kind(text)
        except ValueError:
            raise UsageError(f"{name}={text} is not supported", hint=f"Pass one of {', '.join(kind)}.") from None

    return parsed


def _choice(name: str, choices: tuple[str, ...], normal: Callable[[str], str]) -> Callable[[str], str]:
    def parsed(text: str) -> str:
        if normal(text) not in choices:
            raise UsageError(f"{name}={text} is not supported", hint=f"Pass one of {', '.join(choices)}.")
        return normal(text)

    return parsed


def _number(name: str, most: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise UsageError(f"{name}={text} is not valid", hint=f"Pass a number from 1 to {most}.")
        return int(text)

    return parsed


def _bool_parser(name: str) -> Callable[[str], bool]:
    def parsed(text: str) -> bool:
        if text.lower() not in _BOOLEANS:
            raise UsageError(f"{name}={text} is not valid", hint="Pass true or false.")
        return _BOOLEANS[text.lower()]

    return parsed


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text)
    if not found:
        raise UsageError(f"resolved-interval={text} is not valid", hint="Pass a number and one of ms, s, m.")
    return float(found[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[found[2]]


def _client_id(text: str) -> str:
    if not _CLIENT_ID.fullmatch(text):
        raise UsageError(
            f"kafka-client-id={text} is not valid", hint="Use letters, digits, dots, dashes and underscores."
        )
    return text


def _version(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+){1,3}", text):
        raise UsageError(f"kafka-version={text} is not valid", hint="Pass for example 2.4.0.")
    return text
