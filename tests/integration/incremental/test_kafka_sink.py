"""The Kafka sink at a real broker: what is in the topic, and what happens when the broker does not take it."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import mmh3
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public by the manual, not by __all__
    AclOperation,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from tests.integration.incremental.kafka_events import (
    PREFIX,
    by_key,
    highest_resolved,
    json_events,
    live_rows,
    open_events,
    without_repeats,
)
from tests.integration.kafka_server import KafkaBroker, kafka_broker
from tests.support.certificates import Authority
from tests.unit.incremental.changes import Change, batch
from tests.unit.incremental.sink_suite import SinkSuite, State
from tikv_br.errors import ConversionUnsupported, KafkaDenied, KafkaRefused, KafkaUnreachable, UsageError
from tikv_br.incremental.kafka.url import parse
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.kafka import KafkaSink
from tikv_br.incremental.sinks.open import Origin, SinkOptions, open_sink

ANYWHERE = Origin(cluster_id=1, keyspace_id=0)
KEYS = [b"%c%d" % (at % 256, at) for at in range(60)]


def address(broker: KafkaBroker, topic: str, *parameters: str) -> str:
    """A sink that announces each resolved-ts."""
    return f"kafka://{broker.address}/{topic}?{'&'.join(['resolved-interval=0ms', *parameters])}"


class TestKafkaSink(SinkSuite):
    """A topic of three partitions, in each protocol."""

    @pytest.fixture(params=["open-protocol", "json"])
    def protocol(self, request: pytest.FixtureRequest) -> str:
        """Protocol of the changes."""
        return str(request.param)

    @pytest.fixture
    def topic(self, broker: KafkaBroker) -> str:
        """An empty topic that takes large messages."""
        return broker.create_topic(partitions=3, max_message_bytes=str(5 << 20))

    @pytest.fixture
    def sink(self, broker: KafkaBroker, topic: str, protocol: str) -> Iterator[Sink]:
        """See `SinkSuite.sink`."""
        with open_sink(parse(address(broker, topic, f"protocol={protocol}", "compression=lz4")), ANYWHERE) as sink:
            yield sink

    @pytest.fixture
    def state(self, broker: KafkaBroker, topic: str, protocol: str) -> State:
        """See `SinkSuite.state`."""
        events = open_events if protocol == "open-protocol" else json_events
        return lambda: live_rows(events(broker.messages(topic)), time.time())

    def test_every_version_is_there_and_every_partition_is_resolved(
        self, broker: KafkaBroker, topic: str, protocol: str, sink: Sink
    ) -> None:
        """Keys lie where murmur3, or librdkafka's hash, puts them; a resolved-ts follows what it covers, in each partition."""
        sink.write(batch([Change(ts, KEYS[ts % 60], b"%d" % ts, deleted=ts % 7 == 0) for ts in range(1, 500)]))
        assert sink.resolve(499) == 499
        sink.write(batch([Change(ts, KEYS[ts % 60], b"%d" % ts, expire_ts=ts) for ts in range(500, 600)]))
        assert sink.resolve(600, flush=True) == 600
        messages = broker.messages(topic)
        events = open_events(messages) if protocol == "open-protocol" else json_events(messages)
        for key, changes in by_key(events).items():
            number = mmh3.hash(PREFIX + key, 0, signed=False) if protocol == "open-protocol" else zlib.crc32(key)
            assert {change.partition for change in changes} == {number % 3}
            at = KEYS.index(key)
            assert [change.ts for change in changes] == [ts for ts in range(1, 600) if ts % 60 == at]
            for change in changes:
                assert change.value == (None if change.ts % 7 == 0 and change.ts < 500 else b"%d" % change.ts)
                assert change.expire_ts == (change.ts if change.ts >= 500 else 0)
        for number in range(3):
            mine = [event for event in events if event.partition == number]
            first, last = [at for at, event in enumerate(mine) if event.key is None]
            assert (mine[first].ts, mine[last].ts, last) == (499, 600, len(mine) - 1)
            assert all(event.ts <= 499 for event in mine[:first])


