"""Messages of open-protocol that TiKV-CDC wrote: our encoder makes the same bytes, and our replay the same rows."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mmh3
import pytest

from tikv_br.errors import TopicDamaged, TopicUnresolved, UsageError
from tikv_br.incremental.feed.events import Resolved, Rows
from tikv_br.incremental.kafka.group import Start
from tikv_br.incremental.kafka.messages import Change, KeyPrefix, PartitionEnd, Received
from tikv_br.incremental.kafka.open_protocol import OpenCodec, UserKeys
from tikv_br.incremental.kafka.topic_feed import TopicFeed

PREFIX = b"r\0\0\0"
PARTITIONS = 3


@dataclass(frozen=True)
class Recorded:
    """A message as it lay in the topic, and its changes with user keys, parsed here."""

    partition: int
    offset: int
    key: bytes
    value: bytes
    changes: list[Change]


def parts(data: bytes) -> Iterator[dict[str, Any]]:
    """JSON objects with their lengths before them."""
    while data:
        (size,) = struct.unpack(">Q", data[:8])
        yield json.loads(data[8 : 8 + size])
        data = data[8 + size :]


def change(about: dict[str, Any], what: dict[str, Any]) -> Change:
    """An event of a message."""
    key = base64.b64decode(about["k"])
    assert key.startswith(PREFIX)
    value = base64.b64decode(what.get("v", ""))
    return Change(key.removeprefix(PREFIX), value, about["ts"], what.get("ex", 0), deleted=what["op"] == 2)


@pytest.fixture(scope="module")
def recorded(golden: Path) -> list[Recorded]:
    """By partition and offset."""
    found = []
    for each in json.loads((golden / "kafka" / "open-protocol.json").read_text()):
        key, value = bytes.fromhex(each["key"]), bytes.fromhex(each["value"])
        changes = [change(*pair) for pair in zip(parts(key[8:]), parts(value), strict=True)]
        found.append(Recorded(each["partition"], each["offset"], key, value, changes))
    return sorted(found, key=lambda each: (each.partition, each.offset))


def test_the_encoder_makes_the_bytes_of_tikv_cdc(recorded: list[Recorded]) -> None:
    """Each message is the same if its changes are encoded again, and it lies in the partition that the codec chooses."""
    codec = OpenCodec(prefix=PREFIX)
    for message in recorded:
        [again] = codec.encode(message.changes)
        assert (again.key, again.value) == (message.key, message.value)
        assert again.headers == [("keyspace", b"0")]
        for each in message.changes:
            assert codec.partition(each.key, PARTITIONS) == message.partition
            assert mmh3.hash(PREFIX + each.key, 0, signed=False) % PARTITIONS == message.partition


class Reader:
    """Gives one message per poll, and then nothing."""

    def __init__(self, messages: list[Received]) -> None:
        self._messages = list(messages)

    def poll(self, seconds: float) -> list[Received | PartitionEnd]:
        """The next message."""
        return [self._messages.pop(0)] if self._messages else []


def received(recorded: list[Recorded], prefix: bytes = PREFIX) -> list[Received]:
    """The messages with offsets from 0; with another prefix, encoded again."""
    found, ends = [], dict.fromkeys(range(PARTITIONS), 0)
    for each in recorded:
        key = each.key if prefix == PREFIX else next(OpenCodec(prefix=prefix).encode(each.changes)).key
        found.append(Received(each.partition, ends[each.partition], key, each.value))
        ends[each.partition] += 1
    return found


def feed_of(messages: list[Received], **options: Any) -> TopicFeed:  # noqa: ANN401 - of `TopicFeed`
    """A feed that stops at the end of the messages."""
    starts = {number: Start(0, sum(each.partition == number for each in messages)) for number in range(PARTITIONS)}
    settings: dict[str, Any] = {"keys": UserKeys(), "resolved_seconds": 0.05, "once": True} | options
    return TopicFeed(Reader(messages), "t", OpenCodec(), starts, **settings)


def applied(feed: TopicFeed) -> dict[bytes, tuple[bytes, int]]:
    """The rows of someone who applies what is resolved, with ascending ts."""
    rows: dict[bytes, tuple[bytes, int]] = {}
    waiting: list[dict[str, Any]] = []
    for event in feed.events(threading.Event()):
        if isinstance(event, Rows):
            waiting += event.batch.to_pylist()
        elif isinstance(event, Resolved):
            ready = sorted((row for row in waiting if row["ts"] <= event.ts), key=lambda row: row["ts"])
            waiting = [row for row in waiting if row["ts"] > event.ts]
            for row in ready:
                rows.pop(row["key"], None)
                if not row["deleted"]:
                    rows[row["key"]] = (row["value"], row["expire_ts"])
    return rows


def wanted(recorded: list[Recorded]) -> dict[bytes, tuple[bytes, int]]:
    """Rows that TiKV-CDC's consumer has at the end."""
    rows: dict[bytes, tuple[bytes, int]] = {}
    for each in (each for message in recorded for each in message.changes):
        rows.pop(each.key, None)
        if not each.deleted:
            rows[each.key] = (each.value, each.expire_ts)
    return rows


