"""Changes as Kafka messages, in two protocols: encoders and decoders, without I/O.

``open-protocol`` is that of TiKV-CDC: a message has several events, whose keys have the prefix of API V2. ``json`` has one message
per change, with the user key as Kafka key. docs/kafka.md describes both. Every partition also gets resolved-ts: all changes up to
that ts have been sent. TiKV-CDC sends none.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol as Interface

from tikv_br.formats.keys.codec import PREFIX_SIZE, RAW_MODE

MAX_MESSAGE_BYTES = 10 << 20
MAX_BATCH_SIZE = 16
RECORD_OVERHEAD = 36
"""Largest header of a Kafka record: TiKV-CDC adds it to the size of key and value to compare with the limit."""
_KV, _RESOLVED = 4, 3
_PUT, _DELETE = 1, 2
_NUMBER = struct.Struct(">Q")
_VERSION = _NUMBER.pack(1)
_NO_VALUE = _NUMBER.pack(0)
_MAX_NUMBER = (1 << 64) - 1
KEYSPACE_HEADER = "keyspace"
"""Header of messages of open-protocol that this product writes: their keys have the prefix of this keyspace."""
RESOLVED_KEY = b""
"""Kafka key of a resolved-ts in the protocol json. Not null, which compacted topics refuse; no key of TiKV is empty."""


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


@dataclass(frozen=True, slots=True)
class OpenCodec(Codec):
    """TiKV-CDC's open protocol for RawKV."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_batch_size: int = MAX_BATCH_SIZE
    prefix: bytes = b""
    """Prefix of encoded keys: mode and keyspace of API V2."""

    def encode(self, changes: Sequence[Change]) -> Iterator[KafkaMessage]:
        """See `Codec.encode`."""
        headers = [(KEYSPACE_HEADER, b"%d" % int.from_bytes(self.prefix[1:]))] if self.prefix else []
        keys, values, size = [_VERSION], list[bytes](), 8 + RECORD_OVERHEAD
        for change in changes:
            key, value = _open_key(self.prefix + change.key, change.ts), _open_value(change)
            added = 16 + len(key) + len(value)
            if 8 + RECORD_OVERHEAD + added > self.max_message_bytes:
                raise UnencodableChange(_too_large(8 + RECORD_OVERHEAD + added, self.max_message_bytes))
            if values and (len(values) >= 2 * self.max_batch_size or size + added > self.max_message_bytes):
                yield KafkaMessage(b"".join(keys), b"".join(values), headers)
                keys, values, size = [_VERSION], [], 8 + RECORD_OVERHEAD
            keys += (_NUMBER.pack(len(key)), key)
            values += (_NUMBER.pack(len(value)), value)
            size += added
        if values:
            yield KafkaMessage(b"".join(keys), b"".join(values), headers)

    def resolved(self, ts: int) -> KafkaMessage:
        """See `Codec.resolved`."""
        key = b'{"ts":%d,"t":%d}' % (ts, _RESOLVED)
        return KafkaMessage(_VERSION + _NUMBER.pack(len(key)) + key, _NO_VALUE)

    def decode(self, message: KafkaMessage) -> list[Event]:
        """See `Codec.decode`."""
        if message.key[:8] != _VERSION:
            raise DamagedMessage(
                f"its key does not start with version 1 of open-protocol but with {message.key[:8].hex()}"
            )
        keys, values = _chunks(message.key[8:], "key"), _chunks(message.value or b"", "value")
        if not keys or len(keys) != len(values):
            raise DamagedMessage(f"it has {len(keys)} keys, but {len(values)} values")
        return [_open_event(key, value) for key, value in zip(keys, values, strict=True)]

    def partition(self, key: bytes, partitions: int) -> int:
        """See `Codec.partition`: murmur3-32 with seed 0, of prefix and user key."""
        return murmur3_32(self.prefix + key) % partitions


def _open_key(key: bytes, ts: int) -> bytes:
    encoded = b',"k":"%b"' % base64.b64encode(key) if key else b""
    return b'{"ts":%d%b,"t":%d}' % (ts, encoded, _KV)


def _open_value(change: Change) -> bytes:
    value = b',"v":"%b"' % base64.b64encode(change.value) if change.value else b""
    expire_ts = b',"ex":%d' % change.expire_ts if change.expire_ts else b""
    return b'{"op":%d%b%b}' % (_DELETE if change.deleted else _PUT, value, expire_ts)


def _chunks(data: bytes, what: str) -> list[bytes]:
    """Split a sequence of chunks, each after its length in 8 bytes."""
    chunks, at = [], 0
    while at < len(data):
        start = at + 8
        at = start + int.from_bytes(data[at:start])
        if start > len(data) or at > len(data):
            raise DamagedMessage(f"its {what} is truncated")
        chunks.append(data[start:at])
    return chunks


