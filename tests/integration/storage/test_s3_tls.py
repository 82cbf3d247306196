"""S3 over TLS against a real server: whose certificate is trusted, and what is said of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.s3_servers import S3Server, versitygw_server
from tests.support.certificates import Authority
from tikv_br.errors import StorageUnreachable, UsageError
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store

pytestmark = pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")


def opened(server: S3Server, ca: Path | str) -> ObjectStore:
    """The server's bucket for clients that trust an authority."""
    location = server.location("tls")
    return open_store(dataclasses.replace(location, s3=structs.replace(location.s3, ca=str(ca))))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Authority of the servers."""
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def server(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One with a certificate that is right for it."""
    with versitygw_server(tmp_path_factory.mktemp("s3"), tls=authority.issue("server")) as server:
        yield server


def test_the_authority_that_signed_it_is_trusted(server: S3Server, authority: Authority) -> None:
    """With it an object goes there and comes back."""
    store = opened(server, authority.ca)
    store.put("object", b"content")
    assert store.get("object") == b"content"


def test_no_authority_and_another_one_are_refused(server: S3Server, tmp_path: Path) -> None:
    """Nothing is sent to a server that the system's authorities and the given one have not signed."""
    for ca in ("", Authority(tmp_path, "another").ca):
        with pytest.raises(StorageUnreachable, match="its certificate is not trusted"):
            opened(server, ca).get("object")


@pytest.mark.parametrize(("fault", "said"), [("expired", "has expired"), ("elsewhere", "is for another name")])
def test_a_certificate_that_is_not_right_for_it(authority: Authority, tmp_path: Path, fault: str, said: str) -> None:
    """Signed by the right authority, and all the same refused, with the reason."""
    pair = authority.issue(fault, expired=fault == "expired", elsewhere=fault == "elsewhere")
    with versitygw_server(tmp_path, tls=pair) as server, pytest.raises(StorageUnreachable, match=said):
        opened(server, authority.ca).get("object")


@pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff"])
def test_a_file_without_authorities(server: S3Server, tmp_path: Path, content: bytes | None) -> None:
    """It is the flag that is wrong, and the message names it."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"--s3\.ca"):
        opened(server, path)