@pytest.mark.parametrize("prefix", [PREFIX, b"r\0\x01\x02", b""], ids=["keyspace 0", "keyspace 258", "no prefix"])
def test_a_topic_without_resolved_ts_is_applied_as_it_arrives(recorded: list[Recorded], prefix: bytes) -> None:
    """All rows come, with user keys, whether keys have a prefix (TiKV-CDC) or none (earlier versions of tikv-br)."""
    feed = feed_of(received(recorded, prefix))
    assert applied(feed) == wanted(recorded)
    assert feed.as_it_arrives
    assert not feed.has_applied_nothing
    assert feed.offsets(1 << 63) == {number: sum(each.partition == number for each in recorded) for number in range(3)}


def test_a_running_replay_applies_before_the_end_of_the_topic(recorded: list[Recorded]) -> None:
    """Without an end to stop at, the first change waits for a resolved-ts only for a while."""
    feed, stop, seen = feed_of(received(recorded), once=False), threading.Event(), list[object]()
    for event in feed.events(stop):
        seen.append(event)
        if isinstance(event, Resolved) and event.ts >= max(each.ts for each in recorded[-1].changes):
            stop.set()
    assert isinstance(seen[-1], Resolved)


def test_older_changes_that_come_later_are_applied(recorded: list[Recorded]) -> None:
    """Timestamps of one partition say nothing of another, and what is repeated in a partition ends at its newest change."""
    last = recorded[-1]
    late = replace(last, changes=[replace(each, ts=each.ts - (1 << 40)) for each in last.changes])
    again = [*recorded, late, last]
    feed = feed_of(received(again), resolved_seconds=0.0)
    assert applied(feed) == wanted(recorded)
    assert feed.changes == sum(len(each.changes) for each in again)


def test_another_keyspace_is_refused_unless_it_is_named(recorded: list[Recorded]) -> None:
    """Rows of keyspace 258 do not get into the default keyspace by themselves, and two keyspaces are not mixed."""
    other = received(recorded, b"r\0\x01\x02")
    with pytest.raises(UsageError, match="keyspace 258, but the sink is keyspace 0"):
        applied(feed_of(other, keyspace_id=0))
    assert applied(feed_of(other, keyspace_id=258)) == wanted(recorded)
    with pytest.raises(TopicDamaged, match="keyspace 258, those before it of 0"):
        applied(feed_of([*received(recorded)[:1], *other[1:]]))


def test_text_keys_that_start_like_a_prefix_are_read_as_they_are() -> None:
    """Keys such as "row-1" of an earlier version have no prefix; the header identifies a keyspace of that number."""
    rows = [Change(b"row-%d" % number, b"", number) for number in range(1, 4)]
    assert UserKeys().of(rows, []) == rows
    assert [each.key for each in UserKeys().of(rows, [("keyspace", b"7305005")])] == [b"1", b"2", b"3"]
    assert [each.key for each in UserKeys(KeyPrefix.API_V2).of(rows, [])] == [b"1", b"2", b"3"]
    binary = [Change(b"r\0\0\0x", b"", 1)]
    assert UserKeys(KeyPrefix.NONE).of(binary, []) == binary


def test_a_topic_with_and_without_prefixes_is_refused(recorded: list[Recorded]) -> None:
    """Nobody can know which keys are meant; the error names the parameter that says it."""
    mixed = [*received(recorded)[:1], *received(recorded, b"")[1:]]
    with pytest.raises(TopicDamaged, match="key-prefix=none"):
        applied(feed_of(mixed))


def test_a_time_cannot_be_reached_without_resolved_ts(recorded: list[Recorded]) -> None:
    """--until would need them."""
    with pytest.raises(TopicUnresolved, match="--until"):
        applied(feed_of(received(recorded), until_ts=recorded[0].changes[0].ts))


def test_our_own_topic_waits_for_its_resolved_ts(recorded: list[Recorded]) -> None:
    """Messages with our header are not applied before, and a replay that has applied nothing knows it."""
    marked = [replace(each, headers=[("keyspace", b"0")]) for each in received(recorded)]
    feed = feed_of(marked)
    assert applied(feed) == {}
    assert feed.has_applied_nothing