def test_keys_of_json_are_text_where_they_are_text(broker: KafkaBroker) -> None:
    """A consumer with a JSON parser reads them; other keys, and the Kafka keys, have the same bytes as ever."""
    topic = broker.create_topic(partitions=1)
    keys = [b"user:1", "\u00e4\u20ac".encode(), b"\xff\x00"]
    with open_sink(parse(address(broker, topic, "protocol=json", "key-encoding=text")), ANYWHERE) as sink:
        sink.write(batch([Change(at, key, b"\xfe") for at, key in enumerate(keys, 1)]))
    messages = broker.messages(topic)
    assert [message.key() for message in messages] == keys
    found = [json.loads(message.value() or b"") for message in messages]
    assert [each.get("key") for each in found] == ["user:1", "\u00e4\u20ac", None]
    assert [each.get("key_base64") for each in found] == [None, None, "/wA="]
    assert {each["value"] for each in found} == {"/g=="}


def test_partitions_of_json_are_those_of_librdkafka(broker: KafkaBroker) -> None:
    """Its own partitioner "consistent" sends every key to the partition in which the sink has it."""
    ours, theirs = (broker.create_topic(partitions=5) for _ in range(2))
    with open_sink(parse(address(broker, ours, "protocol=json")), ANYWHERE) as sink:
        sink.write(batch([Change(1, key, b"v") for key in KEYS]))
    producer = Producer({"bootstrap.servers": broker.address, "partitioner": "consistent"})
    for key in KEYS:
        producer.produce(theirs, b"v", key)
    assert producer.flush(60) == 0
    mine, other = ({(m.partition(), m.key()) for m in broker.messages(topic)} for topic in (ours, theirs))
    assert mine == other
    assert len(mine) == len(KEYS)


def test_the_form_of_earlier_versions_is_kept_on_demand(broker: KafkaBroker) -> None:
    """With key-prefix=none keys and partitions are those of user keys; else they have the prefix of the source's keyspace."""
    for parameters, prefix in ((("key-prefix=none",), b""), ((), b"r\0\x01\x02")):
        topic = broker.create_topic(partitions=3)
        with open_sink(parse(address(broker, topic, *parameters)), Origin(cluster_id=1, keyspace_id=258)) as sink:
            sink.write(batch([Change(1, key, b"v") for key in KEYS]))
        found = set()
        for message in broker.messages(topic):
            assert (message.headers() or []) == ([("keyspace", b"258")] if prefix else [])
            for key in re.findall(rb'"k":"([^"]+)"', message.key() or b""):
                found.add(base64.b64decode(key))
                assert mmh3.hash(base64.b64decode(key), 0, signed=False) % 3 == message.partition()
        assert found == {prefix + key for key in KEYS}


def test_a_topic_is_created_with_the_first_write(broker: KafkaBroker) -> None:
    """Not before that: three partitions, or so many as the address says. A lower number than a topic has is enough to be used."""
    known = broker.admin()
    for parameters, count in (((), 3), (("partition-num=2",), 2)):
        topic = f"new-{count}"
        with open_sink(parse(address(broker, topic, *parameters)), ANYWHERE) as sink:
            assert topic not in known.list_topics(timeout=30).topics
            assert sink.place == f"topic {topic} of Kafka cluster {known.list_topics(timeout=30).cluster_id}"
            sink.resolve(5)
        assert len(known.list_topics(topic, timeout=30).topics[topic].partitions) == count
        assert highest_resolved(open_events(broker.messages(topic))) == dict.fromkeys(range(count), 5)
    with open_sink(parse(address(broker, "new-3", "partition-num=1")), ANYWHERE) as sink:
        sink.write(batch([Change(6, key, b"v") for key in KEYS]))
    assert {event.partition for event in open_events(broker.messages("new-3")) if event.key} == {0}


def test_refusals_when_the_sink_is_opened(broker: KafkaBroker) -> None:
    """Each error has its remedy, and none creates a topic."""
    topic = broker.create_topic(partitions=2)
    for url, error, why in [
        (address(broker, topic, "partition-num=3"), UsageError, "partition-num=3 is more than the 2 partitions"),
        (address(broker, "missing", "auto-create-topic=false"), KafkaRefused, "missing does not exist"),
        ("kafka://127.0.0.1:1/topic", KafkaUnreachable, "127.0.0.1:1 does not answer"),
    ]:
        with pytest.raises(error, match=why) as caught, open_sink(parse(url), ANYWHERE):
            pass
        assert caught.value.hint
    url = address(broker, "missing", "replication-factor=2")
    with open_sink(parse(url), ANYWHERE) as sink, pytest.raises(KafkaRefused, match="missing") as refused:
        sink.resolve(1)
    assert "replication-factor" in refused.value.hint
    assert "missing" not in broker.admin().list_topics(timeout=30).topics


