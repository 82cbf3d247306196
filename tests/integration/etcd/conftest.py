"""An etcd that the tests of this folder share; each has a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.etcd import real_etcd
from tikv_br.cluster.etcd import Etcd
from tikv_br.playground.etcd import EtcdServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A running etcd; no test here stops it."""
    with real_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def etcd(server: EtcdServer) -> Iterator[Etcd]:
    """A client of it."""
    with Etcd.connect([server.address]) as client:
        yield client


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Prefix of the keys of one test."""
    return f"/{request.node.name}/"
