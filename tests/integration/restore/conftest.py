"""A backup and clusters that the tests of restore share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.backup.data import hard_rows, load
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import eventually
from tikv_br.backup.run import backup
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.api_version import ApiVersion
from tikv_br.restore.record import remove_all
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

ROWS = hard_rows(count=600)
FILES = 24


@pytest.fixture(scope="session")
def backed_up(tmp_path_factory: pytest.TempPathFactory) -> StorageLocation:
    """A V1 cluster's backup of `ROWS` in V2 encoding, in `FILES` files."""
    folder = tmp_path_factory.mktemp("source")
    location = parse(f"local://{folder / 'backup'}")
    with live_cluster(folder / "cluster", ApiVersion.V1) as live:
        load(live, ROWS)
        live.split(*sorted(ROWS)[:: len(ROWS) // FILES][1:FILES])
        backup(
            BackupOptions(
                cluster=live.config,
                storage=location,
                dst_api_version=ApiVersion.V2,
                file_bytes=1,  # a file ends with the page that reaches it, and a page with its region
                executor="driver",
            )
        )
    return location


@pytest.fixture
def source(backed_up: StorageLocation) -> Iterator[StorageLocation]:
    """The backup, without the records of restores that failed on purpose."""
    yield backed_up
    remove_all(open_store(backed_up))


def rows_of(live: LiveCluster, keyspace_id: int = 0) -> dict[bytes, bytes]:
    """Everything in a keyspace, by user key."""
    raw = live.raw(keyspace_id)
    return {
        raw.codec.user_key(key): value
        for page in raw.scan_pages(raw.codec.rpc_range())
        for key, value in zip(page.keys.to_pylist(), page.values.to_pylist(), strict=True)
    }


@pytest.fixture
def target(tmp_path: Path) -> Iterator[LiveCluster]:
    """An empty V2 cluster of three stores."""
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=3) as live:
        eventually(lambda: len(live.regions()) >= 5)  # until PD has split at the bounds of keyspace 0
        yield live