def test_sizes_that_the_topic_allows(broker: KafkaBroker) -> None:
    """Messages respect the topic's limit; a change above it is refused before anything of its batch is sent."""
    topic = broker.create_topic(max_message_bytes="20000")
    with open_sink(parse(address(broker, topic, "max-batch-size=1000")), ANYWHERE) as sink:
        sink.write(batch([Change(ts, b"k", b"x" * 700) for ts in range(1, 200)]))
        with pytest.raises(ConversionUnsupported, match="max-message-bytes"):
            sink.write(batch([Change(200, b"k", b"y"), Change(201, b"k", bytes(20_000))]))
    sizes = [len(message.key() or b"") + len(message.value() or b"") for message in broker.messages(topic)]
    assert 10_000 < max(sizes) < 20_000
    assert [event.ts for event in open_events(broker.messages(topic))] == list(range(1, 200))


def write_until_it_fails(sink: Sink, size: int) -> None:
    """Write values of a size until the sink raises what is not to be retried."""
    deadline, ts = time.monotonic() + 120, 1
    while time.monotonic() < deadline:
        ts += 1
        rows = batch([Change(ts, b"k", bytes(size))])
        with contextlib.suppress(KafkaUnreachable):
            sink.write(rows)


def test_a_topic_whose_limit_was_lowered(broker: KafkaBroker) -> None:
    """A message too large for the broker is an error, and is not retried."""
    topic = broker.create_topic()
    with open_sink(parse(address(broker, topic)), ANYWHERE) as sink:
        sink.write(batch([Change(1, b"k", b"v")]))
        entry = ConfigEntry("max.message.bytes", "1000", incremental_operation=AlterConfigOpType.SET)
        lowered = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        admin = broker.admin()
        admin.incremental_alter_configs([lowered])[lowered].result(60)
        with pytest.raises(KafkaRefused, match="MSG_SIZE_TOO_LARGE") as caught:
            write_until_it_fails(sink, 2000)  # the broker applies the setting a moment later
    assert "max.message.bytes" in caught.value.hint


def test_a_topic_that_was_deleted(broker: KafkaBroker) -> None:
    """The sync ends instead of creating the topic again, which would lack what was deleted."""
    topic = broker.create_topic()
    with open_sink(parse(address(broker, topic)), ANYWHERE, SinkOptions()) as sink:
        sink.write(batch([Change(1, b"k", b"v")]))
        admin = broker.admin()
        admin.delete_topics([topic])[topic].result(60)
        with pytest.raises(KafkaRefused, match=topic) as caught:
            write_until_it_fails(sink, 1)
    assert "from a backup" in caught.value.hint
    assert topic not in broker.admin().list_topics(timeout=30).topics


def kafka_sink(url: str, *, seconds: float = 1.0, stop: list[Exception] | None = None) -> KafkaSink:
    """A sink whose writes wait for so long; ends with an error when there is one in `stop`."""

    def fence() -> None:
        if stop:
            raise stop[0]

    return KafkaSink(parse(url), "id", retry_seconds=seconds, fence=fence, complete_ts=lambda ts: ts)


def patiently(call: Callable[[], object]) -> None:
    """As a sync does while a broker starts."""
    deadline = time.monotonic() + 90
    while True:
        try:
            call()
        except KafkaUnreachable:
            assert time.monotonic() < deadline
        else:
            return


def test_a_broker_that_is_away(broker: KafkaBroker) -> None:
    """A write fails in time; tried again when the broker is back, it brings each change once and in order.

    What waits for a broker when the fence fails is dropped, and sent with a later write.
    """
    stop: list[Exception] = []
    topic, fenced_topic = broker.create_topic(partitions=2), broker.create_topic()
    sink, fenced = kafka_sink(address(broker, topic)), kafka_sink(address(broker, fenced_topic), stop=stop)
    first = batch([Change(ts, KEYS[ts % 9], b"v") for ts in range(1, 100)])
    second = batch([Change(1, b"k", b"v")])
    patiently(lambda: sink.write(first))
    patiently(lambda: fenced.write(second))
    broker.stop()
    first_later = batch([Change(ts, KEYS[ts % 9], b"v") for ts in range(100, 5000)])
    second_later = batch([Change(2, b"k", b"v")])
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(KafkaUnreachable, match="has not acknowledged"):
            sink.write(first_later)
    assert time.monotonic() - began >= 2.0
    assert sink.resolve(99, flush=True) == 99  # and does not wait
    with pytest.raises(KafkaUnreachable):
        fenced.write(second_later)
    stop.append(KafkaDenied("the lease is gone"))
    with pytest.raises(KafkaDenied, match="lease"):
        fenced.write(second_later)
    broker.start()
    patiently(lambda: sink.write(first_later))
    patiently(lambda: sink.resolve(5000))
    sink.close()
    events = open_events(broker.messages(topic))
    for key, changes in by_key(events).items():
        assert [each.ts for each in without_repeats(changes)] == [ts for ts in range(1, 5000) if KEYS[ts % 9] == key]
    assert highest_resolved(events) == {0: 5000, 1: 5000}
    assert [event.ts for event in open_events(broker.messages(fenced_topic)) if event.key] == [1]
    stop.clear()
    patiently(lambda: fenced.write(second_later))
    fenced.close()
    assert [event.ts for event in open_events(broker.messages(fenced_topic)) if event.key] == [1, 2]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Signs the broker's certificate."""
    return Authority(tmp_path_factory.mktemp("authority"), "root")


