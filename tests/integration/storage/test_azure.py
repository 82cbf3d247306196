"""Azure Blob Storage: the conformance suite on Azurite; credentials, access tiers, and each failure with its message."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
from collections.abc import Callable

import pytest

from tests.integration.cloud_servers import ACCOUNT, ACCOUNT_KEY, CONTAINER, AzureServer
from tests.integration.storage_suite import StorageSuite, stream
from tests.support.ports import reserved_ports
from tikv_br.errors import (
    StorageDenied,
    StorageError,
    StorageObjectMissing,
    StorageUnreachable,
    TikvBrError,
    UsageError,
)
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.cloud import PART_SIZE
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

_prefixes = (f"prefix/{number}" for number in itertools.count())
WRONG_KEY = "d3Jvbmcga2V5"


class TestAzurite(StorageSuite):
    """Azurite: checks signatures and conditions."""

    @pytest.fixture
    def location(self, azurite: AzureServer) -> StorageLocation:
        """A prefix that no other test uses."""
        return azurite.location(next(_prefixes))

    def test_another_client_sees_prefix_and_name(self, azurite: AzureServer, location: StorageLocation) -> None:
        """An object is under prefix/name, with the bytes written: stores and the Go tool will look for it there."""
        info = open_store(location).put("1/4_2_default.sst", b"content")
        headers, body = azurite.request("GET", f"{CONTAINER}/{location.path}/1/4_2_default.sst")
        assert body == b"content"
        assert headers["etag"].strip('"') == info.etag

    def test_aborted_uploads_leave_no_object(self, azurite: AzureServer, location: StorageLocation) -> None:
        """Blocks that are not committed belong to no object; Azure drops them after a week."""
        with open_store(location).open_writer("large") as writer:
            writer.write(bytes(4 * PART_SIZE))
        _headers, listing = azurite.request("GET", CONTAINER, f"restype=container&comp=list&prefix={location.path}/")
        assert b"<Name>" not in listing


@pytest.mark.parametrize("size", [10, pytest.param(2 * PART_SIZE, marks=pytest.mark.slow)])
def test_access_tier_reaches_the_server(azurite: AzureServer, size: int) -> None:
    """`access-tier` is set on small and on multipart objects."""
    prefix = next(_prefixes)
    stream(open_store(azurite.location(prefix, access_tier="Cool")), "object", 1, size)
    headers, _body = azurite.request("HEAD", f"{CONTAINER}/{prefix}/object")
    assert (headers["x-ms-access-tier"], headers["content-length"]) == ("Cool", str(size))


@pytest.mark.parametrize(
    "variables",
    [
        {"AZURE_STORAGE_ACCOUNT": ACCOUNT, "AZURE_STORAGE_KEY": ACCOUNT_KEY},
        {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY},
    ],
)
def test_credentials_from_the_environment(
    azurite: AzureServer, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """Without credentials in the URL those of the variables that Azure's tools read are used, also in a task."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store = open_store(azurite.location(next(_prefixes), account_name="", account_key=""))
    store.put("object", b"x")
    assert pickle.loads(pickle.dumps(store)).get("object") == b"x"


def test_sas_token(azurite: AzureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SAS token in the URL is preferred to a key in the environment, and its rights hold."""
    monkeypatch.setenv("AZURE_STORAGE_KEY", WRONG_KEY)
    prefix = next(_prefixes)
    writer = open_store(azurite.location(prefix, account_key="", sas_token="?" + azurite.sas_token("rwdlac")))
    writer.put("object", b"x")
    assert [info.name for info in writer.list()] == ["object"]
    reader = open_store(azurite.location(prefix, account_key="", sas_token=azurite.sas_token("rl")))
    assert reader.get("object") == b"x"
    with pytest.raises(StorageDenied, match="lack the permission"):
        reader.put("object", b"y")
    assert [info.name for info in reader.list()] == ["object"]
    # No deletion here: to every batch under a SAS token Azurite 3.35.0 answers 500, whatever the token allows.


def test_no_credentials_at_all(azurite: AzureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without key and token an identity's token is asked for; where none is handed out, the hint names the variables."""
    with reserved_ports(1) as [port]:
        monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"http://127.0.0.1:{port}/token")
        with pytest.raises(StorageDenied, match="no credentials for http://127") as caught:
            open_store(azurite.location("p", account_key="")).get("object")
    assert "AZURE_STORAGE_KEY" in caught.value.hint


def test_no_account(azurite: AzureServer) -> None:
    """The account's name is needed whatever the credentials are."""
    with pytest.raises(UsageError, match="name of the Azure storage account is missing"):
        open_store(azurite.location("p", account_name=""))


def _calls(store: ObjectStore) -> dict[str, Callable[[], object]]:
    return {
        "get": lambda: store.get("object"),
        "stat": lambda: store.stat("object"),
        "list": lambda: list(store.list()),
        "put": lambda: store.put("object", b"x"),
        "put_if_absent": lambda: store.put_if_absent("object", b"x"),
        "delete": lambda: store.delete("object"),
        "large writer": lambda: stream(store, "object", 2, PART_SIZE),
    }


CALLS = ("get", "stat", "list", "put", "put_if_absent", "delete", "large writer")


def _fails(location: StorageLocation, call: str) -> TikvBrError:
    with pytest.raises((StorageError, UsageError)) as caught:
        _calls(open_store(location))[call]()
    return caught.value


@pytest.mark.parametrize("call", CALLS)
def test_missing_container(azurite: AzureServer, call: str) -> None:
    """A container that does not exist is said by name, by every request that needs it."""
    error = _fails(azurite.location("p", container="no-such-container"), call)
    assert type(error) is StorageObjectMissing
    assert "container 'no-such-container' does not exist" in error.message


@pytest.mark.parametrize("call", CALLS)
def test_wrong_key(azurite: AzureServer, call: str, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong key is StorageDenied, and nothing shown repeats it."""
    caplog.set_level(logging.DEBUG)
    location = azurite.location("p", account_key=WRONG_KEY)
    error = _fails(location, call)
    assert type(error) is StorageDenied
    assert "the account key or SAS token is wrong" in error.message
    assert WRONG_KEY not in json.dumps(error.to_json()) + repr(location) + caplog.text


def test_wrong_signature_is_not_shown(azurite: AzureServer) -> None:
    """Nor does a message about a SAS token repeat its signature."""
    token = azurite.sas_token("rwdl").partition("&sig=")[0] + "&sig=hush"
    error = _fails(azurite.location("p", account_key="", sas_token=token), "get")
    assert type(error) is StorageDenied
    assert "hush" not in str(error.to_json())


def test_a_refused_connection_is_unreachable() -> None:
    """A refused connection is StorageUnreachable, with endpoint and cause."""
    with reserved_ports(1) as [port]:
        server = AzureServer(f"http://127.0.0.1:{port}/{ACCOUNT}", None)
        error = _fails(server.location("p"), "get")
    assert type(error) is StorageUnreachable
    assert error.message == f"{server.endpoint} does not answer: connection refused"
