"""One server of each kind for all tests of the session; each test gets a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.cloud_servers import AzureServer, azurite_server
from tests.integration.s3_servers import S3Server, moto_server, versitygw_server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """A moto server."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A versitygw server."""
    with versitygw_server(tmp_path_factory.mktemp("versitygw")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[AzureServer]:
    """An Azurite server."""
    with azurite_server() as server:
        yield server
