"""New timestamps for restored rows: neither older deletes hide them, nor do they hide a write of a client."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.data import load, when
from tests.integration.restore.conftest import FILES, rows_of
from tests.integration.restore.conftest import ROWS as DATA
from tests.integration.restore.restores import break_off, leftovers
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import ChecksumMismatch, TimestampAheadOfTso
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.progress_events import Event, Notice, StepFinished
from tikv_br.restore.options import Restamp, RestoreOptions, Via
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
        live.split(*(codec.bound(codec.rpc_key(b"key%03d" % (4 * step))) for step in range(1, FILES)))
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
    """By default every row has the one timestamp, and a put and a delete right after are seen."""
    options = RestoreOptions(cluster=target.config, storage=ahead, restamp=Restamp.NEVER)
    with pytest.raises(TimestampAheadOfTso, match="ahead of the target"):
        restore(options)
    for number in range(3):
        target.raw(9).put(b"other%d" % number, b"fills the stores' caches of timestamps")
    summary = restore(RestoreOptions(cluster=target.config, storage=ahead))
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
    keyspace = target.create_keyspace("ks7")
    summary = restore(RestoreOptions(cluster=target.config, storage=ahead, via=via, to_keyspace="ks7"))
    assert summary.verified
    assert rows_of(target, keyspace) == ROWS
    assert timestamps(backed_up(target, tmp_path / "again", "ks7")) == {summary.restamp_ts}


def test_rows_of_the_past_keep_their_timestamps(source: StorageLocation, target: LiveCluster) -> None:
    """In another cluster than the backup's, where no row lies ahead, files are taken as they are, unless asked otherwise."""
    assert restore(RestoreOptions(cluster=target.config, storage=source)).restamp_ts == 0
    target.raw().delete_range(EVERY_KEY)
    assert restore(RestoreOptions(cluster=target.config, storage=source, restamp=Restamp.ALWAYS)).restamp_ts > 0


def test_a_stamping_restore_goes_on_with_its_timestamp(
    ahead: StorageLocation, target: LiveCluster, tmp_path: Path
) -> None:
    """All rows have one timestamp, also when the restore was ended in the middle."""
    break_off(target, ahead)
    summary = restore(RestoreOptions(cluster=target.config, storage=ahead))
    assert summary.resumed_files
    assert rows_of(target) == ROWS
    assert timestamps(backed_up(target, tmp_path / "again")) == {summary.restamp_ts}


@pytest.mark.parametrize("restamp", [Restamp.AUTO, Restamp.ALWAYS])
def test_rows_deleted_during_the_restore_come_back(
    source: StorageLocation, target: LiveCluster, restamp: Restamp
) -> None:
    """Deletes between the choice of the timestamp and the ingest are newer than both: the rows are ingested once more."""
    delete = when(StepFinished, "announce the ingest", lambda: target.raw().batch_delete(sorted(DATA)[::7]))
    notices: list[Event] = []

    def report(event: Event) -> None:
        notices.append(event)
        delete(event)

    summary = restore(RestoreOptions(cluster=target.config, storage=source, restamp=restamp), report)
    assert summary.verified
    assert summary.restamp_ts > 0
    assert any(isinstance(event, Notice) and "newer deletes" in event.message for event in notices)
    assert rows_of(target) == DATA
    assert leftovers(source) == []


def test_deleted_rows_come_back_beside_others(source: StorageLocation, target: LiveCluster) -> None:
    """Foreign rows in the range do not hide newer deletes; a newer value is still reported."""
    others = {key + b"-other": b"mine" for key in sorted(DATA)[::3]}
    target.raw().batch_put(others)
    target.raw().batch_delete(sorted(DATA)[::7])
    options = RestoreOptions(cluster=target.config, storage=source, allow_overwrite=True)
    summary = restore(options)
    assert (summary.verified, summary.total_kvs, summary.other_kvs) == (True, len(DATA), len(others))
    assert rows_of(target) == DATA | others
    target.raw().put(min(DATA), b"newer")
    with pytest.raises(ChecksumMismatch, match="0 rows are missing and 1 have another value"):
        restore(structs.replace(options, restamp=Restamp.NEVER, resume=False))


