"""Secrets by kind of setting: those of Spark, of Hadoop's clients of the clouds, of obstore, and of Kafka's clients."""

from __future__ import annotations

import json

import pytest

from tikv_br.cli.main import run
from tikv_br.redaction import redact, secrets_in

SECRET = "aGlkZGVu+/=="
HADOOP_AWS = (
    "fs.s3a.access.key fs.s3a.secret.key fs.s3a.session.token fs.s3a.encryption.key fs.s3a.server-side-encryption.key "
    "fs.s3a.proxy.password fs.s3a.bucket.backups.access.key fs.s3a.bucket.backups.secret.key fs.s3a.bucket.backups.session.token"
)
HADOOP_AZURE = (
    "fs.azure.account.key.acct.dfs.core.windows.net fs.azure.account.key.acct.blob.core.windows.net "
    "fs.azure.sas.container.acct.blob.core.windows.net fs.azure.sas.fixed.token.acct.dfs.core.windows.net fs.azure.sas.fixed.token "
    "fs.azure.account.oauth2.client.secret fs.azure.account.oauth2.client.secret.acct.dfs.core.windows.net "
    "fs.azure.account.oauth2.user.password fs.azure.account.oauth2.refresh.token "
    "fs.azure.encryption.encoded.client-provided-key.acct.dfs.core.windows.net fs.adl.oauth2.credential fs.adl.oauth2.refresh.token"
)
HADOOP_GCS = (
    "fs.gs.auth.service.account.private.key fs.gs.auth.client.secret fs.gs.auth.refresh.token fs.gs.encryption.key "
    "fs.gs.proxy.password google.cloud.auth.client.secret google.cloud.auth.service.account.private.key"
)
HADOOP_OTHERS = "fs.oss.accessKeySecret fs.cosn.userinfo.secretKey fs.obs.secret.key ssl.server.keystore.password"
SPARK = (
    "spark.authenticate.secret spark.ssl.keyPassword spark.ssl.keyStorePassword spark.ssl.ui.trustStorePassword "
    "spark.io.encryption.keygen.secret spark.kubernetes.authenticate.oauthToken spark.kubernetes.authenticate.driver.oauthToken "
    "spark.hadoop.javax.jdo.option.ConnectionPassword spark.executorEnv.AWS_SECRET_ACCESS_KEY"
)
OBJECT_STORE = (
    "aws_access_key_id access_key_id aws_secret_access_key secret_access_key aws_session_token session_token aws_token "
    "aws_sse_customer_key_base64 azure_storage_account_key azure_storage_access_key azure_storage_master_key account_key master_key "
    "azure_client_secret azure_storage_client_secret client_secret azure_storage_sas_key azure_storage_sas_token sas_key sas_token "
    "azure_storage_token bearer_token azure_fabric_session_token azure_storage_encryption_key google_service_account_key "
    "service_account_key google_bearer_token AZURE_STORAGE_KEY AZURE_STORAGE_CONNECTION_STRING AWS_CONTAINER_AUTHORIZATION_TOKEN"
)
LIBRDKAFKA = (
    "ssl.key.password ssl.key.pem ssl_key ssl.keystore.password sasl.password sasl.oauthbearer.config sasl.oauthbearer.client.secret "
    "sasl.oauthbearer.assertion.private.key.pem sasl.oauthbearer.assertion.private.key.passphrase"
)
KAFKA_OTHERS = (
    "sasl.jaas.config ssl.truststore.password ssl.keystore.key basic.auth.user.info schema.registry.basic.auth.user.info "
    "bearer.auth.token bearer.auth.client.secret sasl.login.oauthbearer.client.credentials.client.secret"
)
ALL = [HADOOP_AWS, HADOOP_AZURE, HADOOP_GCS, HADOOP_OTHERS, SPARK, OBJECT_STORE, LIBRDKAFKA, KAFKA_OTHERS]
"""From the documentation of hadoop-aws, hadoop-azure and the GCS connector, Spark's security page, object_store's keys of configuration, and
librdkafka's CONFIGURATION.md."""
PUBLIC = (
    "fs.s3a.endpoint fs.s3a.aws.credentials.provider fs.s3a.encryption.algorithm fs.s3a.connection.timeout fs.azure.account.auth.type "
    "fs.azure.account.oauth2.client.endpoint fs.azure.sas.token.provider.type spark.executor.memory spark.sql.shuffle.partitions "
    "sasl.mechanism sasl.username sasl.oauthbearer.token.endpoint.url ssl.ca.location ssl.key.location security.protocol key.serializer "
    "crypter.key-file heartbeat-url-file key-format key-column user-key state-dir gcs.credentials-file sse-kms-key-id keyspace "
    "fs.gs.auth.service.account.json.keyfile start-key ssl.keystore.location"
)


