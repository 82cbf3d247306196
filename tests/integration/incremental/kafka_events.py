"""Contents of a Kafka topic, read with the consumer of confluent-kafka and parsed without the product's decoders."""

from __future__ import annotations

import base64
import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from confluent_kafka import Message

PREFIX = b"r\0\0\0"
"""Prefix of keys of keyspace 0, as every consumer of TiKV-CDC's messages requires it."""


class Event(NamedTuple):
    """A change, or a resolved-ts if it has no key."""

    partition: int
    ts: int
    key: bytes | None = None
    value: bytes | None = None
    """None = deleted."""
    expire_ts: int = 0


def open_events(messages: Sequence[Message]) -> list[Event]:
    """The events of messages in open-protocol."""
    return [event for message in messages for event in _open(message)]


def json_events(messages: Sequence[Message]) -> list[Event]:
    """The events of messages in the protocol json, in base64."""
    return [_json(message) for message in messages]


def by_key(events: Sequence[Event]) -> dict[bytes, list[Event]]:
    """The changes of each key in the order of the topic; fails if a key is in two partitions."""
    found: defaultdict[bytes, list[Event]] = defaultdict(list)
    for event in events:
        if event.key is not None:
            found[event.key].append(event)
            assert event.partition == found[event.key][0].partition
    return dict(found)


def live_rows(events: Sequence[Event], now: float) -> dict[bytes, bytes]:
    """Live rows of a consumer that applies the changes in the order of the topic."""
    ends = {key: changes[-1] for key, changes in by_key(events).items()}
    return {
        key: end.value
        for key, end in ends.items()
        if end.value is not None and (not end.expire_ts or end.expire_ts > now)
    }


def without_repeats(changes: Sequence[Event]) -> list[Event]:
    """The changes of a key as one sees them who drops what is not newer than what came before."""
    kept: list[Event] = []
    for change in changes:
        if not kept or change.ts > kept[-1].ts:
            kept.append(change)
    return kept


def check_resolved(events: Sequence[Event]) -> None:
    """Fail if a change that was not in the topic before follows a resolved-ts that claims to have it."""
    resolved: dict[int, int] = {}
    seen: set[Event] = set()
    for event in events:
        if event.key is None:
            resolved[event.partition] = max(event.ts, resolved.get(event.partition, 0))
        else:
            assert event.ts > resolved.get(event.partition, 0) or event in seen, event
            seen.add(event)


def highest_resolved(events: Sequence[Event]) -> dict[int, int]:
    """By partition."""
    found: dict[int, int] = {}
    for event in events:
        if event.key is None:
            found[event.partition] = max(event.ts, found.get(event.partition, 0))
    return found


def _open(message: Message) -> Iterator[Event]:
    key, value, partition = message.key(), message.value(), message.partition()
    assert key is not None
    assert value is not None
    assert partition is not None
    assert key[:8] == struct.pack(">Q", 1)
    about, what = list(_parts(key[8:])), list(_parts(value))
    assert len(about) == len(what) > 0
    for left, right in zip(about, what, strict=True):
        fields: dict[str, Any] = json.loads(left)
        if fields["t"] == 3:
            assert fields.keys() == {"ts", "t"}
            assert right == b""
            yield Event(partition, fields["ts"])
            continue
        assert fields["t"] == 4
        change: dict[str, Any] = json.loads(right)
        data = None if change["op"] == 2 else base64.b64decode(change.get("v", ""))
        rpc_key = base64.b64decode(fields["k"])
        assert rpc_key.startswith(PREFIX)
        yield Event(partition, fields["ts"], rpc_key.removeprefix(PREFIX), data, change.get("ex", 0))


def _parts(data: bytes) -> Iterator[bytes]:
    while data:
        (size,) = struct.unpack(">Q", data[:8])
        yield data[8 : 8 + size]
        data = data[8 + size :]


def _json(message: Message) -> Event:
    key, value, partition = message.key(), message.value(), message.partition()
    headers = dict(message.headers() or [])
    assert key is not None
    assert partition is not None
    ts = int(bytes(headers["ts"] or b"") if not isinstance(headers["ts"], str) else headers["ts"])
    if value is None:
        assert headers["op"] == b"delete"
        return Event(partition, ts, key)
    fields: dict[str, Any] = json.loads(value)
    assert fields["ts"] == ts
    assert fields["op"].encode() == headers["op"]
    if fields["op"] == "resolved":
        assert key == b""
        return Event(partition, ts)
    assert base64.b64decode(fields["key"]) == key
    return Event(partition, ts, key, base64.b64decode(fields["value"]), fields.get("expire_ts", 0))
