from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tikv_br.environment import install_hint
from tikv_br.errors import MachineUnfit, UsageError
from tikv_br.incremental.kafka.client import client_config, kafka
from tikv_br.incremental.kafka.messages import KeyEncoding, MessageEncoding, Protocol
from tikv_br.incremental.kafka.url import KafkaUrl, parse
from tikv_br.incremental.sinks.url import check_shared
from tikv_br.incremental.sinks.url import parse as parse_sink
from tikv_br.redaction import redact
from tikv_br.storage.crypter import SecretText

BARE = "kafka://h:9092/topic"


def test_defaults_are_those_of_tikv_cdc() -> None:
    """An address without parameters."""
    assert parse(BARE, {}) == KafkaUrl(
        brokers=("h:9092",),
        topic="topic",
        protocol=Protocol.OPEN,
        partition_num=0,
        replication_factor=1,
        max_message_bytes=10_485_760,
        max_batch_size=16,
        compression="none",
        auto_create_topic=True,
        tls=False,
    )


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("kafka://a,b:1,[::1]:2/t", {"brokers": ("a:9092", "b:1", "[::1]:2"), "topic": "t"}),
        ("kafka://h:9092/my.topic_-1/", {"topic": "my.topic_-1"}),
        (f"{BARE}?protocol=default", {"protocol": Protocol.OPEN}),
        (f"{BARE}?protocol=json&encoding=hex", {"protocol": Protocol.JSON, "encoding": MessageEncoding.HEX}),
        (
            f"{BARE}?protocol=json&encoding=json&key-encoding=text",
            {"encoding": MessageEncoding.JSON, "key_encoding": KeyEncoding.TEXT},
        ),
        (f"{BARE}?partition-num=7&replication-factor=3", {"partition_num": 7, "replication_factor": 3}),
        (f"{BARE}?max-message-bytes=1048576&max_batch_size=4", {"max_message_bytes": 1 << 20, "max_batch_size": 4}),
        (f"{BARE}?compression=ZSTD&kafka-client-id=me.1", {"compression": "zstd", "kafka_client_id": "me.1"}),
        (f"{BARE}?auto-create-topic=F&kafka-version=2.4.0", {"auto_create_topic": False}),
        (f"{BARE}?resolved-interval=250ms", {"resolved_interval": 0.25}),
        (f"{BARE}?ca=/a/b&cert=c&key=d%20e", {"tls": True, "ca": "/a/b", "cert": "c", "key": "d e"}),
        (f"{BARE}?tls=true", {"tls": True}),
        (
            f"{BARE}?sasl-user=u&sasl-password=p%26&sasl-mechanism=scram-sha-512",
            {"sasl_user": "u", "sasl_password": SecretText("p&"), "sasl_mechanism": "SCRAM-SHA-512"},
        ),
        (
            "kafka://u:p%40@h:9092/topic?sasl-mechanism=SCRAM-SHA-256",
            {"sasl_user": "u", "sasl_password": SecretText("p@"), "sasl_mechanism": "SCRAM-SHA-256"},
        ),
    ],
)
def test_reads_parameters(url: str, expected: dict[str, object]) -> None:
    """Each parameter is the field of its name; the text gives the same address again, but for the password."""
    found = parse(url, {})
    assert {name: getattr(found, name) for name in expected} == expected
    password = found.sasl_password.reveal()
    assert parse(str(found), {"TIKV_BR_KAFKA_PASSWORD": password} if password else {}) == found


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("kafka://h:9092", "topic"),
        ("kafka://h:9092/?protocol=json", "topic"),
        ("kafka:///topic", "broker"),
        ("kafka://h:x/topic", "h:x"),
        ("kafka://h:99999/topic", "99999"),
        ("kafka://h:9092/a/b", "a/b"),
        (f"{BARE}?protocol=avro", "protocol=avro"),
        (f"{BARE}?protocol=canal-json", "protocol=canal-json"),
        (f"{BARE}?protocol=json&encoding=rot13", "encoding=rot13"),
        (f"{BARE}?encoding=hex", "requires protocol=json"),
        (f"{BARE}?protocol=json&key-encoding=utf8", "key-encoding=utf8"),
        (f"{BARE}?key-encoding=text", "requires protocol=json"),
        (f"{BARE}?partition-num=0", "partition-num=0"),
        (f"{BARE}?partition-num=-1", "partition-num=-1"),
        (f"{BARE}?max-message-bytes=1MB", "max-message-bytes=1MB"),
        (f"{BARE}?max-batch-size=0", "max-batch-size=0"),
        (f"{BARE}?compression=brotli", "compression=brotli"),
        (f"{BARE}?kafka-client-id=a%20b", "kafka-client-id"),
        (f"{BARE}?kafka-version=new", "kafka-version"),
        (f"{BARE}?auto-create-topic=maybe", "auto-create-topic=maybe"),
        (f"{BARE}?resolved-interval=1", "resolved-interval=1"),
        (f"{BARE}?parttion-num=3", "parttion-num"),
        (f"{BARE}?tls=true&tls=false", "twice"),
        (f"{BARE}?protocol=json&key-prefix=none", "requires protocol=open-protocol"),
        (f"{BARE}?cert=a", "together"),
        (f"{BARE}?tls=false&ca=a", "contradicts"),
        (f"{BARE}?sasl-user=u&sasl-mechanism=SCRAM-SHA-256", "password for Kafka is missing"),
        (f"{BARE}?sasl-password=p", "user for Kafka is missing"),
        (f"{BARE}?sasl-mechanism=SCRAM-SHA-256", "requires a login"),
        (f"{BARE}?sasl-user=u&sasl-password=p", "sasl-mechanism is missing"),
        (f"{BARE}?sasl-user=u&sasl-password=p&sasl-mechanism=GSSAPI", "GSSAPI"),
        (f"{BARE}?sasl-user=u&sasl-password=p&sasl-mechanism=PLAIN", "which others could read"),
        ("kafka://[::1/topic", "does not parse"),
        ("kafka://user:hidden@\u2100/topic", "does not parse"),
    ],
)
def test_refuses_what_is_no_address(url: str, why: str) -> None:
    """Each with the value that is wrong, and as the address of a sink with the name of the flag."""
    with pytest.raises(UsageError, match=why) as caught:
        parse(url, {})
    assert caught.value.hint or why == "together"
    with pytest.raises(UsageError, match=f"--sink: .*{why}"):
        parse_sink(url)
    assert "hidden" not in caught.value.message


