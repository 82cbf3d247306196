"""The protocol json: one message per change, with the user key as Kafka key."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tikv_br.incremental.kafka.messages import (
    MAX_MESSAGE_BYTES,
    MAX_NUMBER,
    Change,
    Codec,
    DamagedMessage,
    Event,
    KafkaMessage,
    KeyEncoding,
    MessageEncoding,
    ResolvedTs,
    UnencodableChange,
    decode_base64,
    decode_text,
    number_of,
    parse_object,
    refuse_constant,
    too_large,
)

RESOLVED_KEY = b""
"""Kafka key of a resolved-ts in the protocol json. Not null, which compacted topics refuse; no key of TiKV is empty."""
_DIGITS = len(str(MAX_NUMBER))


@dataclass(frozen=True, slots=True)
class JsonCodec(Codec):
    """One message per change: the user key as Kafka key, a JSON object as value, null for a delete."""

    encoding: MessageEncoding = MessageEncoding.BASE64
    max_message_bytes: int = MAX_MESSAGE_BYTES
    key_encoding: KeyEncoding = KeyEncoding.SAME

    def encode(self, changes: Sequence[Change]) -> Iterator[KafkaMessage]:
        for change in changes:
            message = self._message(change)
            if message.size > self.max_message_bytes:
                raise UnencodableChange(too_large(message.size, self.max_message_bytes))
            yield message

    def resolved(self, ts: int) -> KafkaMessage:
        return KafkaMessage(RESOLVED_KEY, b'{"op":"resolved","ts":%d}' % ts, _headers("resolved", ts))

    def decode(self, message: KafkaMessage) -> list[Event]:
        if message.value is None:
            return [self._deleted(message)]
        fields = _fields(message.value)
        ts = number_of(fields, "ts")
        match fields.get("op"):
            case "resolved":
                return [ResolvedTs(ts)]
            case "put":
                value = self._decoded(fields.get("value"))
                return [Change(message.key, value, ts, number_of(fields, "expire_ts", optional=True))]
        raise DamagedMessage(f"it has the unknown op {fields.get('op')!r}")

    def partition(self, key: bytes, partitions: int) -> int:
        """See `Codec.partition`: as librdkafka's partitioner ``consistent``, CRC-32."""
        return zlib.crc32(key) % partitions

    def _message(self, change: Change) -> KafkaMessage:
        if change.deleted:
            return KafkaMessage(change.key, None, _headers("delete", change.ts))
        expire_ts = b',"expire_ts":%d' % change.expire_ts if change.expire_ts else b""
        value = b'{"op":"put",%b,"ts":%d%b,"value":%b}' % (
            self._key_field(change.key),
            change.ts,
            expire_ts,
            self._value_text(change.value),
        )
        return KafkaMessage(change.key, value, _headers("put", change.ts, change.expire_ts))

    def _key_field(self, key: bytes) -> bytes:
        if self.key_encoding is KeyEncoding.SAME:
            return b'"key":%b' % self._text(key, "key")
        try:
            return b'"key":%b' % json.dumps(key.decode(), ensure_ascii=False).encode()
        except UnicodeDecodeError:  # another field, since base64 is text as well
            return b'"key_base64":"%b"' % base64.b64encode(key)

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
            json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            raise UnencodableChange(f"a value is not JSON, which encoding=json requires: {error}") from None
        return data

    def _deleted(self, message: KafkaMessage) -> Change:
        headers = dict(message.headers)
        ts = headers.get("ts", b"")
        if headers.get("op") != b"delete" or not (ts.isdigit() and len(ts) <= _DIGITS and int(ts) <= MAX_NUMBER):
            raise DamagedMessage("its value is null, but it has no headers op=delete and ts, a number of 64 bits")
        return Change(message.key, b"", int(ts), deleted=True)

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
                return decode_base64(value)
            case MessageEncoding.HEX:
                try:
                    return bytes.fromhex(value)
                except ValueError as error:
                    raise DamagedMessage(f"its value is not hex: {error}") from None
            case MessageEncoding.UTF8:
                try:
                    return value.encode()
                except UnicodeEncodeError:
                    raise DamagedMessage("its value has half of a surrogate pair, which is not UTF-8") from None


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
        but = " without key-encoding=text" if what == "key" else ""
        raise UnencodableChange(
            f"a {what} is not UTF-8, which encoding=utf8 and json require{but}: {error.reason}"
        ) from None


def _fields(data: bytes) -> dict[str, object]:
    """The fields of an object; ``value`` as it stands, since parsing and writing it again could change its bytes."""
    text, decoder = decode_text(data), json.JSONDecoder(parse_constant=refuse_constant)
    fields = parse_object(data)
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
