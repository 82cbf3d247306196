"""`tikv-br kafka replay` against a real broker; the messages are made here by hand, from the description of the protocols."""

from __future__ import annotations

import base64
import json
import logging
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.integration.kafka_server import AclOperation, KafkaBroker, ResourceType, kafka_broker
from tests.support.certificates import Authority
from tests.support.clock import move_clock
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.ports import reserved_ports
from tests.support.waiting import PATIENCE, eventually
from tikv_br.errors import (
    KafkaDenied,
    KafkaRefused,
    KafkaUnreachable,
    SyncFenced,
    SyncStateMismatch,
    TikvBrError,
    TopicDamaged,
    TopicUnresolved,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.handover import FromNow
from tikv_br.incremental.kafka.replay import Replay, ReplayOptions, ReplayStatus
from tikv_br.incremental.kafka.replay import replay as run
from tikv_br.incremental.kafka.topic_feed import ReplayLimits
from tikv_br.incremental.kafka.url import parse
from tikv_br.incremental.sinks.url import TikvTarget
from tikv_br.incremental.sinks.url import parse as parse_sink
from tikv_br.incremental.sync import SyncOptions, sync
from tikv_br.storage.crypter import SecretText
from tikv_br.storage.url import parse as locate

USER, PASSWORD = "replayer", "s3cr3t-of-kafka"
T0 = int(time.time() * 1000) << 18
NUMBER = struct.Struct(">Q")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Authority that signs the broker's certificate."""
    return Authority(tmp_path_factory.mktemp("authority"), "kafka-ca")


@pytest.fixture(scope="module")
def broker(authority: Authority) -> Iterator[KafkaBroker]:
    """A broker with a user who may do nothing yet."""
    with kafka_broker(users={USER: PASSWORD}, authority=authority) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Target of changes."""
    with live_cluster(tmp_path_factory.mktemp("target"), ApiVersion.V2, stores=1, regions=3) as live:
        yield live


@pytest.fixture
def target(cluster: LiveCluster) -> LiveCluster:
    """The cluster, empty."""
    cluster.raw().delete_range(EVERY_KEY)
    return cluster


def kv(ts: int, key: bytes, value: bytes | None, expire_ts: int = 0) -> tuple[dict[str, object], dict[str, object]]:
    """An event of open-protocol; without a value a delete."""
    about: dict[str, object] = {"ts": T0 + ts, "k": base64.b64encode(key).decode(), "t": 4}
    if value is None:
        return about, {"op": 2}
    change: dict[str, object] = {"op": 1}
    if value:
        change["v"] = base64.b64encode(value).decode()
    if expire_ts:
        change["ex"] = expire_ts
    return about, change


def packed(*events: tuple[dict[str, object], dict[str, object]]) -> tuple[bytes, bytes]:
    """Key and value of a message of open-protocol."""
    key, value = NUMBER.pack(1), b""
    for parts in events:
        about, change = (json.dumps(part).encode() for part in parts)
        key += NUMBER.pack(len(about)) + about
        value += NUMBER.pack(len(change)) + change
    return key, value


def resolved(ts: int) -> tuple[bytes, bytes]:
    """Key and value of the message of a resolved-ts."""
    about = json.dumps({"ts": T0 + ts, "t": 3}).encode()
    return NUMBER.pack(1) + NUMBER.pack(len(about)) + about, NUMBER.pack(0)


@dataclass
class Topic:
    """A topic, and another program that writes to it."""

    broker: KafkaBroker
    partitions: int
    name: str = ""
    rows: dict[bytes, bytes] = field(default_factory=dict)
    """Rows of a cluster after the changes so far."""

    def __post_init__(self) -> None:
        self.name = self.broker.create_topic(partitions=self.partitions)
        self.producer = Producer(
            # A retry must not change the order: a topic that was just created may refuse the first batch.
            {"bootstrap.servers": self.broker.address, "log_level": 0, "enable.idempotence": True}
        )

    def send(self, key: bytes, value: bytes | None, partition: int = 0, **headers: bytes) -> None:
        """Write one message, as it is."""
        self.producer.produce(self.name, value, key, partition=partition, headers=list(headers.items()))

    def change(self, ts: int, key: bytes, value: bytes | None, expire_ts: int = 0) -> None:
        """Write a change to the partition of its key."""
        self.send(*packed(kv(ts, key, value, expire_ts)), self.partition(key))
        if value is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = value

    def resolve(self, ts: int) -> None:
        """Write a resolved-ts to every partition."""
        for number in range(self.partitions):
            self.send(*resolved(ts), number)
        self.flush()

    def flush(self) -> None:
        """Wait until the broker has everything."""
        assert not self.producer.flush(PATIENCE)

    def partition(self, key: bytes) -> int:
        """Partition of a key: any function of the key will do."""
        return sum(key) % self.partitions

    def url(self, more: str = "protocol=open-protocol") -> str:
        """Its address."""
        return f"kafka://{self.broker.address}/{self.name}?{more}"


def options(topic: Topic, target: LiveCluster, folder: Path, address: str = "", **more: object) -> ReplayOptions:
    """A replay that stops at the end."""
    given = ReplayOptions(
        source=parse(address or topic.url()),
        target=TikvTarget((target.pd,)),
        scratch=folder,
        group=f"group-of-{topic.name}",
        once=True,
        patience=600.0,
    )
    return replace(given, **more)  # type: ignore[arg-type]


def replayed(given: ReplayOptions) -> ReplayStatus:
    """Run a replay to its end."""
    status = run(given, threading.Event(), lambda _replay: None)
    assert status is not None
    return status


@contextmanager
def replaying(given: ReplayOptions) -> Iterator[tuple[list[Replay], list[TikvBrError]]]:
    """A replay that runs in a thread until the end of the block; its errors are in the list when it has ended."""
    stop, running, errors = threading.Event(), list[Replay](), list[TikvBrError]()

    def call() -> None:
        try:
            run(given, stop, running.append)
        except TikvBrError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield running, errors
    finally:
        stop.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def committed(topic: Topic) -> list[int]:
    """The offsets that the group has committed, by partition."""
    reader = Consumer({"bootstrap.servers": topic.broker.address, "group.id": f"group-of-{topic.name}", "log_level": 0})
    try:
        found = reader.committed([TopicPartition(topic.name, number) for number in range(topic.partitions)], timeout=30)
        return [each.offset for each in found]
    finally:
        reader.close()


def test_the_target_has_what_is_complete_in_all_partitions(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path
) -> None:
    """A replay applies puts, deletes and TTLs up to the lowest resolved-ts, and nothing after it."""
    topic = Topic(broker, 3)
    for number in range(300):
        topic.change(number, b"key-%d" % (number % 100), b"value-%d" % number)
    for number in range(0, 100, 3):
        topic.change(400 + number, b"key-%d" % number, None)
    topic.change(601, b"empty", b"")
    topic.change(602, b"gone", b"soon", expire_ts=1)
    topic.rows.pop(b"gone")
    topic.change(603, b"stays", b"a day", expire_ts=int(time.time()) + 86400)
    topic.resolve(700)
    complete = dict(topic.rows)
    topic.change(800, b"later", b"is not complete")
    topic.send(*resolved(900), topic.partition(b"later"))  # the other partitions may still get older changes
    topic.flush()

    status = replayed(options(topic, target, tmp_path))

    assert contents(target) == complete
    assert status.checkpoint_ts == T0 + 700
    ttl = target.raw().get_ttl(b"stays")
    assert ttl is not None
    assert 80000 < ttl <= 86400


@pytest.mark.parametrize("parameters", ["protocol=json", "protocol=json&key-encoding=text"])
def test_the_protocol_json_gives_the_same_rows(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path, parameters: str
) -> None:
    """Messages of the protocol json become rows, whatever bytes they have, and in whatever form they have the key."""
    topic = Topic(broker, 2)

    def put(ts: int, key: bytes, value: bytes) -> None:
        encoded = {"key": base64.b64encode(key).decode(), "value": base64.b64encode(value).decode()}
        message = json.dumps({"op": "put", "ts": T0 + ts} | encoded).encode()
        topic.send(key, message, topic.partition(key), op=b"put", ts=b"%d" % (T0 + ts))

    put(1, b"a\0", b"first")
    text = b'{"op":"put","key":"d","ts":%d,"value":"ZA=="}' % (T0 + 1)
    topic.send(b"d", text, topic.partition(b"d"), op=b"put", ts=b"%d" % (T0 + 1))
    other = b'{"op":"put","key_base64":"/w==","ts":%d,"value":"ZQ=="}' % (T0 + 1)
    topic.send(b"\xff", other, topic.partition(b"\xff"), op=b"put", ts=b"%d" % (T0 + 1))
    put(2, b"b", b"\xff")
    put(3, b"a\0", b"second")
    put(4, b"c", b"deleted")
    topic.send(b"c", None, topic.partition(b"c"), op=b"delete", ts=b"%d" % (T0 + 5))
    for number in range(2):
        topic.send(b"", b'{"op":"resolved","ts":%d}' % (T0 + 10), number)
    topic.flush()

    replayed(options(topic, target, tmp_path, topic.url(parameters)))

    assert contents(target) == {b"a\0": b"second", b"b": b"\xff", b"d": b"d", b"\xff": b"e"}


def test_repeats_are_ignored_wherever_they_come(broker: KafkaBroker, target: LiveCluster, tmp_path: Path) -> None:
    """Events at or below a resolved-ts before them change nothing, also in a later run."""
    topic = Topic(broker, 1)
    topic.change(1, b"k", b"old")
    topic.change(5, b"k", b"new")
    topic.send(*packed(kv(1, b"k", b"old"), kv(5, b"k", b"new"), kv(1, b"k", b"old")))
    topic.resolve(5)
    topic.send(*packed(kv(1, b"k", b"old")))  # a restarted changefeed sends again what it has sent
    topic.resolve(3)
    topic.send(*packed(kv(2, b"k", None)))
    topic.resolve(8)
    first = replayed(options(topic, target, tmp_path))
    topic.send(*packed(kv(5, b"k", b"of a time before"), kv(9, b"k2", b"2")))
    topic.resolve(9)

    second = replayed(options(topic, target, tmp_path))

    assert contents(target) == {b"k": b"new", b"k2": b"2"}
    assert (first.repeats, second.repeats) == (2, 1)


def test_a_replay_resumes_at_what_is_not_applied(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Committed offsets are those of the first message that is not applied; a new run starts there, and its log names the place."""
    topic = Topic(broker, 2)
    for number in range(100):
        topic.change(number + 1, b"key-%d" % number, b"1")
    topic.resolve(100)
    for number in range(10):
        topic.change(201 + number, b"key-%d" % number, b"2")
    topic.send(*resolved(300), 0)
    topic.flush()
    ends = [len([each for each in broker.messages(topic.name) if each.partition() == number]) for number in range(2)]
    replayed(options(topic, target, tmp_path))
    between = contents(target)
    offsets = committed(topic)
    target.raw().delete(b"key-99")  # what was applied is not read again
    topic.send(*resolved(300), 1)
    topic.flush()
    caplog.set_level(logging.INFO)

    status = replayed(options(topic, target, tmp_path))

    assert f"replaying {topic.name} from " in caplog.text
    assert "from its beginning" not in caplog.text
    assert set(between.values()) == {b"1"}
    assert all(0 < offset < end for offset, end in zip(offsets, ends, strict=True))
    assert status.messages == sum(ends) - sum(offsets) + 1
    assert contents(target) == {key: value for key, value in topic.rows.items() if key != b"key-99"}
    assert committed(topic) == [ends[0], ends[1] + 1]


def test_a_time_ends_the_replay(broker: KafkaBroker, target: LiveCluster, tmp_path: Path) -> None:
    """--until leaves the rows of that time, and the next run continues from there."""
    topic = Topic(broker, 2)
    for number in range(1, 31):
        topic.change(number, b"key-%d" % (number % 7), b"%d" % number)
        if number == 20:
            wanted = dict(topic.rows)
    topic.resolve(40)

    status = replayed(options(topic, target, tmp_path, once=False, until_ts=T0 + 20))
    between = contents(target)
    replayed(options(topic, target, tmp_path))

    assert status.checkpoint_ts == T0 + 20
    assert between == wanted
    assert contents(target) == topic.rows


def test_a_partition_without_resolved_ts_holds_everything(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path
) -> None:
    """A partition that gets no resolved-ts holds all others, unless partition-num leaves it out."""
    topic = Topic(broker, 3)
    topic.change(1, b"\0", b"in partition 0")
    topic.send(*resolved(5), 0)
    topic.send(*resolved(5), 1)
    topic.flush()

    with pytest.raises(TopicUnresolved, match=r"nothing was applied: 1 changes .* \(partition 2\)"):
        replayed(options(topic, target, tmp_path, resolved_seconds=0.5))
    nothing = contents(target)
    replayed(options(topic, target, tmp_path, topic.url("partition-num=2")))

    assert nothing == {}
    assert contents(target) == {b"\0": b"in partition 0"}


def golden_changes(folder: Path) -> tuple[list[dict[str, Any]], dict[bytes, bytes]]:
    """Messages of TiKV-CDC, and the rows without expiry that their changes end at."""
    messages = json.loads((folder / "kafka" / "open-protocol.json").read_text())
    rows: dict[bytes, bytes | None] = {}
    for each in messages:
        about, what = (list(parts(bytes.fromhex(each[name])[skip:])) for name, skip in (("key", 8), ("value", 0)))
        for left, right in zip(about, what, strict=True):
            kept = right["op"] == 1 and "ex" not in right
            rows[base64.b64decode(left["k"])[4:]] = base64.b64decode(right.get("v", "")) if kept else None
    return messages, {key: value for key, value in rows.items() if value is not None}


def parts(data: bytes) -> Iterator[dict[str, Any]]:
    """JSON objects with their lengths before them."""
    while data:
        (size,) = NUMBER.unpack(data[:8])
        yield json.loads(data[8 : 8 + size])
        data = data[8 + size :]


def test_a_topic_of_tikv_cdc_is_replayed(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path, golden: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Recorded messages without any resolved-ts become rows, in a later run as well, and no time can be asked for."""
    messages, rows = golden_changes(golden)
    topic = Topic(broker, 3)
    for each in messages[:-1]:
        topic.send(bytes.fromhex(each["key"]), bytes.fromhex(each["value"]), each["partition"])
    topic.flush()
    caplog.set_level(logging.INFO)
    first = replayed(options(topic, target, tmp_path))
    last = messages[-1]
    topic.send(bytes.fromhex(last["key"]), bytes.fromhex(last["value"]), last["partition"])
    topic.flush()
    with pytest.raises(TopicUnresolved, match="--until"):
        replayed(options(topic, target, tmp_path, until_ts=T0))

    second = replayed(options(topic, target, tmp_path))

    assert {key: value for key, value in contents(target).items() if target.raw().get_ttl(key) == 0} == rows
    assert (first.as_it_arrives, second.as_it_arrives) == (True, True)
    assert (first.messages, second.messages) == (len(messages) - 1, 1)
    begun = [each.partition(" from ")[2] for each in caplog.messages if each.startswith("replaying ")]
    assert begun[0] == "its beginning"
    assert begun[-1] != "its beginning"


def test_a_topic_of_another_keyspace_goes_where_keyspace_says(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path
) -> None:
    """A topic of keyspace 258 is refused (exit code 2) until --keyspace names the target's."""
    topic = Topic(broker, 1)
    topic.send(*packed(kv(1, b"r\0\x01\x02k", b"v")))
    topic.resolve(1)
    command = ["kafka", "replay", "--from", topic.url(), "--sink", f"tikv://{target.pd}", "--once"]
    refused = tikv_br(*command)
    assert refused.code == 2
    assert "keyspace 258" in refused.err
    assert contents(target) == {}
    succeed(*command, "--keyspace", "0")
    assert contents(target) == {b"k": b"v"}


@pytest.mark.parametrize("seconds", [7200.0, -7200.0], ids=["ahead", "behind"])
def test_rows_of_a_replay_expire_by_the_clock_of_pd(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Whatever this machine's clock shows."""
    topic, now = Topic(broker, 1), int(time.time())
    target.raw().put(b"gone", b"older value")
    topic.change(1, b"gone", b"expired", expire_ts=now - 3600)
    topic.rows.pop(b"gone")
    topic.change(2, b"stays", b"for an hour", expire_ts=now + 3600)
    topic.resolve(3)
    move_clock(monkeypatch, seconds)
    replayed(options(topic, target, tmp_path))
    assert contents(target) == topic.rows
    assert 3000 < (target.raw().get_ttl(b"stays") or 0) <= 3600


def test_a_broker_that_restarts_is_waited_for(broker: KafkaBroker, target: LiveCluster, tmp_path: Path) -> None:
    """A running replay survives a broker that is down for a while."""
    topic = Topic(broker, 2)
    topic.change(1, b"before", b"1")
    topic.resolve(1)
    with replaying(options(topic, target, tmp_path, once=False)) as (running, errors):
        eventually(lambda: contents(target) == {b"before": b"1"})
        broker.stop()
        try:
            eventually(lambda: running[0].status().kafka_failing_seconds > 0)
        finally:
            broker.start()  # other tests need it
        topic.change(2, b"after", b"2")
        topic.resolve(2)
        eventually(lambda: contents(target) == topic.rows)
        eventually(lambda: not running[0].status().kafka_failing_seconds)
    assert not errors
    assert committed(topic) == [3, 3]


def test_a_second_replay_takes_over(broker: KafkaBroker, target: LiveCluster, tmp_path: Path) -> None:
    """Of two replays of a group, the later one continues and the earlier one ends."""
    topic = Topic(broker, 1)
    with replaying(options(topic, target, tmp_path, once=False)) as (first, errors):
        eventually(lambda: first)
        with replaying(options(topic, target, tmp_path, once=False)) as (second, none):
            eventually(lambda: second)
            topic.change(1, b"k", b"v")
            topic.resolve(1)
            eventually(lambda: contents(target) == topic.rows)
            eventually(lambda: errors)
    assert [type(each) for each in errors] == [SyncFenced]
    assert not none


def test_offsets_of_another_target_are_refused(broker: KafkaBroker, target: LiveCluster, tmp_path: Path) -> None:
    """A group that has replayed to another cluster would skip changes, so it is refused, and unchanged."""
    topic = Topic(broker, 1)
    topic.change(1, b"k", b"v")
    topic.resolve(1)
    name = f"group-of-{topic.name}"
    record = json.dumps({"v": 1, "ts": T0 + 1, "sink": "keyspace 7 of cluster 42"})
    other = Consumer({"bootstrap.servers": broker.address, "group.id": name, "log_level": 0})
    other.commit(offsets=[TopicPartition(topic.name, 0, 2, record)], asynchronous=False)
    other.close()

    with pytest.raises(SyncStateMismatch, match="keyspace 7 of cluster 42"):
        replayed(options(topic, target, tmp_path))
    assert contents(target) == {}
    assert committed(topic) == [2]


DAMAGED = [
    pytest.param(b"\0" * 7 + b"\x02" + packed(kv(1, b"k", b"v"))[0][8:], packed(kv(1, b"k", b"v"))[1], id="version"),
    pytest.param(packed(kv(1, b"k", b"v"))[0][:-1], packed(kv(1, b"k", b"v"))[1], id="truncated key"),
    pytest.param(packed(kv(1, b"k", b"v"))[0], b"", id="no value"),
    pytest.param(packed(({"ts": T0, "t": 9}, {"op": 1}))[0], packed(kv(1, b"k", b"v"))[1], id="type"),
    pytest.param(*packed(({"ts": T0, "t": 4, "k": "aw=="}, {"op": 7})), id="op"),
    pytest.param(*packed(({"ts": "1", "t": 4, "k": "aw=="}, {"op": 1})), id="ts"),
    pytest.param(*packed(({"ts": T0, "t": 4, "k": "a!=="}, {"op": 1})), id="base64"),
]


@pytest.mark.parametrize(("key", "value"), DAMAGED)
def test_a_damaged_message_ends_the_replay(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path, key: bytes, value: bytes
) -> None:
    """The error names topic, partition and offset, and nothing after the message is applied."""
    topic = Topic(broker, 2)
    topic.change(1, b"before", b"1")
    topic.resolve(1)
    topic.send(key, value, 1)
    topic.flush()
    topic.change(2, b"after", b"2")
    topic.resolve(2)

    with pytest.raises(TopicDamaged) as caught:
        replayed(options(topic, target, tmp_path))
    (at,) = [each.offset() for each in broker.messages(topic.name) if (each.partition(), each.key()) == (1, key)]
    assert f"offset {at} of partition 1 of topic {topic.name}" in caught.value.message
    assert contents(target) in ({}, {b"before": b"1"})  # the latter if both partitions were read as far


def test_larger_messages_than_the_address_allows_are_refused(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path
) -> None:
    """max-batch-size and max-message-bytes of the address are limits, as in TiKV-CDC's consumer."""
    topic = Topic(broker, 1)
    topic.send(*packed(*(kv(number, b"k", b"v") for number in range(1, 4))))
    topic.resolve(5)
    given = options(topic, target, tmp_path)

    with pytest.raises(TopicDamaged, match="3 events, which is more than max-batch-size=2"):
        replayed(replace(given, limits=ReplayLimits(batch_size=2)))
    with pytest.raises(TopicDamaged, match="more than max-message-bytes=100"):
        replayed(replace(given, limits=ReplayLimits(message_bytes=100)))
    assert contents(target) == {}
    replayed(given)
    assert contents(target) == {b"k": b"v"}


def test_changes_that_retention_has_removed_are_missed(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path
) -> None:
    """A replay that comes after the retention fails, instead of skipping changes."""
    topic = Topic(broker, 1)
    topic.change(1, b"k", b"v")
    topic.resolve(1)
    replayed(options(topic, target, tmp_path))
    topic.change(2, b"lost", b"1")
    topic.resolve(2)
    admin = broker.admin()
    for future in admin.delete_records([TopicPartition(topic.name, 0, 3)]).values():
        future.result(60)

    with pytest.raises(TopicDamaged, match=r"lacks changes .* offset 2 is next, but it has 3 to 4"):
        replayed(options(topic, target, tmp_path))


def test_a_user_needs_read_on_topic_and_group(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path, authority: Authority
) -> None:
    """Wrong credentials, an unknown authority and missing ACLs have different errors; without errors it works over TLS."""
    topic = Topic(broker, 1)
    topic.change(1, b"k", b"v")
    topic.resolve(1)
    address = f"kafka://{broker.listener('SASL_SSL')}/{topic.name}?ca={authority.ca}"
    source = parse(f"{address}&sasl-mechanism=scram-sha-512&sasl-user={USER}&sasl-password={PASSWORD}")
    given = options(topic, target, tmp_path, source=source)

    with pytest.raises(KafkaDenied) as caught:
        replayed(replace(given, source=replace(source, sasl_password=SecretText("wrong-secret"))))
    assert "wrong-secret" not in caught.value.message + caught.value.hint
    with pytest.raises(KafkaDenied, match=topic.name):
        replayed(replace(given, source=replace(source, ca="")))
    with pytest.raises(KafkaDenied) as caught:
        replayed(given)
    assert f"User:{USER}" in caught.value.hint
    broker.allow(USER, ResourceType.TOPIC, topic.name, AclOperation.READ)
    with pytest.raises(KafkaDenied, match=r"[Gg]roup"):
        replayed(given)
    assert contents(target) == {}
    broker.allow(USER, ResourceType.GROUP, given.group, AclOperation.READ)
    replayed(given)
    assert contents(target) == topic.rows


def test_a_missing_topic_and_a_missing_broker_are_named(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path
) -> None:
    """Errors name what is missing."""
    topic = Topic(broker, 1)
    given = options(topic, target, tmp_path)
    with pytest.raises(KafkaRefused, match="no-such-topic"):
        replayed(replace(given, source=replace(given.source, topic="no-such-topic")))
    with pytest.raises(KafkaRefused, match="has 1 partitions"):
        replayed(replace(given, source=replace(given.source, partition_num=2)))
    named = pytest.raises(
        KafkaUnreachable, match=r"127\.0\.0\.1:\d+.* \(for \d+ s, which is longer than --kafka-patience\)"
    )
    with reserved_ports(1) as [port], named as caught:
        replayed(replace(given, source=replace(given.source, brokers=(f"127.0.0.1:{port}",)), patience=0.5))
    assert str(port) in caught.value.message


def test_killed_replays_lose_nothing(broker: KafkaBroker, target: LiveCluster, tmp_path: Path) -> None:
    """After any number of SIGKILLs, the next run makes the target equal."""
    topic = Topic(broker, 3)
    ts = 0
    command = [
        *(str(PROGRAM), "kafka", "replay", "--from", topic.url(), "--sink", f"tikv://{target.pd}"),
        *("--output", "json", "--status-every", "100ms", "--scratch-dir", str(tmp_path), "--sink-ratelimit", "0.1"),
    ]
    for _kill in range(3):
        for _ in range(40):
            for _ in range(50):
                ts += 1
                topic.change(ts, b"key-%d" % (ts * 7919 % 997), b"%d" % ts * 20 if ts % 11 else None)
            topic.resolve(ts)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
        ) as process:
            assert process.stdout
            for line in process.stdout:  # until it has written some
                if json.loads(line).get("written", 0) > 100:
                    break
            else:
                pytest.fail("it ended unexpectedly")
            process.send_signal(signal.SIGKILL)
    topic.change(ts + 1, b"unresolved", b"1")
    del topic.rows[b"unresolved"]
    topic.flush()

    ended = succeed(*command[1:-2], "--once")

    assert contents(target) == topic.rows
    assert ended.last["message_type"] == "summary"
    assert ended.last["checkpoint_ts"] == T0 + ts


def test_the_topic_of_a_sync_can_be_replayed(
    broker: KafkaBroker, target: LiveCluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A sync to a topic and a replay of it make the target equal to the source."""
    topic, stop = Topic(broker, 3), threading.Event()
    with live_cluster(
        tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1, regions=3, resolved_ts_interval=0.2
    ) as source:
        syncing = SyncOptions(
            changefeed_id="to-kafka",
            source=source.config,
            target=parse_sink(topic.url("protocol=open-protocol&max-batch-size=4&resolved-interval=200ms")),
            state=locate(f"local://{tmp_path}/state"),
            scratch=tmp_path,
            start=FromNow(),
            feed=FeedOptions(hold_back=0),
        )
        started = threading.Event()
        thread = threading.Thread(target=sync, args=(syncing, stop, lambda _replicator: started.set()))
        thread.start()
        try:
            assert started.wait(PATIENCE)
            with replaying(options(topic, target, tmp_path, once=False)) as (_, errors):
                for number in range(3):
                    source.raw().batch_put(
                        {b"key-%d" % key: b"%d" % (number * key) for key in range(0, 200, number + 1)}
                    )
                source.raw().batch_delete([b"key-%d" % key for key in range(0, 200, 7)])
                wanted = contents(source)
                eventually(lambda: contents(target) == wanted, 2 * PATIENCE, every=0.3)
        finally:
            stop.set()
            thread.join(PATIENCE)
    assert not errors
