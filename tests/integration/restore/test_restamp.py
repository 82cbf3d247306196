"""Rows from the target's future, stamped anew: what is written right after the restore is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from tests.integration.backup.data import load
from tests.integration.restore.conftest import FILES, rows_of
from tests.integration.restore.test_resume import break_off
from tests.live_cluster import LiveCluster, live_cluster
from tikv_br.backup.options import BackupOptions
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.errors import TimestampAheadOfTso
from tikv_br.restore.options import RestoreOptions, Via
from tikv_br.restore.run import restore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

ROWS = {b"key%03d" % number: b"old" for number in range(100)}


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> StorageLocation:
    """A backup, in `FILES` files, of a cluster whose clock is an hour ahead."""
    folder = tmp_path_factory.mktemp("ahead")
    codec = KeyCodec(ApiVersion.V2)
    with live_cluster(folder / "source", ApiVersion.V2, clock_ahead=3600.0) as live:
        load(live, ROWS)
        live.run("split", keys=[codec.bound(codec.rpc_key(b"key%03d" % (4 * step))).hex() for step in range(1, FILES)])
        return backed_up(live, folder / "backup")


def backed_up(live: LiveCluster, folder: Path, *keyspaces: str) -> StorageLocation:
    """A backup by the stores, which shows every timestamp."""
    location = parse(f"local://{folder}")
    backup(BackupOptions(cluster=live.config, storage=location, keyspaces=keyspaces, safe_interval=0.0, engine="store"))
    return location


def timestamps(location: StorageLocation) -> set[int]:
    """Smallest and largest timestamp of each file."""
    files = BackupSet.open(open_store(location)).files
    return {ts for file in files for ts in (file.min_ts, file.max_ts)}


def test_rows_of_the_future_are_refused_or_stamped(ahead: StorageLocation, target: LiveCluster, tmp_path: Path) -> None:
    """With --restamp every row has the one timestamp, and a put and a delete right after are seen."""
    options = RestoreOptions(cluster=target.config, storage=ahead)
    with pytest.raises(TimestampAheadOfTso, match="ahead of the target"):
        restore(options)
    for number in range(3):
        target.raw(9).put(b"other%d" % number, b"fills the stores' caches of timestamps")
    summary = restore(RestoreOptions(cluster=target.config, storage=ahead, restamp=True))
    target.raw().put(b"key000", b"new")
    target.raw().delete(b"key001")
    assert rows_of(target) == {key: value for key, value in ROWS.items() if key != b"key001"} | {b"key000": b"new"}
    assert summary.verified
    now = target.cluster.pd.tso()
    assert max(timestamps(ahead)) > now > summary.restamp_ts > 0
    assert summary.restamp_ts in timestamps(backed_up(target, tmp_path / "again"))


@pytest.mark.parametrize("via", [Via.STORES, Via.UPLOAD])
def test_stamped_rows_can_move_too(ahead: StorageLocation, target: LiveCluster, tmp_path: Path, via: Via) -> None:
    """New prefix and new timestamp at once, by one rule of the stores or in what is sent to them."""
    summary = restore(RestoreOptions(cluster=target.config, storage=ahead, via=via, restamp=True, to_keyspace="7"))
    assert summary.verified
    assert rows_of(target, 7) == ROWS
    assert timestamps(backed_up(target, tmp_path / "again", "7")) == {summary.restamp_ts}


def test_rows_of_the_past_keep_their_timestamps(source: StorageLocation, target: LiveCluster) -> None:
    """--restamp is a permission: where nothing lies ahead, files are taken as they are."""
    assert restore(RestoreOptions(cluster=target.config, storage=source, restamp=True)).restamp_ts == 0


def test_a_stamping_restore_goes_on_with_its_timestamp(
    ahead: StorageLocation, target: LiveCluster, tmp_path: Path
) -> None:
    """All rows have one timestamp, also when the restore was ended in the middle."""
    break_off(target, ahead, restamp=True)
    summary = restore(RestoreOptions(cluster=target.config, storage=ahead, restamp=True))
    assert summary.resumed_files
    assert rows_of(target) == ROWS
    assert timestamps(backed_up(target, tmp_path / "again")) == {summary.restamp_ts}