@pytest.fixture(scope="module")
def secured(authority: Authority) -> Iterator[KafkaBroker]:
    """Users log in there, and may do only what is allowed."""
    with kafka_broker(users={"writer": "secret-word", "reader": "secret-word"}, authority=authority) as broker:
        yield broker


LOGIN = "sasl-user=writer&sasl-password=secret-word"


def test_logins_and_permissions(secured: KafkaBroker, authority: Authority, tmp_path: Path) -> None:
    """SCRAM with and without TLS, and client certificates; wrong passwords, authorities and missing ACLs end with what to do."""
    topic, other = secured.create_topic(), Authority(tmp_path, "other")
    secured.allow("writer", ResourceType.TOPIC, topic, AclOperation.WRITE, AclOperation.DESCRIBE)
    client = authority.issue("client")
    secured.allow("CN=client", ResourceType.TOPIC, topic, AclOperation.WRITE, AclOperation.DESCRIBE)
    plain, tls = (f"kafka://{secured.listener(name)}/{topic}?" for name in ("SASL_PLAINTEXT", "SASL_SSL"))
    mutual = f"kafka://{secured.listener('SSL')}/{topic}?ca={authority.ca}&cert={client.cert}&key={client.key}"
    allowed = [
        f"{plain}{LOGIN}&sasl-mechanism=SCRAM-SHA-256",
        f"{tls}{LOGIN}&sasl-mechanism=SCRAM-SHA-512&ca={authority.ca}",
        mutual,
    ]
    for ts, url in enumerate(allowed, 1):
        with open_sink(parse(url, {}), ANYWHERE) as sink:
            sink.write(batch([Change(ts, b"k", b"v")]))
            sink.resolve(ts, flush=True)
    assert [event.ts for event in open_events(secured.messages(topic)) if event.key] == [1, 2, 3]
    for url, why, hint in [
        (f"{plain}{LOGIN}x&sasl-mechanism=SCRAM-SHA-256", "_AUTHENTICATION", "TIKV_BR_KAFKA_PASSWORD"),
        (f"{tls}{LOGIN}&sasl-mechanism=SCRAM-SHA-512&ca={other.ca}", "certificate", "ca, cert and key"),
        (f"{plain}sasl-user=reader&sasl-password=secret-word&sasl-mechanism=SCRAM-SHA-256", topic, "User:reader"),
    ]:
        with pytest.raises(KafkaDenied, match=why) as caught, open_sink(parse(url, {}), ANYWHERE):
            pass
        assert hint in caught.value.hint
        assert "secret-word" not in f"{caught.value.message} {caught.value.hint}"


def test_a_permission_that_is_only_to_look(secured: KafkaBroker) -> None:
    """The error names the missing ACL for Write, and the topic stays empty."""
    topic = secured.create_topic()
    secured.allow("reader", ResourceType.TOPIC, topic, AclOperation.DESCRIBE)
    login = "sasl-user=reader&sasl-password=secret-word&sasl-mechanism=SCRAM-SHA-256"
    url = f"kafka://{secured.listener('SASL_PLAINTEXT')}/{topic}?{login}"
    with open_sink(parse(url, {}), ANYWHERE) as sink, pytest.raises(KafkaDenied) as caught:
        sink.write(batch([Change(1, b"k", b"v")]))
    assert "Write" in caught.value.hint
    assert secured.messages(topic) == []
