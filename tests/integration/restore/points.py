"""Rows of points in time, as tikv-br merges them and as the source's RocksDB held them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.support import history
from tikv_br.archive.log import LogSource
from tikv_br.backup.merge import MergeOptions, merge_backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.rows import read_rows
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.read import MergeSources
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

TRIES = 100
"""Random timestamps for each that is wanted; of a log that was interrupted often, most may not be known exactly."""


def merged_to(place: StorageLocation) -> BackupOptions:
    """Options of a merge on threads into several files."""
    return BackupOptions(ClusterConfig(pd=()), place, executor="driver", file_bytes=64 << 10)


def check(folder: Path, newest: StorageLocation, log: LogSource | None, ts: int, source: history.History) -> None:
    """Fail unless the rows merged for a timestamp are those of the source at that time."""
    place = parse(f"local://{folder / f'merged-{ts}'}")
    merge_backup(MergeOptions(merged_to(place), newest, log, ts))
    assert rows_of(place) == history.rows_at(source, ts)
    shutil.rmtree(place.path)


def rows_of(place: StorageLocation) -> dict[bytes, bytes]:
    """The rows of a merged backup's files, which have one version of each key."""
    found: dict[bytes, bytes] = {}
    backup_set = BackupSet.open(open_store(place))
    for file in backup_set.files:
        for batch in read_rows(backup_set.store, file, codec_of(ApiVersion.V2, file.key_range)):
            assert not any(batch["deleted"].to_pylist())
            for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
                assert key not in found
                found[key] = value
    return found


def times_in(sources: MergeSources, count: int, chance: random.Random) -> list[int]:
    """Random timestamps in the window at which all rows are known, and the end of the window, by order: at least `count`."""
    first, last = sources.window()
    assert sources.log is not None
    assert first < last
    found = {last}
    for _try in range(TRIES * count):
        if len(found) >= count:
            break
        around = sources.log.inexact_around(sources.base.ranges, chance.randint(first, last))
        found |= {ts for ts in around if first <= ts <= last}
    assert len(found) >= count, f"only {len(found)} timestamps of the window can be restored"
    return sorted(found)
