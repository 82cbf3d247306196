"""Interrupted runs, and the visible state of them and of those that resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.backup.data import load, when
from tests.integration.backup.reading import rocksdb_rows
from tests.support.live_cluster import LiveCluster
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import REGION_OVERHEAD, SMALLEST_TASK
from tikv_br.dataflow.run import BackupSummary
from tikv_br.errors import RequestRefused, TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.progress_events import Event, StepFinished, StepStarted
from tikv_br.storage.open import open_store

V1, V2 = ApiVersion.V1, ApiVersion.V2
REGIONS = 4 * SMALLEST_TASK // REGION_OVERHEAD
"""So many small ones make four tasks."""
KEY = b"row%05d"
ROWS = 10 * REGIONS


def fill(live: LiveCluster) -> None:
    """Load rows into many small regions."""
    load(live, {KEY % number: b"value %d" % number for number in range(ROWS)})
    codec = live.raw().codec
    bounds = [codec.bound(codec.rpc_key(KEY % number)) for number in range(10, ROWS, 10)]
    live.split(*bounds)


def files_at(wanted: BackupOptions) -> set[str]:
    """Return all that lies at the path, folders and hidden files too."""
    place = Path(wanted.storage.path)
    return {str(path.relative_to(place)) for path in place.rglob("*")} if place.exists() else set()


def fail_half_way(live: LiveCluster, wanted: BackupOptions) -> TikvBrError:
    """Run a backup, one task after the other, whose third task fails for good."""
    rpc = "backup.region" if wanted.engine == "store" else "RawScan"
    # The first scans of a backup look for keyspaces with rows.
    looks = 0 if wanted.engine != "scan" else 2 if live.cluster.api_version is V2 else 1
    action = {"abort": {"code": "INVALID_ARGUMENT", "details": "on purpose"}}
    failing = live.fail(rpc, action, skip=REGIONS // 2 + 2 + looks, count=-1)
    with pytest.raises(TikvBrError) as raised:
        backup(wanted)
    assert live.hits(failing) > 0
    live.heal()
    return raised.value


def is_whole(wanted: BackupOptions, summary: BackupSummary, live: LiveCluster, scratch: Path) -> None:
    """Hold a backup against the cluster, by the cluster's own checksum and by RocksDB, and look for leftovers."""
    sums = live.raw().checksum()
    assert (summary.crc64xor, summary.total_kvs, summary.total_bytes) == (
        sums.crc64xor,
        sums.total_kvs,
        sums.total_bytes,
    )
    rows = rocksdb_rows(Path(wanted.storage.path), scratch)
    assert len(rows) == sums.total_kvs
    kept = BackupSet.open(open_store(wanted.storage))
    wanted_files = {"backupmeta", "backup.lock", "tikv-br/manifest.json", *(file.name for file in kept.files)}
    assert {name for name in files_at(wanted) if (Path(wanted.storage.path) / name).is_file()} == wanted_files
    assert not any(not any(Path(wanted.storage.path, name).iterdir()) for name in files_at(wanted) - wanted_files)


def raising(event: type[StepStarted | StepFinished], step: str) -> Callable[[Event], None]:
    """Return a reporter that breaks the run off at a step."""

    def stop() -> None:
        raise RequestRefused("on purpose")

    return when(event, step, stop)