def _open_event(key: bytes, value: bytes) -> Event:
    about = _object(key)
    ts = _number(about, "ts")
    match about.get("t"):
        case 3:
            return ResolvedTs(ts)
        case 4:
            pass
        case other:
            raise DamagedMessage(f"it has an event of the unknown type {other!r}")
    change = _object(value)
    operation = change.get("op")
    if operation not in {_PUT, _DELETE}:
        raise DamagedMessage(f"it has a change with the unknown op {operation!r}")
    expire_ts = _number(change, "ex", optional=True)
    deleted = operation == _DELETE
    return Change(_decoded64(about.get("k")), _decoded64(change.get("v")), ts, expire_ts, deleted)


class UserKeys:
    """Turns the keys of one topic in open-protocol into user keys, and knows their keyspace."""

    def __init__(self, prefix: KeyPrefix = KeyPrefix.AUTO) -> None:
        self._asked = prefix
        self._recognised: bool | None = None
        """Prefix in keys of messages without header: present, absent, or None if no such message was seen."""
        self.keyspace_id: int | None = None
        """Keyspace of the topic's keys; None = unknown."""

    def of(self, changes: Sequence[Change], headers: Sequence[tuple[str, bytes]]) -> list[Change]:
        """The changes of one message with user keys. Raises `DamagedMessage`."""
        if not changes or not self._has_prefix(changes, headers):
            return list(changes)
        prefix = changes[0].key[:PREFIX_SIZE]
        if len(prefix) < PREFIX_SIZE or prefix[:1] != RAW_MODE:
            raise DamagedMessage(f"its first key starts with {prefix.hex()}, which is no prefix of API V2")
        if not all(change.key.startswith(prefix) for change in changes):
            raise DamagedMessage("its keys have different prefixes")
        keyspace_id = int.from_bytes(prefix[1:])
        if self.keyspace_id not in {None, keyspace_id}:
            raise DamagedMessage(f"its keys are of keyspace {keyspace_id}, those before it of {self.keyspace_id}")
        self.keyspace_id = keyspace_id
        return [replace(change, key=change.key[PREFIX_SIZE:]) for change in changes]

    def _has_prefix(self, changes: Sequence[Change], headers: Sequence[tuple[str, bytes]]) -> bool:
        if self._asked is not KeyPrefix.AUTO:
            return self._asked is KeyPrefix.API_V2
        if any(name == KEYSPACE_HEADER for name, _ in headers):
            return True
        # Ids of keyspaces are small. So the byte after the mode is, unlike that of a text which starts with "r".
        first = changes[0].key[:PREFIX_SIZE]
        found = first[:1] == RAW_MODE and len(first) == PREFIX_SIZE and first[1] < ord(" ")
        found = found and all(change.key.startswith(first) for change in changes)
        if self._recognised not in {None, found}:
            raise DamagedMessage(
                f"its keys seem to have {'a' if found else 'no'} prefix of API V2, unlike those before it: "
                "pass key-prefix=api-v2 or key-prefix=none in the address"
            )
        self._recognised = found
        return found


