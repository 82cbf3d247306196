"""The tikv-client wheel, a client that shares no code with us, works with a V1 playground."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.playground.clients import Client, running
from tests.support.playground_admin import PlaygroundAdmin
from tests.support.waiting import eventually
from tikv_br.backup.run import backup_txn
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.keys.codec import KeyMode, encode
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11)
    or sys.implementation.name != "cpython"
    or (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="tikv-client has one wheel: CPython 3.11, Linux, x86-64",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Client]:
    """Three stores, several regions, leaders on all of them, which stay: the wheel's scan loses rows of one that moves."""
    with running(tmp_path, regions=4) as client:
        PlaygroundAdmin(client.playground.state.address).run("scatter")
        yield client


@pytest.fixture
def raw(cluster: Client) -> Any:  # noqa: ANN401 - the wheel has no types
    """The wheel's client."""
    import tikv_client

    return tikv_client.RawClient.connect([cluster.playground.state.address])


def test_single_keys(raw: Any) -> None:  # noqa: ANN401
    """Put, get, overwrite and delete of single keys, empty values included."""
    raw.put(b"key", b"value")
    assert raw.get(b"key") == b"value"
    raw.put(b"key", b"")
    assert raw.get(b"key") == b""
    raw.delete(b"key")
    assert raw.get(b"key") is None


def test_batches_and_scans_cross_regions(raw: Any, cluster: Client) -> None:  # noqa: ANN401
    """A batch over all regions is found again by batch get, by scans in pages and by a range delete.

    Scans are repeated: on a busy machine a leader can move, and the wheel's scan then loses the rows of its region.
    """
    rows = {bytes([first]) + b"-%03d" % number: b"%d" % number for first in range(0, 256, 5) for number in range(10)}
    raw.batch_put(rows)
    assert len({cluster.region(key).id for key in rows}) >= 4
    wanted = sorted(rows)[::37]
    assert dict(raw.batch_get([*wanted, b"missing"])) == {key: rows[key] for key in wanted}
    eventually(lambda: raw.scan(b"", b"\xff\xff", limit=10_000) == sorted(rows.items()))
    start, end = bytes([60]), bytes([200])
    inside = sorted(key for key in rows if start <= key < end)
    eventually(lambda: raw.scan_keys(start, end, limit=10_000) == inside)
    eventually(lambda: [key for key, _ in raw.scan(start, end, limit=7)] == inside[:7])
    raw.delete_range(start, end)
    rest = sorted((k, v) for k, v in rows.items() if k not in inside)
    eventually(lambda: raw.scan(b"", b"\xff\xff", limit=10_000) == rest)
    raw.batch_delete(sorted(rows))
    assert raw.scan(b"", b"\xff\xff", limit=10) == []


def test_pairs_of_the_wheel_are_plain_rows(raw: Any, cluster: Client) -> None:  # noqa: ANN401
    """A pair put by the wheel is the plain row in RocksDB and the value that a bare stub reads."""
    raw.put(b"from the wheel", b"\x00\x01")
    assert list(cluster.playground.engine.iterate(b"z", b"")) == [(b"zfrom the wheel", b"\x00\x01")]
    assert cluster.get(b"from the wheel") == b"\x00\x01"


def test_it_follows_splits_and_leaders(raw: Any, cluster: Client) -> None:  # noqa: ANN401
    """Its cached regions go stale by splits and leader transfers; reads and writes find their way again."""
    raw.put(b"k1", b"1")
    raw.put(b"k3", b"3")
    regions = cluster.playground.regions
    regions.split(cluster.region(b"k1").id, [b"k2"])
    for key in (b"k1", b"k3"):
        region = cluster.region(key)
        target = next(peer.store_id for peer in region.peers if peer.store_id != region.leader_store)
        regions.transfer_leader(region.id, target)
    assert raw.get(b"k1") == b"1"
    raw.put(b"k4", b"4")
    assert raw.scan(b"k", b"l", limit=10) == [(b"k1", b"1"), (b"k3", b"3"), (b"k4", b"4")]


@pytest.fixture
def encoded(tmp_path: Path) -> Iterator[Client]:
    """Several regions that begin at keys of transactions; the wheel fails at bounds of raw keys, as every such client."""
    with running(tmp_path / "encoded") as client:
        for first in (64, 128, 192):
            bound = encode(bytes([first]))
            client.playground.regions.split(client.region(bound).id, [bound])
        yield client


def test_transactions(encoded: Client, tmp_path: Path) -> None:
    """Both kinds of transactions, over all regions: the wheel, which is the Rust client, reads its rows after a restore over deletes."""
    import tikv_client

    address = encoded.playground.state.address
    client = tikv_client.TransactionClient.connect([address])
    rows = {bytes([first]) + b"-txn": bytes([first]) * (first * 8) for first in range(0, 256, 5)}
    txn = client.begin(pessimistic=False)
    for key, value in rows.items():
        txn.put(key, value)
    txn.commit()
    rows[b"\0-txn"] = b"changed"
    txn = client.begin(pessimistic=True)
    assert txn.get_for_update(b"\0-txn") == b""
    txn.put(b"\0-txn", rows[b"\0-txn"])
    txn.delete(b"\5-txn")
    txn.commit()
    del rows[b"\5-txn"]

    def found() -> dict[bytes, bytes]:
        reader = client.snapshot(client.current_timestamp(), pessimistic=False)
        return dict(reader.scan(b"", b"\xff\xff", limit=1000))

    eventually(lambda: found() == rows)
    place = StorageLocation("local", str(tmp_path / "backup"))
    config = ClusterConfig(pd=(address,))
    assert backup_txn(BackupOptions(config, place, key_mode=KeyMode.TXN)).summary.total_kvs == len(rows)
    txn = client.begin(pessimistic=False)
    for key in rows:
        txn.delete(key)
    txn.commit()
    assert found() == {}
    restore(RestoreOptions(cluster=config, storage=place, key_mode=KeyMode.TXN))
    eventually(lambda: found() == rows)
