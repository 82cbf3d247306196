from __future__ import annotations

import pytest

from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import StorageDenied
from tikv_br.storage.credentials import to_backend
from tikv_br.storage.url import parse

KEYS = "access-key=AKIA&secret-access-key=hush&session-token=token"


def test_local() -> None:
    """Stores get the very path."""
    assert to_backend(parse("local:///backup/1/")) == brpb_pb2.StorageBackend(local=brpb_pb2.Local(path="/backup/1"))


def test_s3_with_credentials() -> None:
    """All that stores need to reach the bucket as we do, credentials included, survives the wire."""
    url = (
        f"s3://bkt/a/b?endpoint=http://h:1&region=r&storage-class=IA&sse=aws:kms&sse-kms-key-id=k&provider=ceph&{KEYS}"
    )
    message = brpb_pb2.StorageBackend.FromString(to_backend(parse(url)).SerializeToString())
    assert message.s3 == brpb_pb2.S3(
        endpoint="http://h:1",
        region="r",
        bucket="bkt",
        prefix="a/b",
        storage_class="IA",
        sse="aws:kms",
        sse_kms_key_id="k",
        access_key="AKIA",
        secret_access_key="hush",
        session_token="token",
        force_path_style=True,
        provider="ceph",
    )


def test_s3_without_sending_credentials() -> None:
    """On request stores get none and use their own."""
    message = to_backend(parse(f"s3://bkt/p?provider=alibaba&region=r&{KEYS}"), send_credentials=False).s3
    assert (message.access_key, message.secret_access_key, message.session_token) == ("", "", "")
    assert not message.force_path_style


def test_credentials_and_region_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the AWS chain finds is sent, as the Go tool does; the region comes from there too."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "env-token")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    message = to_backend(parse("s3://bkt/p")).s3
    assert (message.access_key, message.secret_access_key, message.session_token, message.region) == (
        "env-key",
        "env-secret",
        "env-token",
        "eu-north-1",
    )


def test_no_credentials_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked to send credentials where there are none, we say so instead of sending empty ones."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/none")
    with pytest.raises(StorageDenied, match="no S3 credentials"):
        to_backend(parse("s3://bkt/p?region=r"))
    assert to_backend(parse("s3://bkt/p"), send_credentials=False).s3.region == "us-east-1"