@pytest.mark.parametrize("name", " ".join(ALL).split())
def test_secret_settings(name: str) -> None:
    """In each notation in which settings are written, with and without Spark's prefix."""
    for prefix in ("", "spark.hadoop."):
        setting = prefix + name
        for text in (
            f"{setting}={SECRET}",
            f"--spark-conf {setting}={SECRET} --pd x",
            f"spark-conf={setting}={SECRET}",
            json.dumps({setting: SECRET, "region": "eu"}),
            repr({setting: SECRET}),
            f"kafka://host:9092/topic?{setting}={SECRET}&partitions=3",
        ):
            assert SECRET not in redact(text), text
            assert secrets_in(text), text
            assert redact(text).count("***") == 1, text


@pytest.mark.parametrize("name", PUBLIC.split())
def test_public_settings(name: str) -> None:
    """What only describes a secret, and other settings, stay readable."""
    text = f"--spark-conf spark.hadoop.{name}=value {name}=value"
    assert redact(text) == text
    assert not secrets_in(text)


@pytest.mark.parametrize(
    "text",
    [
        f"kafka://user:{SECRET}@host:9092/topic",
        "kafka://user:with/hidden@host:9092/topic?partitions=3",
        "kafka://user:with@hidden@host:9092/topic",
        "KAFKA://user:hidden@host/topic",
        "user:hidden@[::1]:9092",
        "-----BEGIN PRIVATE KEY-----\nMIIhidden\nhidden==\n-----END PRIVATE KEY-----\n",
        '{"private_key": "-----BEGIN RSA PRIVATE KEY-----\\nMIIhidden"}',
        'org.apache.PlainLoginModule required username="u" password="hidden";',
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hidden;EndpointSuffix=x",
    ],
)
def test_other_forms(text: str) -> None:
    """User info of Kafka's addresses, private keys, JAAS and connection strings."""
    assert "hidden" not in redact(text)
    assert SECRET not in redact(text)
    assert "***" in redact(text)


@pytest.mark.parametrize(
    "part", ["a", "a.b-", "%", "a:", "a=", "secret=", "kafka://", "://", "x:y@", "password ", "-----BEGIN "]
)
def test_a_long_text_of_others_takes_no_long_time(part: str) -> None:
    """A message of a server, or a name from a file, of 200,000 characters: with twice as many it took four times as long, or no stack was deep enough."""
    text = part * (200_000 // len(part))
    assert "hidden" not in redact(f"{text} secret_key=hidden")
    assert secrets_in(f"{text} secret_key=hidden")[-1] == "hidden"


@pytest.mark.parametrize("value", ["hidden", "hid,den", "hid'den", 'hid"den', "hid den", "hid&den", "hid=den"])
def test_config_show_masks_settings_of_spark(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config show`, from flags and variables: whole values, also such that contain what ends a value elsewhere."""
    name = "spark.hadoop.fs.azure.account.key.acct.dfs.core.windows.net"
    for arguments in (["--spark-conf", f"{name}={value}"], []):
        assert run(["config", "show", "load", "raw", "--output", "json", *arguments]) == 0
        out = capsys.readouterr().out
        assert f"{name}=***" in out
        assert "hid" not in next(line for line in out.splitlines() if name in line)
        monkeypatch.setenv("TIKV_BR_SPARK_CONF", f"{name}={value.replace(' ', '')}")


@pytest.mark.parametrize("password", ["hidden", "pass/hidden", "pass@hidden", "%2Fhidden"])
def test_config_show_masks_addresses_of_kafka(
    password: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passwords in addresses of Kafka, and in their parameters."""
    for url in (f"kafka://user:{password}@host:9092/t", f"kafka://host:9092/t?sasl-password={password}"):
        assert run(["config", "show", "sync", "--sink", url]) == 0
        out = capsys.readouterr().out
        assert "hidden" not in out
        assert "***" in out
