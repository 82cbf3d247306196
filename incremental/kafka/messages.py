"""Changes as Kafka messages, and what the two protocols share. No I/O; docs/kafka.md describes both.

Every partition also gets resolved-ts: all changes up to that ts have been sent. TiKV-CDC sends none.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol as Interface

MAX_MESSAGE_BYTES = 10 << 20
MAX_BATCH_SIZE = 16
RECORD_OVERHEAD = 36
"""Largest header of a Kafka record: TiKV-CDC adds it to the size of key and value to compare with the limit."""
MAX_NUMBER = (1 << 64) - 1


class Protocol(StrEnum):
    """Format of the changes in a topic."""

    OPEN = "open-protocol"
    JSON = "json"


class KeyPrefix(StrEnum):
    """Use of the prefix of API V2 in keys of open-protocol."""

    AUTO = "auto"
    """Written with it, recognised when read."""
    API_V2 = "api-v2"
    NONE = "none"
    """Format of keys that tikv-br up to 1.0.0rc1 wrote."""


class MessageEncoding(StrEnum):
    """Encoding of keys and values in the protocol json."""

    BASE64 = "base64"
    HEX = "hex"
    UTF8 = "utf8"
    JSON = "json"
    """Keys as text, values as embedded JSON."""


class KeyEncoding(StrEnum):
    """Encoding of keys in the protocol json, if keys are encoded otherwise than values."""

    SAME = "same"
    TEXT = "text"
    """As text if the key is UTF-8, else in base64, in a field of its own."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a key."""

    key: bytes
    """The user key; decoded from open-protocol: as the message has it (`UserKeys` removes its prefix)."""
    value: bytes
    """Empty for a delete."""
    ts: int
    expire_ts: int = 0
    """Seconds since the epoch, 0 = never."""
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedTs:
    """Promise that every change up to this ts is in this message's partition before it, apart from repeats."""

    ts: int


Event = Change | ResolvedTs


@dataclass(frozen=True, slots=True)
class KafkaMessage:
    """A Kafka message."""

    key: bytes
    value: bytes | None
    headers: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Size in bytes as the limit ``max-message-bytes`` counts it."""
        headers = sum(len(name) + len(value) + 10 for name, value in self.headers)
        return len(self.key) + len(self.value or b"") + headers + RECORD_OVERHEAD


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


class UnencodableChange(ValueError):
    """A change that the protocol cannot express, or that is above the size limit. The text names no key or value."""


class DamagedMessage(ValueError):
    """A message that is not of the protocol."""


class Codec(Interface):
    """Encoder and decoder of one protocol."""

    def encode(self, changes: Sequence[Change]) -> Iterator[KafkaMessage]:
        """Messages for changes of one partition, in order. Raises `UnencodableChange`."""

    def resolved(self, ts: int) -> KafkaMessage:
        """The message for a resolved-ts."""

    def decode(self, message: KafkaMessage) -> list[Event]:
        """The events of a message. Raises `DamagedMessage`."""

    def partition(self, key: bytes, partitions: int) -> int:
        """The partition of a user key."""


def refuse_constant(name: str) -> object:
    """`parse_constant` of the module `json`, which else reads NaN and Infinity."""
    raise ValueError(f"{name} is not JSON")


def decode_text(data: bytes) -> str:
    """UTF-8 as text. Raises `DamagedMessage`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DamagedMessage("it is not UTF-8") from None


def parse_object(data: bytes) -> dict[str, object]:
    """The fields of a JSON object. Raises `DamagedMessage`."""
    try:
        found = json.loads(decode_text(data), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedMessage(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DamagedMessage("it is JSON, but not an object")
    return found


def number_of(fields: dict[str, object], name: str, *, optional: bool = False) -> int:
    """A field with 64 bits; 0 if it is missing and optional. Raises `DamagedMessage`."""
    value = fields.get(name, 0 if optional else None)
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise DamagedMessage(f"its {name} is {value!r}, not a number of 64 bits")
    return value


def decode_base64(value: object) -> bytes:
    """Bytes in base64; none if the field is missing. Raises `DamagedMessage`."""
    if value is None:
        return b""
    if not isinstance(value, str):
        raise DamagedMessage("its key or value is not a string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DamagedMessage(f"its key or value is not base64: {error}") from None


def too_large(size: int, limit: int) -> str:
    """The text of `UnencodableChange` for a message above the limit."""
    return f"a change needs a message of {size:,} bytes, which is more than max-message-bytes ({limit:,})"
