"""How far `tikv-br sync` is behind with a Kafka sink, and what it costs, beside a cluster as sink: in turns, in one run.

``python -m bench.sync_kafka --seconds 60``. Needs the broker of `scripts/install_kafka.sh`, which shares the processors with all else.
A change counts as arrived when a consumer has it.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Sequence
from typing import Self

from confluent_kafka import Consumer, Message, TopicPartition

from bench.sync_lag import RATE, SETTLED, clusters, measure, syncing, wait_for
from tests.integration.kafka_server import KafkaBroker, kafka_broker
from tests.support.lag import Load, Probe, Target
from tikv_br.incremental.kafka import messages
from tikv_br.incremental.kafka.json_protocol import JsonCodec
from tikv_br.incremental.kafka.messages import Change, Codec
from tikv_br.incremental.kafka.open_protocol import OpenCodec

PARTITIONS = 3


class TopicView:
    """The last value of each key of a topic, from when it is entered."""

    def __init__(self, broker: KafkaBroker, topic: str, codec: Codec) -> None:
        self._consumer = Consumer({"bootstrap.servers": broker.address, "group.id": topic})
        self._topic, self._codec = topic, codec
        self._rows: dict[bytes, bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=topic)

    def batch_get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """See `Target.batch_get`."""
        return {key: self._rows[key] for key in keys if key in self._rows}

    def __enter__(self) -> Self:
        self._consumer.assign([TopicPartition(self._topic, number, 0) for number in range(PARTITIONS)])
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._consumer.close()

    def _follow(self) -> None:
        while not self._stop.is_set():
            for message in self._consumer.consume(500, 0.05):
                self._rows.update({each.key: each.value for each in self._changes(message)})

    def _changes(self, message: Message) -> list[Change]:
        if message.error():
            return []
        events = self._codec.decode(messages.KafkaMessage(message.key() or b"", message.value(), _headers(message)))
        return [event for event in events if isinstance(event, Change)]


def _headers(message: Message) -> list[tuple[str, bytes]]:
    return [(name, value) for name, value in dict(message.headers() or []).items() if isinstance(value, bytes)]


def main() -> None:
    """Read the options, and print a line for each sink."""
    parser = argparse.ArgumentParser(prog="bench.sync_kafka", description="Measure how far a sync to Kafka is behind.")
    parser.add_argument("--rate", type=float, default=RATE, help="rows a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which each sink is measured")
    options = parser.parse_args()
    with clusters() as (source, target), kafka_broker() as broker:
        raw = source.raw()

        def run(name: str, sink: str, view: Target) -> None:
            with (
                syncing(source, sink, 0.0) as process,
                Probe(raw, view) as probe,
                Load(raw, options.rate) as load,
            ):
                wait_for(probe, process, SETTLED)
                print(f"{name}: {measure(process, probe, load, options.seconds, 0.0)}", flush=True)

        _run_all(run, target.raw(), f"tikv://{target.pd}", broker)


def _run_all(run: Callable[[str, str, Target], None], cluster: Target, address: str, broker: KafkaBroker) -> None:
    run("cluster", address, cluster)
    codecs: dict[str, Codec] = {"open-protocol": OpenCodec(prefix=b"r\0\0\0"), "json": JsonCodec()}
    for protocol, codec in codecs.items():
        topic = broker.create_topic(partitions=PARTITIONS)
        with TopicView(broker, topic, codec) as view:
            run(f"Kafka, {protocol}", f"kafka://{broker.address}/{topic}?protocol={protocol}", view)


if __name__ == "__main__":
    main()