def test_kept_timestamps_below_newer_deletes(source: StorageLocation, target: LiveCluster) -> None:
    """The comparison fails, and the command that its hint names restores all rows."""
    target.raw().batch_delete(sorted(DATA)[::7])
    options = RestoreOptions(cluster=target.config, storage=source)
    with pytest.raises(ChecksumMismatch, match="--restamp never, restored rows keep their older timestamps") as raised:
        restore(structs.replace(options, restamp=Restamp.NEVER))
    assert "Run the same command again with --restamp auto" in raised.value.hint
    assert restore(options).resumed_files == 0
    assert rows_of(target) == DATA
    assert leftovers(source) == []


def test_a_script_that_goes_on_deleting_is_reported(source: StorageLocation, target: LiveCluster) -> None:
    """The rows are ingested again at most once; the message has the remedy, and the same command then works."""
    delete = when_noticed("newer deletes", lambda: target.raw().batch_delete(sorted(DATA)))
    target.raw().batch_delete(DATA)
    options = RestoreOptions(cluster=target.config, storage=source)
    with pytest.raises(ChecksumMismatch) as raised:
        restore(options, delete)
    assert "Stop all clients that delete" in raised.value.hint
    assert restore(options).verified
    assert rows_of(target) == DATA


def test_a_clients_write_is_never_hidden(source: StorageLocation, target: LiveCluster) -> None:
    """A put after the look at the target stays visible, though stores hand out cached timestamps; so does one before a second ingest."""
    key, other = b"row00010", b"row00020"
    options = RestoreOptions(cluster=target.config, storage=source, restamp=Restamp.ALWAYS)
    with pytest.raises(ChecksumMismatch):
        restore(options, when(StepFinished, "announce the ingest", lambda: target.raw().put(key, b"of a client")))
    assert rows_of(target) == DATA | {key: b"of a client"}
    target.raw().put(key, DATA[key])
    target.raw().batch_delete(sorted(DATA)[::5])
    with pytest.raises(ChecksumMismatch):
        restore(options, when_noticed("newer deletes", lambda: target.raw().put(other, b"of a client")))
    assert rows_of(target) == DATA | {other: b"of a client"}


@pytest.mark.parametrize("change", [{b"row00010": b"another value"}, {b"row00010\0": b"another key"}])
def test_other_differences_are_no_deletes(
    source: StorageLocation, target: LiveCluster, change: dict[bytes, bytes]
) -> None:
    """If a client has written as well, nothing is ingested again over it."""

    def interfere() -> None:
        target.raw().batch_delete([b"row00001", b"row00300"])
        target.raw().batch_put(change)

    with pytest.raises(ChecksumMismatch, match="instead of"):
        restore(
            RestoreOptions(cluster=target.config, storage=source), when(StepFinished, "announce the ingest", interfere)
        )
    assert (
        rows_of(target) == {key: value for key, value in DATA.items() if key not in {b"row00001", b"row00300"}} | change
    )


def test_hidden_rows_with_ttls_and_other_names_come_back(tmp_path: Path, target: LiveCluster) -> None:
    """In another keyspace, where some rows have expired since the backup, and others will."""
    short, long = (
        {b"short%d" % number: b"x" for number in range(20)},
        {b"zlong%d" % number: b"y" for number in range(20)},
    )
    with live_cluster(tmp_path / "source", ApiVersion.V2) as live:
        load(live, ROWS)
        load(live, short, ttl=3)
        load(live, long, ttl=10_000)
        location = backed_up(live, tmp_path / "backup")
    expected, keyspace = ROWS | long, target.create_keyspace("ks7")
    time.sleep(4)
    target.cluster.flush_timestamps()  # deletes by timestamps of this moment, not of seconds ago
    target.raw(keyspace).batch_delete([*expected, *short])
    summary = restore(RestoreOptions(cluster=target.config, storage=location, to_keyspace="ks7"))
    assert (summary.verified, summary.restamp_ts > 0) == (True, True)
    assert rows_of(target, keyspace) == expected
    assert 9_000 < (target.raw(keyspace).get_ttl(b"zlong1") or 0) <= 10_000


def test_a_dry_run_tells_of_the_new_timestamp(ahead: StorageLocation, target: LiveCluster) -> None:
    """And changes nothing."""
    notices: list[Event] = []
    restore(RestoreOptions(cluster=target.config, storage=ahead, dry_run=True), notices.append)
    assert any(isinstance(event, Notice) and "new timestamp" in event.message for event in notices)
    assert rows_of(target) == {}


def when_noticed(text: str, act: Callable[[], object]) -> Callable[[Event], None]:
    """A reporter that acts when a notice has a text."""

    def report(event: Event) -> None:
        if isinstance(event, Notice) and text in event.message:
            act()

    return report
