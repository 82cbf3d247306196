"""TiKV-CDC's open protocol for RawKV: a message has several events, whose keys have the prefix of API V2."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tikv_br.formats.keys.codec import PREFIX_SIZE, RAW_MODE
from tikv_br.incremental.kafka.messages import (
    MAX_BATCH_SIZE,
    MAX_MESSAGE_BYTES,
    RECORD_OVERHEAD,
    Change,
    Codec,
    DamagedMessage,
    Event,
    KafkaMessage,
    KeyPrefix,
    ResolvedTs,
    UnencodableChange,
    decode_base64,
    number_of,
    parse_object,
    too_large,
)

_KV, _RESOLVED = 4, 3
_PUT, _DELETE = 1, 2
_NUMBER = struct.Struct(">Q")
_VERSION = _NUMBER.pack(1)
_NO_VALUE = _NUMBER.pack(0)
KEYSPACE_HEADER = "keyspace"
"""Header of messages of open-protocol that this product writes: their keys have the prefix of this keyspace."""


@dataclass(frozen=True, slots=True)
class OpenCodec(Codec):
    """TiKV-CDC's open protocol for RawKV."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_batch_size: int = MAX_BATCH_SIZE
    prefix: bytes = b""
    """Prefix of encoded keys: mode and keyspace of API V2."""

    def encode(self, changes: Sequence[Change]) -> Iterator[KafkaMessage]:
        headers = [(KEYSPACE_HEADER, b"%d" % int.from_bytes(self.prefix[1:]))] if self.prefix else []
        keys, values, size = [_VERSION], list[bytes](), 8 + RECORD_OVERHEAD
        for change in changes:
            key, value = _open_key(self.prefix + change.key, change.ts), _open_value(change)
            added = 16 + len(key) + len(value)
            if 8 + RECORD_OVERHEAD + added > self.max_message_bytes:
                raise UnencodableChange(too_large(8 + RECORD_OVERHEAD + added, self.max_message_bytes))
            if values and (len(values) >= 2 * self.max_batch_size or size + added > self.max_message_bytes):
                yield KafkaMessage(b"".join(keys), b"".join(values), headers)
                keys, values, size = [_VERSION], [], 8 + RECORD_OVERHEAD
            keys += (_NUMBER.pack(len(key)), key)
            values += (_NUMBER.pack(len(value)), value)
            size += added
        if values:
            yield KafkaMessage(b"".join(keys), b"".join(values), headers)

    def resolved(self, ts: int) -> KafkaMessage:
        key = b'{"ts":%d,"t":%d}' % (ts, _RESOLVED)
        return KafkaMessage(_VERSION + _NUMBER.pack(len(key)) + key, _NO_VALUE)

    def decode(self, message: KafkaMessage) -> list[Event]:
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
    about = parse_object(key)
    ts = number_of(about, "ts")
    match about.get("t"):
        case 3:
            return ResolvedTs(ts)
        case 4:
            pass
        case other:
            raise DamagedMessage(f"it has an event of the unknown type {other!r}")
    change = parse_object(value)
    operation = change.get("op")
    if type(operation) is not int or operation not in {_PUT, _DELETE}:
        raise DamagedMessage(f"it has a change with the unknown op {operation!r}")
    expire_ts = number_of(change, "ex", optional=True)
    deleted = operation == _DELETE
    return Change(decode_base64(about.get("k")), decode_base64(change.get("v")), ts, expire_ts, deleted)


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
        # Ids of keyspaces are small. So the byte after the mode is; in a text that starts with "r" it is not.
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
