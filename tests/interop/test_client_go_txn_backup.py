"""Backups of transactional data beside client-go's transactions, restored into another cluster that client-go reads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.interop.conftest import Clusters, ConnectTxn
from tests.support.live_cluster import LiveCluster
from tikv_br.backup.run import backup_txn
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode, encode
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions

ACCOUNTS = 30
BALANCE = 1000
"""With which the client opens each account."""
BACKUPS = 3


@pytest.fixture(scope="module", params=[ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)
def pair(request: pytest.FixtureRequest, clusters: Clusters) -> tuple[LiveCluster, LiveCluster]:
    """Two playgrounds of three stores; the first has regions between the accounts."""
    source, target = clusters(request.param, "backed-up"), clusters(request.param, "restored")
    prefix = b"x\0\0\0" if source.raw().codec.is_v2 else b""
    source.split(*(encode(prefix + b"account/%04d" % number) for number in (10, 20)))
    return source, target


def back_up(live: LiveCluster, place: Path) -> int:
    """Back up and compare all transactional data; backup-ts."""
    options = BackupOptions(
        live.config,
        StorageLocation("local", str(place)),
        executor="driver",
        checksum=True,
        key_mode=KeyMode.TXN,
    )
    return backup_txn(options).summary.backup_ts


@pytest.mark.parametrize("mode", ["optimistic", "pessimistic", "async", "1pc"])
def test_each_backup_adds_up(
    pair: tuple[LiveCluster, LiveCluster], client_go_txn: ConnectTxn, mode: str, tmp_path: Path
) -> None:
    """Transfers go on, and a client is killed between prewrite and commit: no backup has half of a transaction."""
    source, target = pair
    writer, reader, observer = client_go_txn(source), client_go_txn(target), client_go_txn(source)
    writer.open_accounts(ACCOUNTS)
    over = threading.Event()

    def transfer() -> int:
        committed = 0
        while not over.is_set():
            committed += writer.transfer(mode, ACCOUNTS, workers=4, count=10)["committed"]
        return committed

    with ThreadPoolExecutor(1) as pool:
        transfers = pool.submit(transfer)
        try:
            client_go_txn(source).prewrite_and_die(dict.fromkeys([b"account/a", b"z"], b"half"), mode)
            taken = [back_up(source, tmp_path / str(number)) for number in range(BACKUPS)]
        finally:
            over.set()
        assert transfers.result() > 0
    states = set()
    for number, backup_ts in enumerate(taken):
        restore(
            RestoreOptions(
                target.config,
                StorageLocation("local", str(tmp_path / str(number))),
                executor=ExecutorOptions(executor="driver", concurrency=2),
                key_mode=KeyMode.TXN,
            )
        )
        rows = reader.scan(b"", b"")
        assert rows == observer.scan(b"", b"", ts=backup_ts)
        balances = [int.from_bytes(value, "big") for key, value in rows if key[8:].isdigit()]
        assert (len(balances), sum(balances)) == (ACCOUNTS, ACCOUNTS * BALANCE)
        states.add(tuple(rows))
        assert reader.transfer(mode, ACCOUNTS, workers=2, count=3)["committed"] == 6  # clients can write at once
        reader.delete_range(b"", b"\xff" * 16)
    assert len(states) > 1
    writer.delete_range(b"", b"\xff" * 16)
