"""Checkpoints on S3: breadth by moto, truth by versitygw."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.s3_servers import moto_server, versitygw_server
from tests.unit.incremental.checkpoint_suite import CheckpointSuite
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store


@pytest.fixture(scope="module", params=["moto", "versitygw"])
def stores(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], ObjectStore]]:
    """A function that gives an empty place, on each kind of server in turn."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    numbers = itertools.count()
    with moto_server() if request.param == "moto" else versitygw_server(folder) as server:
        yield lambda: open_store(server.location(f"state/{next(numbers)}"))


class TestS3(CheckpointSuite):
    """A prefix of a bucket."""

    @pytest.fixture
    def store(self, stores: Callable[[], ObjectStore], request: pytest.FixtureRequest) -> ObjectStore:
        """See `CheckpointSuite.store`."""
        if "moto" in request.node.name and "many_at_once" in request.node.name:
            pytest.skip("moto looks and writes in two steps: concurrent conditional puts prove nothing there")
        return stores()
