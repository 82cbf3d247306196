"""``kafka://`` addresses: brokers, topic and parameters, with the names and defaults of TiKV-CDC."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from tikv_br.cluster.config import split_address
from tikv_br.errors import UsageError
from tikv_br.formats.numbers import parse_decimal
from tikv_br.incremental.kafka.messages import (
    MAX_BATCH_SIZE,
    MAX_MESSAGE_BYTES,
    KeyEncoding,
    KeyPrefix,
    MessageEncoding,
    Protocol,
)
from tikv_br.storage.crypter import SecretText

FORM = "kafka://HOST:PORT[,HOST:PORT]/TOPIC?protocol=open-protocol"
USER_VARIABLE = "TIKV_BR_KAFKA_USER"
PASSWORD_VARIABLE = "TIKV_BR_KAFKA_PASSWORD"  # noqa: S105 - the name of a variable
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN")
DEFAULT_PORT = 9092
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_BOOLEANS = {"1": True, "t": True, "true": True, "0": False, "f": False, "false": False}
"""Lower-case texts that Go's `strconv.ParseBool` accepts."""
Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaUrl:
    """A topic and how to write or read it. `str` gives an address without the password."""

    brokers: tuple[str, ...]
    topic: str
    protocol: Protocol = Protocol.OPEN
    encoding: MessageEncoding = MessageEncoding.BASE64
    """Encoding of the protocol json."""
    key_encoding: KeyEncoding = KeyEncoding.SAME
    """Encoding of keys in the protocol json. Readers need not know it: they take the Kafka key."""
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


def split_url(url: str) -> SplitResult:
    """The parts of the address of a sink; a # ends none of them. Raises `UsageError`, without the address, which may hold a password."""
    try:
        return urlsplit(url, allow_fragments=False)
    except ValueError:
        raise UsageError(
            "the address does not parse", hint="Write an IPv6 address in brackets, as [::1]:9092."
        ) from None


def parse(url: str, environ: Mapping[str, str] = os.environ) -> KafkaUrl:
    """Parse a ``kafka://`` address. User and password may also come from `environ`. Raises `UsageError`."""
    parts = split_url(url)
    if parts.scheme != "kafka":
        raise UsageError("this is not a kafka:// address", hint=f"Pass {FORM}.")
    if "@" in parts.path or ("@" in parts.query and not parts.path):  # the message must not show part of a password
        raise UsageError(
            "the login in the kafka:// address contains a character that ends it",
            hint=f"Write / as %2F, ? as %3F and @ as %40; better, set {PASSWORD_VARIABLE}.",
        )
    options = _options(parts.query)
    user, _, password = map(unquote, parts.netloc.rpartition("@")[0].partition(":"))
    user = options.pop("sasl-user", "") or user
    password = options.pop("sasl-password", "") or password
    values: dict[str, Any] = {
        name.replace("-", "_"): parsed(name, options.pop(name))
        for name, parsed in _PARAMETERS.items()
        if name in options
    }
    if options:
        raise UsageError(
            f"a kafka:// address has no parameter {', '.join(sorted(options))}",
            hint="docs/kafka.md lists the parameters.",
        )
    values.pop("kafka_version", None)  # librdkafka asks the brokers
    given = KafkaUrl(
        brokers=_brokers(parts.netloc.rpartition("@")[2]),
        topic=_topic(parts.path),
        sasl_user=user or environ.get(USER_VARIABLE, ""),
        sasl_password=SecretText(password or environ.get(PASSWORD_VARIABLE, "")),
        password_in_address=bool(password),
        **({"tls": "ca" in values or "cert" in values} | values),
    )
    _check(given)
    return given


def _check(given: KafkaUrl) -> None:
    """Refuse parameters that contradict each other."""
    if given.encoding is not MessageEncoding.BASE64 and given.protocol is not Protocol.JSON:
        raise UsageError(f"encoding={given.encoding} requires protocol=json", hint="open-protocol always uses base64.")
    if given.key_encoding is not KeyEncoding.SAME and given.protocol is not Protocol.JSON:
        raise UsageError(f"key-encoding={given.key_encoding} requires protocol=json", hint="Leave it out.")
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


def _protocol(name: str, text: str) -> Protocol:
    return Protocol.OPEN if text == "default" else _one_of(Protocol)(name, text)


def _one_of(kind: type[Choice]) -> Callable[[str, str], Choice]:
    def parsed(name: str, text: str) -> Choice:
        try:
            return kind(text)
        except ValueError:
            raise UsageError(f"{name}={text} is not supported", hint=f"Pass one of {', '.join(kind)}.") from None

    return parsed


def _choice(choices: tuple[str, ...], normal: Callable[[str], str]) -> Callable[[str, str], str]:
    def parsed(name: str, text: str) -> str:
        if normal(text) not in choices:
            raise UsageError(f"{name}={text} is not supported", hint=f"Pass one of {', '.join(choices)}.")
        return normal(text)

    return parsed


def _number(most: int) -> Callable[[str, str], int]:
    def parsed(name: str, text: str) -> int:
        if not (number := parse_decimal(text, most)):
            raise UsageError(f"{name}={text} is not valid", hint=f"Pass a number from 1 to {most}.")
        return number

    return parsed


def _bool(name: str, text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise UsageError(f"{name}={text} is not valid", hint="Pass true or false.")
    return _BOOLEANS[text.lower()]


def _seconds(name: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text)
    if not found:
        raise UsageError(f"{name}={text} is not valid", hint="Pass a number and one of ms, s, m.")
    return float(found[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[found[2]]


def _matching(pattern: str, hint: str) -> Callable[[str, str], str]:
    def parsed(name: str, text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise UsageError(f"{name}={text} is not valid", hint=hint)
        return text

    return parsed


def _path(_name: str, text: str) -> str:
    return text


_PARAMETERS: Mapping[str, Callable[[str, str], object]] = {
    "protocol": _protocol,
    "encoding": _one_of(MessageEncoding),
    "key-encoding": _one_of(KeyEncoding),
    "key-prefix": _one_of(KeyPrefix),
    "partition-num": _number(1_000_000),
    "replication-factor": _number(32_767),
    "max-message-bytes": _number(1_000_000_000),  # librdkafka's limit
    "max-batch-size": _number(1 << 31),
    "compression": _choice(COMPRESSIONS, str.lower),
    "kafka-client-id": _matching(r"[A-Za-z0-9._-]+", "Use letters, digits, dots, dashes and underscores."),
    "auto-create-topic": _bool,
    "resolved-interval": _seconds,
    "tls": _bool,
    "ca": _path,
    "cert": _path,
    "key": _path,
    "sasl-mechanism": _choice(MECHANISMS, str.upper),
    "kafka-version": _matching(r"\d+(\.\d+){1,3}", "Pass for example 2.4.0."),
}
"""Parameters that are fields of `KafkaUrl`, and how each is parsed."""
