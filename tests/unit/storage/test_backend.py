from __future__ import annotations

from pathlib import Path

import pytest

from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import StorageDenied
from tikv_br.storage.credentials import below, strip_names, to_backend
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
    """Credentials and region of the AWS chain are sent, as the Go tool does."""
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
    """Without credentials the request to send them is an error."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/none")
    with pytest.raises(StorageDenied, match="no S3 credentials"):
        to_backend(parse("s3://bkt/p?region=r"))
    assert to_backend(parse("s3://bkt/p"), send_credentials=False).s3.region == "us-east-1"


AZURE = "azure://container/a/b?endpoint=http://h:1/acc&account-name=acc&access-tier=Cool"


def test_azure_with_credentials() -> None:
    """The account's key, or the token, go to the stores with all that they need."""
    said = brpb_pb2.AzureBlobStorage(
        endpoint="http://h:1/acc", bucket="container", prefix="a/b", storage_class="Cool", account_name="acc"
    )
    key = to_backend(parse(f"{AZURE}&account-key=aHVzaA==")).azure_blob_storage
    assert (key.shared_key, key.access_sig) == ("aHVzaA==", "")
    token = to_backend(parse(f"{AZURE}&sas-token=sv=1%26sig=x")).azure_blob_storage
    assert (token.shared_key, token.access_sig) == ("", "sv=1&sig=x")
    own = to_backend(parse(f"{AZURE}&account-key=aHVzaA=="), send_credentials=False).azure_blob_storage
    for message in (key, token):
        message.ClearField("shared_key")
        message.ClearField("access_sig")
    assert key == token == own == said


def test_azure_credentials_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in Azure's variables are sent; an identity's token cannot be, as the message has no field for one."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "envacc")
    with pytest.raises(StorageDenied, match="only an Azure account key or SAS token can be sent") as caught:
        to_backend(parse("azure://container/p"))
    assert "--no-send-credentials-to-tikv" in caught.value.hint
    monkeypatch.setenv("AZURE_STORAGE_KEY", "ZW52")
    message = to_backend(parse("azure://container/p")).azure_blob_storage
    assert (message.account_name, message.shared_key) == ("envacc", "ZW52")


def test_gcs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The content of a key file is sent, of a flag or the environment; without one it is said what to do."""
    place = parse("gcs://bkt/a/b?endpoint=http://h:1&storage-class=NEARLINE")
    own = brpb_pb2.GCS(endpoint="http://h:1", bucket="bkt", prefix="a/b", storage_class="NEARLINE")
    assert to_backend(place, send_credentials=False) == brpb_pb2.StorageBackend(gcs=own)
    with pytest.raises(StorageDenied, match="only a key file can be sent") as caught:
        to_backend(place)
    assert "--gcs.credentials-file" in caught.value.hint
    key = tmp_path / "key.json"
    key.write_text('{"type": "service_account"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    own.credentials_blob = key.read_text()
    assert to_backend(place).gcs == own
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    assert to_backend(parse(f"gcs://bkt/p?credentials-file={key}")).gcs.credentials_blob == key.read_text()


def test_names_are_stripped_from_messages_of_stores() -> None:
    """A container's name cannot decide what a store's message means."""
    backend = to_backend(parse("azure://not-found/p?account-name=acc"), send_credentials=False)
    assert strip_names("container not-found: no answer", backend) == "container : no answer"


@pytest.mark.parametrize(
    "url",
    [
        "local:///backup/1",
        f"s3://bkt/p?region=r&{KEYS}",
        f"s3://bkt?region=r&{KEYS}",
        f"{AZURE}&account-key=aHVzaA==",
        "gcs://bkt/p?credentials-file=KEYFILE",
    ],
)
def test_places_below_need_no_credentials_again(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of a folder is that of the location with another path, and nothing is looked up for it."""
    (tmp_path / "key.json").write_text("{}")
    location = parse(url.replace("KEYFILE", str(tmp_path / "key.json")))
    folder = location.child("run/0")
    base, expected = to_backend(location), to_backend(folder)

    def no_lookup(*_asked: object) -> None:
        raise AssertionError

    for name in ("credential_source", "azure_credentials", "_key_file"):
        monkeypatch.setattr(f"tikv_br.storage.credentials.{name}", no_lookup)
    assert below(base, folder) == expected
    assert base != expected