def test_secrets_from_the_environment() -> None:
    """User and password need not be in the address; those in it take precedence."""
    environ = {"TIKV_BR_KAFKA_USER": "env", "TIKV_BR_KAFKA_PASSWORD": "hidden"}
    found = parse(f"{BARE}?sasl-mechanism=SCRAM-SHA-256", environ)
    assert (found.sasl_user, found.sasl_password.reveal(), found.password_in_address) == ("env", "hidden", False)
    given = parse("kafka://u:p@h:9092/topic?sasl-mechanism=SCRAM-SHA-256", environ)
    assert (given.sasl_user, given.sasl_password.reveal(), given.password_in_address) == ("u", "p", True)


@pytest.mark.parametrize(
    "url",
    [
        "kafka://u:hunter2@h/t?sasl-mechanism=SCRAM-SHA-256",
        f"{BARE}?sasl-user=u&sasl-password=hunter2&sasl-mechanism=SCRAM-SHA-256",
    ],
)
def test_the_password_is_never_shown(url: str) -> None:
    """Neither by the target, nor where the address itself is logged; a changefeed, which etcd keeps, takes none."""
    found = parse(url, {})
    for text in (str(found), repr(found), redact(url), redact(str(sys.argv) + url)):
        assert "hunter2" not in text
    with pytest.raises(UsageError, match="password") as caught:
        check_shared(parse_sink(url))
    assert "TIKV_BR_KAFKA_PASSWORD" in caught.value.hint
    check_shared(parse_sink(BARE))


@pytest.mark.parametrize("password", ["hun/ter2", "hun?ter2", "hun#/ter2"])
def test_a_password_that_is_not_escaped_is_not_shown(password: str) -> None:
    """The address cannot be read, and the message does not repeat it."""
    with pytest.raises(UsageError) as caught:
        parse(f"kafka://user:{password}@h:9092/topic?sasl-mechanism=SCRAM-SHA-256", {})
    assert "hun" not in f"{caught.value.message} {caught.value.hint}"


def test_configuration_of_librdkafka(tmp_path: Path) -> None:
    """TLS and SCRAM as librdkafka calls them; a file that cannot be read is said before a connection is made."""
    assert client_config(parse("kafka://a,b:1/t", {}))["bootstrap.servers"] == "a:9092,b:1"
    assert client_config(parse(BARE, {}))["security.protocol"] == "plaintext"
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text("pem")
    files = f"ca={tmp_path}/ca&cert={tmp_path}/cert&key={tmp_path}/key"
    config = client_config(parse(f"{BARE}?{files}&sasl-user=u&sasl-password=p&sasl-mechanism=SCRAM-SHA-512", {}))
    assert {name: value for name, value in config.items() if name.startswith(("ssl", "sasl", "security"))} == {
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": f"{tmp_path}/ca",
        "ssl.certificate.location": f"{tmp_path}/cert",
        "ssl.key.location": f"{tmp_path}/key",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "u",
        "sasl.password": "p",
    }
    with pytest.raises(UsageError, match="ca=/nowhere"):
        client_config(parse(f"{BARE}?ca=/nowhere", {}))


def test_a_missing_client_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MachineUnfit, match="confluent_kafka, which is not installed") as caught:
        kafka()
    assert caught.value.hint == install_hint("confluent_kafka")