@dataclass(frozen=True, slots=True)
class JsonCodec(Codec):
    """One message per change: the user key as Kafka key, a JSON object as value, null for a delete."""

    encoding: MessageEncoding = MessageEncoding.BASE64
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def encode(self, changes: Sequence[Change]) -> Iterator[KafkaMessage]:
        """See `Codec.encode`."""
        for change in changes:
            message = self._message(change)
            if message.size > self.max_message_bytes:
                raise UnencodableChange(_too_large(message.size, self.max_message_bytes))
            yield message

    def resolved(self, ts: int) -> KafkaMessage:
        """See `Codec.resolved`."""
        return KafkaMessage(RESOLVED_KEY, b'{"op":"resolved","ts":%d}' % ts, _headers("resolved", ts))

    def decode(self, message: KafkaMessage) -> list[Event]:
        """See `Codec.decode`."""
        if message.value is None:
            return [self._deleted(message)]
        fields = _fields(message.value)
        ts = _number(fields, "ts")
        match fields.get("op"):
            case "resolved":
                return [ResolvedTs(ts)]
            case "put":
                value = self._decoded(fields.get("value"))
                return [Change(message.key, value, ts, _number(fields, "expire_ts", optional=True))]
        raise DamagedMessage(f"it has the unknown op {fields.get('op')!r}")

    def partition(self, key: bytes, partitions: int) -> int:
        """See `Codec.partition`: as librdkafka's partitioner ``consistent``, CRC-32."""
        return zlib.crc32(key) % partitions

    def _message(self, change: Change) -> KafkaMessage:
        if change.deleted:
            return KafkaMessage(change.key, None, _headers("delete", change.ts))
        expire_ts = b',"expire_ts":%d' % change.expire_ts if change.expire_ts else b""
        value = b'{"op":"put","key":%b,"ts":%d%b,"value":%b}' % (
            self._text(change.key, "key"),
            change.ts,
            expire_ts,
            self._value_text(change.value),
        )
        return KafkaMessage(change.key, value, _headers("put", change.ts, change.expire_ts))

    def _text(self, data: bytes, what: str) -> bytes:
        match self.encoding:
            case MessageEncoding.BASE64:
                return b'"%b"' % base64.b64encode(data)
            case MessageEncoding.HEX:
                return b'"%b"' % data.hex().encode()
            case MessageEncoding.UTF8 | MessageEncoding.JSON:
                return json.dumps(_utf8(data, what), ensure_ascii=False).encode()

    def _value_text(self, data: bytes) -> bytes:
        if self.encoding is not MessageEncoding.JSON:
            return self._text(data, "value")
        text = _utf8(data, "value")
        try:
            json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise UnencodableChange(f"a value is not JSON, which encoding=json requires: {error}") from None
        return data

    def _deleted(self, message: KafkaMessage) -> Change:
        headers = dict(message.headers)
        if headers.get("op") != b"delete" or not headers.get("ts", b"").isdigit():
            raise DamagedMessage("its value is null, but it has no headers op=delete and ts")
        return Change(message.key, b"", int(headers["ts"]), deleted=True)

    def _decoded(self, value: object) -> bytes:
        if self.encoding is MessageEncoding.JSON:
            if not isinstance(value, _Raw):
                raise DamagedMessage("it has no value")
            return value.text.encode()
        if isinstance(value, _Raw):
            value = json.loads(value.text)
        if not isinstance(value, str):
            raise DamagedMessage(f"its value is not a string, as encoding={self.encoding} requires")
        match self.encoding:
            case MessageEncoding.BASE64:
                return _decoded64(value)
            case MessageEncoding.HEX:
                try:
                    return bytes.fromhex(value)
                except ValueError as error:
                    raise DamagedMessage(f"its value is not hex: {error}") from None
            case MessageEncoding.UTF8:
                return value.encode()


@dataclass(frozen=True, slots=True)
class _Raw:
    """The text of a JSON value, as it stands in the message."""

    text: str


def _headers(operation: str, ts: int, expire_ts: int = 0) -> list[tuple[str, bytes]]:
    more = [("expire_ts", b"%d" % expire_ts)] if expire_ts else []
    return [("op", operation.encode()), ("ts", b"%d" % ts), *more]


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnencodableChange(
            f"a {what} is not UTF-8, which encoding=utf8 and json require: {error.reason}"
        ) from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _fields(data: bytes) -> dict[str, object]:
    """The fields of an object; ``value`` as it stands, since parsing and writing it again could change its bytes."""
    text, decoder = _decoded_text(data), json.JSONDecoder(parse_constant=_refuse_constant)
    fields = _object(data)
    if "value" not in fields:
        return fields
    at = text.index("{") + 1
    while True:
        name, at = decoder.raw_decode(text, _after_space(text, at))
        start = _after_space(text, _after_space(text, at) + 1)
        _, end = decoder.raw_decode(text, start)
        if name == "value":
            return fields | {"value": _Raw(text[start:end])}
        at = _after_space(text, end) + 1


def _after_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _decoded_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DamagedMessage("it is not UTF-8") from None


def _object(data: bytes) -> dict[str, object]:
    try:
        found = json.loads(_decoded_text(data), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedMessage(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DamagedMessage("it is JSON, but not an object")
    return found


def _number(fields: dict[str, object], name: str, *, optional: bool = False) -> int:
    value = fields.get(name, 0 if optional else None)
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise DamagedMessage(f"its {name} is {value!r}, not a number of 64 bits")
    return value


def _decoded64(value: object) -> bytes:
    """Bytes in base64; none if the field is missing."""
    if value is None:
        return b""
    if not isinstance(value, str):
        raise DamagedMessage("its key or value is not a string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DamagedMessage(f"its key or value is not base64: {error}") from None


def _too_large(size: int, limit: int) -> str:
    return f"a change needs a message of {size:,} bytes, which is more than max-message-bytes ({limit:,})"


_MASK = 0xFFFFFFFF


def murmur3_32(data: bytes) -> int:
    """MurmurHash3, x86 32-bit variant, seed 0."""
    whole = len(data) & ~3
    state = 0
    for (block,) in struct.iter_unpack("<I", data[:whole]):
        state ^= _mix_block(block)
        state = (((state << 13) | (state >> 19)) * 5 + 0xE6546B64) & _MASK
    state ^= _mix_block(int.from_bytes(data[whole:], "little"))
    state ^= len(data) & _MASK
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def _mix_block(block: int) -> int:
    block = (block * 0xCC9E2D51) & _MASK
    return (((block << 15) | (block >> 17)) * 0x1B873593) & _MASK
