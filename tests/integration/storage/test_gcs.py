"""Google Cloud Storage: the conformance suite on fake-gcs-server; credentials, storage classes, and failures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.gcs_server import GcsServer, gcs_server
from tests.integration.storage.scripted import listing, scripted
from tests.integration.storage_suite import StorageSuite, stream
from tests.support.ports import reserved_ports
from tikv_br.errors import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageObjectMissing,
    StorageUnreachable,
    TikvBrError,
    UsageError,
)
from tikv_br.storage.cloud import PART_SIZE
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

_prefixes = (f"prefix/{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """The server of all tests."""
    with gcs_server(tmp_path_factory.mktemp("gcs")) as running:
        yield running


class TestFakeGcsServer(StorageSuite):
    """fake-gcs-server, by the translator of the XML API."""

    @pytest.fixture
    def location(self, server: GcsServer) -> StorageLocation:
        """A prefix that no other test uses."""
        return server.location(next(_prefixes))

    def test_another_client_sees_prefix_and_name(self, server: GcsServer, location: StorageLocation) -> None:
        """An object is under prefix/name, with the bytes written: stores and the Go tool will look for it there."""
        open_store(location).put("1/4_2_default.sst", b"content")
        assert server.stored(location.path) == {f"{location.path}/1/4_2_default.sst": b"content"}


@pytest.mark.parametrize("size", [10, 2 * PART_SIZE])
def test_storage_class_is_asked_for(server: GcsServer, size: int) -> None:
    """`storage-class` is sent with small and with multipart objects."""
    prefix = next(_prefixes)
    stream(open_store(server.location(prefix, storage_class="NEARLINE")), "object", 1, size)
    assert server.classes[f"{prefix}/object"] == "NEARLINE"


def test_application_default_credentials(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """GOOGLE_SERVICE_ACCOUNT, one of the variables of obstore's chain, is used without a file in the URL; also in a task."""
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(server.credentials))
    store = open_store(server.location(next(_prefixes), credentials_file=""))
    store.put("object", b"x")
    assert pickle.loads(pickle.dumps(store)).get("object") == b"x"


def test_credentials_files_that_are_none(server: GcsServer, tmp_path: Path) -> None:
    """A missing file, and one that is no key, are said by name before anything is sent, and not shown."""
    with pytest.raises(StorageDenied, match=r"missing\.json cannot be read: No such file"):
        open_store(server.location("p", credentials_file=str(tmp_path / "missing.json")))
    broken = tmp_path / "broken.json"
    broken.write_text("hush")
    with pytest.raises(StorageDenied, match=r"broken\.json is not JSON") as caught:
        open_store(server.location("p", credentials_file=str(broken)))
    assert "hush" not in str(caught.value.to_json())


@pytest.mark.parametrize("variable", [False, True], ids=["flag", "application default"])
@pytest.mark.parametrize(
    "key",
    [
        {"type": "service_account", "client_email": "a@b", "private_key": "hush", "private_key_id": "1"},
        {"type": "external_account"},
        {},
    ],
)
def test_keys_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: dict[str, str], variable: bool
) -> None:
    """JSON that is no key of a service account is StorageDenied, and not shown, from wherever it comes."""
    file = tmp_path / "key.json"
    file.write_text(json.dumps(key))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file) if variable else "/nowhere")
    url = "gcs://bucket/p?" + ("" if variable else f"credentials-file={file}")
    with scripted((200, ""), url=url) as location, pytest.raises(StorageDenied, match="credential") as caught:
        open_store(location).get("object")
    assert "hush" not in str(caught.value.to_json())
    assert "--gcs.credentials-file" in caught.value.hint


def test_a_default_key_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    with (
        scripted((200, ""), url="gcs://bucket/p?") as location,
        pytest.raises(StorageDenied, match=r"/nowhere/key\.json"),
    ):
        open_store(location).get("object")


@pytest.mark.parametrize(
    ("status", "code", "kind", "sentence"),
    [
        (401, "AuthenticationRequired", StorageDenied, "the access token is not valid"),
        (403, "AccessDenied", StorageDenied, "the credentials lack the permission"),
        (403, "UserProjectAccountProblem", StorageDenied, "billing account is disabled"),
        (400, "InvalidBucketName", UsageError, "refuses the bucket name 'bucket'"),
        (412, "PreconditionFailed", StorageConflict, "already exists"),
        (429, "SlowDown", StorageUnreachable, "429 SlowDown"),
        (507, "InsufficientStorage", StorageFull, "507"),
        (501, "NotImplemented", StorageError, "501 NotImplemented, said the script"),
    ],
)
def test_answers_and_their_classes(
    server: GcsServer, status: int, code: str, kind: type[TikvBrError], sentence: str
) -> None:
    """Google's answers to a conditional write, which fake-gcs-server never sends, have their class and sentence."""
    url = f"gcs://bucket/p?credentials-file={server.credentials}"
    with scripted((404, "NoSuchKey"), (status, code), url=url) as location:
        patient = dataclasses.replace(location, s3=structs.replace(location.s3, patience=1.0))
        with pytest.raises(TikvBrError, match=sentence) as caught:
            open_store(patient).put_if_absent("object", b"x")
    assert caught.value.exit_code == kind.exit_code


@pytest.mark.parametrize("kind", ["plain", "one page", "no tokens", "silent", "one page, silent"])
def test_listings_are_whole(server: GcsServer, kind: str) -> None:
    """27 of 27 objects, also of a server or proxy that ends its listing after a page, whether it says so or not."""
    with listing(kind, f"gcs://bucket/p?credentials-file={server.credentials}") as location:
        names = [info.name.removeprefix("f/") for info in open_store(location).list("f")]
    assert names == [f"{number:02}" for number in range(27)]


@pytest.mark.parametrize("kind", ["no tokens, ignores start-after", "silent, ignores start-after"])
def test_listings_that_cannot_be_whole(server: GcsServer, kind: str) -> None:
    """Where the rest cannot be asked for, the listing is an error that names the server."""
    with (
        listing(kind, f"gcs://bucket/p?credentials-file={server.credentials}") as location,
        pytest.raises(StorageError, match=r"http://127\.0\.0\.1:\d+ does not list the bucket 'bucket' as Google does"),
    ):
        list(open_store(location).list("f"))


def test_missing_bucket(server: GcsServer) -> None:
    """A bucket that does not exist is said by name."""
    store = open_store(server.location("p", bucket="no-such-bucket"))
    for call in (lambda: store.get("object"), lambda: store.stat("object"), lambda: store.put("object", b"x")):
        with pytest.raises(StorageObjectMissing, match="bucket 'no-such-bucket' does not exist"):
            call()


def test_a_refused_connection_is_unreachable(server: GcsServer) -> None:
    """A refused connection is StorageUnreachable, with endpoint and cause."""
    with reserved_ports(1) as [port]:
        endpoint = f"http://127.0.0.1:{port}"
        location = parse(f"gcs://bucket/p?endpoint={endpoint}&credentials-file={server.credentials}")
        with pytest.raises(StorageUnreachable, match=f"{endpoint} does not answer: connection refused"):
            open_store(location).get("object")
