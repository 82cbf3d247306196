"""A Kafka broker for tests: a real one, a single node with KRaft, on free ports of 127.0.0.1."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public by the manual, not by __all__
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from tests.support.certificates import Authority, KeyPair
from tests.support.ports import reserved_ports
from tests.support.tools import ROOT, missing

__all__ = ["AclOperation", "KafkaBroker", "ResourceType", "kafka_broker"]

START_TIMEOUT = 120.0
_JARS = ROOT / ".cache" / "kafka"
_HINT = "run scripts/install_kafka.sh"
# Short runs: no time for the optimizing compiler.
_JAVA = ("-Xmx256m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
# The listener that the test itself uses has no credentials, and everything is allowed there.
_LISTENERS = ("PLAINTEXT", "SASL_PLAINTEXT", "SASL_SSL", "SSL")
_WITHOUT_LEADER = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}


class KafkaBroker:
    """A broker of which the data and the ports stay the same when it is started again."""

    def __init__(self, folder: Path, ports: list[int], settings: Mapping[str, str], users: Mapping[str, str]) -> None:
        self._folder = folder
        self._ports = dict(zip(("CONTROLLER", *_LISTENERS), ports, strict=True))
        self._settings = settings
        self._users = users
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """``127.0.0.1:PORT`` of the listener without TLS and credentials."""
        return self.listener("PLAINTEXT")

    def listener(self, name: str) -> str:
        """``127.0.0.1:PORT`` of ``SASL_PLAINTEXT``, ``SASL_SSL`` or ``SSL`` (with certificates of clients)."""
        return f"127.0.0.1:{self._ports[name]}"

    @property
    def log(self) -> Path:
        """Output of the broker on stdout and stderr."""
        return self._folder / "broker.log"

    def format(self) -> None:
        """Write the settings, and prepare the folder of the data."""
        names = ["PLAINTEXT", *(name for name in _LISTENERS[1:] if self._users)]
        listeners = ",".join(f"{name}://{self.listener(name)}" for name in names)
        protocols = ",".join(f"{name}:{name}" for name in names)
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{self.listener('CONTROLLER')}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"{listeners},CONTROLLER://{self.listener('CONTROLLER')}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,{protocols}",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": str(self._folder / "data"),
            "log.index.size.max.bytes": "1048576",
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # How long a broker that was killed must wait before it may come back.
            "broker.session.timeout.ms": "4000",
            "broker.heartbeat.interval.ms": "500",
            "num.network.threads": "1",
            "num.io.threads": "2",
            **self._settings,
        }
        path = self._folder / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        command = [*self._java(), "kafka.tools.StorageTool", "format", "-c", str(path)]
        command += ["--cluster-id", "tikv-br-test-00000000w"]
        for user, password in self._users.items():
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                command += ["--add-scram", f"{mechanism}=[name={user},password={password}]"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=START_TIMEOUT)
        if done.returncode:
            raise RuntimeError(f"cannot format Kafka's folder: {done.stdout}{done.stderr}")

    def start(self) -> None:
        """Start the broker and wait until it serves requests."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._java(), "kafka.Kafka", str(self._folder / "server.properties")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_TIMEOUT
        admin = self.admin()
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"Kafka ended with {self._process.returncode}: {self.log.read_text()[-2000:]}")
            try:
                if admin.list_topics(timeout=1).brokers:
                    return
            except KafkaException:
                time.sleep(0.05)
        raise RuntimeError(f"Kafka did not start: {self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        """Shut the broker down in order."""
        assert self._process
        self._process.terminate()
        self._process.wait(START_TIMEOUT)

    def kill(self) -> None:
        """End the broker at once; its ports then refuse connections."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """Stop and start it, at the same ports and with the same data."""
        self.stop()
        self.start()

    def admin(self) -> AdminClient:
        """A client for administration, which is allowed everything."""
        return AdminClient({"bootstrap.servers": self.address, **_quiet()})

    def create_topic(self, name: str = "", partitions: int = 1, **settings: str) -> str:
        """Create a topic, of a new name if none is given; ``settings`` with ``_`` for ``.``. Returns its name."""
        name = name or f"changes-{uuid.uuid4().hex[:12]}"
        config = {key.replace("_", "."): value for key, value in settings.items()}
        admin = self.admin()
        admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(60)
        # The answer comes from the controller; the broker learns of the topic a moment later.
        deadline = time.monotonic() + START_TIMEOUT
        while len(admin.list_topics(name, timeout=30).topics[name].partitions) != partitions:
            assert time.monotonic() < deadline, f"the topic {name} does not appear"
            time.sleep(0.02)
        return name

    def allow(self, user: str, kind: ResourceType, name: str, *operations: AclOperation) -> None:
        """Allow a user operations on a topic, a group or the cluster (``kafka-cluster``); ``*`` = each."""
        bindings = [
            AclBinding(kind, name, ResourcePatternType.LITERAL, f"User:{user}", "*", operation, AclPermissionType.ALLOW)
            for operation in operations
        ]
        admin = self.admin()
        for future in admin.create_acls(bindings).values():
            future.result(60)

    def messages(self, topic: str) -> list[Message]:
        """Everything that the topic holds now: by partition, each in order of offsets."""
        reader = Consumer(
            {"bootstrap.servers": self.address, "group.id": "test", "enable.auto.commit": False, **_quiet()}
        )
        found: list[Message] = []
        try:
            for number in sorted(reader.list_topics(topic, timeout=30).topics[topic].partitions):
                low, high = _watermarks(reader, TopicPartition(topic, number))
                reader.assign([TopicPartition(topic, number, low)])
                deadline = time.monotonic() + START_TIMEOUT
                while low < high:
                    if (message := reader.poll(1)) is not None:  # one without a value is false
                        assert not message.error(), message.error()
                        found.append(message)
                    # Not the offset of the last message: control records have offsets too.
                    [position] = reader.position([TopicPartition(topic, number)])
                    low = max(low, position.offset)
                    assert time.monotonic() < deadline, f"{topic}/{number} ends at {low}, not at {high}"
        finally:
            reader.close()
        return found

    def _java(self) -> list[str]:
        logging = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        return ["java", *_JAVA, logging, "-cp", f"{_JARS}/*"]


def _watermarks(reader: Consumer, partition: TopicPartition) -> tuple[int, int]:
    """The first offset and the next one. A broker that has just started, or made the topic, does not know for a moment that it leads it."""
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            low, high = reader.get_watermark_offsets(partition, timeout=30)
        except KafkaException as error:
            if error.args[0].code() not in _WITHOUT_LEADER or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return low, high


@contextmanager
def kafka_broker(
    *, users: Mapping[str, str] | None = None, authority: Authority | None = None, **settings: str
) -> Iterator[KafkaBroker]:
    """Run a broker, with ``settings`` of its own (``_`` for ``.``).

    With ``users`` (names and passwords of SCRAM) and an ``authority`` it has listeners for them, and users may do only what
    `KafkaBroker.allow` allows.
    """
    if not shutil.which("java") or not (_JARS / ".version").exists():
        missing(f"no Kafka: {_HINT}")
    own = {name.replace("_", "."): value for name, value in settings.items()}
    with tempfile.TemporaryDirectory(prefix="kafka-") as name, reserved_ports(1 + len(_LISTENERS)) as ports:
        folder = Path(name)
        if users:
            assert authority
            own = _security(folder, authority, authority.issue("kafka")) | own
        broker = KafkaBroker(folder, ports, own, users or {})
        broker.format()
        try:
            broker.start()
            yield broker
        finally:
            broker.kill()


def _security(folder: Path, authority: Authority, pair: KeyPair) -> dict[str, str]:
    identity = folder / "identity.pem"
    identity.write_bytes(pair.key.read_bytes() + pair.cert.read_bytes())
    login = {
        f"listener.name.{listener}.{mechanism}.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        )
        for listener in ("sasl_plaintext", "sasl_ssl")
        for mechanism in ("scram-sha-256", "scram-sha-512")
    }
    return login | {
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(identity),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.ca),
        "listener.name.ssl.ssl.client.auth": "required",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }


def _quiet() -> dict[str, Any]:
    """No lines on stderr about a broker that is not there yet."""
    return {"log_level": 0}
