"""Raw commands on clusters that others have used: transactional data beside raw rows, which they must not destroy nor pass over in silence, and odd regions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import succeed, tikv_br
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.live_txns import Txns
from tikv_br.cluster.txnkv import find_transactions
from tikv_br.errors import ClusterUnfit
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import encode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.sinks.open import Origin, open_sink
from tikv_br.incremental.sinks.url import TikvTarget

RAW_ROWS = {b"raw%d" % number: b"row" for number in range(3)}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster with raw rows, in regions that begin at raw keys."""
    with live_cluster(tmp_path_factory.mktemp("raw"), ApiVersion.V1, stores=1, cluster_id=1) as live:
        live.raw().batch_put(RAW_ROWS)
        live.split(b"raw1", b"raw2")
        yield live


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster with a raw row, and a transactional one in its last region."""
    with live_cluster(tmp_path_factory.mktemp("mixed"), ApiVersion.V1, stores=1, cluster_id=2) as live:
        live.raw().put(b"a raw key", b"row")
        live.split(b"raw bound", encode(b"s"), encode(b"t"))
        txns = Txns(live, b"")
        txns.commit(txns.prewrite(b"txn"), b"txn")
        yield live
        assert txns.written_by(b"txn")


def test_transactions_are_found(raw: LiveCluster, mixed: LiveCluster) -> None:
    """A row in any of the first regions counts, except in a range beside it; raw rows and raw bounds do not."""
    assert not find_transactions(raw.cluster)
    assert find_transactions(mixed.cluster)
    assert find_transactions(mixed.cluster, KeyRange(encode(b"t"), b""))
    assert not find_transactions(mixed.cluster, KeyRange(b"a", b"b"))
    raw.assert_innocent()
    mixed.assert_innocent()


def test_a_split_at_a_raw_key_ends_no_search(tmp_path: Path) -> None:
    """The first region is split between two raw rows while it is searched: it is left out, the next one is not."""
    with live_cluster(tmp_path, ApiVersion.V1, stores=1) as live:
        live.raw().batch_put(RAW_ROWS)
        live.split(encode(b"s"))
        splitting = live.fail("KvScan", {"command": {"name": "split", "arguments": {"keys": [b"raw1".hex()]}}})
        assert not find_transactions(live.cluster)
        assert live.hits(splitting) == 1
        txns = Txns(live, b"")
        txns.commit(txns.prewrite(b"txn"), b"txn")
        assert find_transactions(live.cluster)


def test_readers_report_transactions(raw: LiveCluster, mixed: LiveCluster, tmp_path: Path) -> None:
    """Backup, export and comparison name the command for what they leave out; without transactions they say nothing."""
    for live, is_reported in ((raw, False), (mixed, True)):
        commands = (
            ("backup", "raw", "--pd", live.pd, "-s", f"local://{tmp_path}/{live.cluster.cluster_id}"),
            ("export", "raw", "--pd", live.pd, "-s", f"local://{tmp_path}/export{live.cluster.cluster_id}"),
        )
        for command in commands:
            assert ("tikv-br backup txn" in succeed(*command).err) is is_reported, command
    assert "tikv-br backup txn" in tikv_br("diff", "--pd", raw.pd, "--other-pd", mixed.pd).err


def test_writers_refuse_transactions(raw: LiveCluster, mixed: LiveCluster, tmp_path: Path) -> None:
    """Repairs, syncs, imports, loads by puts and deletes of ranges end with exit code 5, restores and loads with 40; nothing is changed."""
    before = contents(mixed)
    place, state = f"local://{tmp_path}/backup", f"{tmp_path}/state"
    succeed("backup", "raw", "--pd", raw.pd, "-s", place)
    (tmp_path / "rows.csv").write_text("key,value\na,b\nu,c\n")
    columns = ("--key-column", "key", "--value-column", "value")
    load = ("load", "raw", "--pd", mixed.pd, "--input", f"{tmp_path}/rows.csv", *columns, "--allow-overwrite")
    for code, command in (
        (5, ("diff", "--pd", raw.pd, "--other-pd", mixed.pd, "--repair", "--repair-delete", "--yes")),
        (5, ("sync", "--mode", "diff", "--pd", raw.pd, "--sink", f"tikv://{mixed.pd}", "--state-dir", state)),
        (5, ("raw", "delete-range", "--pd", mixed.pd, "--all", "--yes")),
        (5, ("raw", "import", f"{tmp_path}/rows.csv", "--pd", mixed.pd)),
        (5, ("raw", "import", "--count", "5", "--pd", mixed.pd)),
        (5, (*load, "--mode", "put")),
        (40, (*load, "--staging", f"{tmp_path}/staging")),
        (40, ("restore", "raw", place, "--pd", mixed.pd)),
        (40, ("restore", "raw", place, "--pd", mixed.pd, "--allow-overwrite")),
        (40, ("restore", "raw", place, "--pd", mixed.pd, "--allow-overwrite", "--mode", "put")),
    ):
        refused = tikv_br(*command)
        assert refused.code == code, (command, refused)
        assert "transactional data" in refused.err
    assert contents(mixed) == before


def test_sinks_refuse_transactions(mixed: LiveCluster) -> None:
    """Syncs and replays from a change feed write raw rows, too: they end before the first one."""
    with (
        pytest.raises(ClusterUnfit, match="also has transactional data"),
        open_sink(TikvTarget((mixed.pd,)), Origin(7, 0)),
    ):
        pass


def test_single_keys_warn(raw: LiveCluster, mixed: LiveCluster) -> None:
    """A key beside transactional data is written, with a warning; a key elsewhere without."""
    for live, is_beside in ((raw, False), (mixed, True)):
        for command in (("put", "u", "value"), ("delete", "u")):
            assert ("transactional data beside" in succeed("raw", *command, "--pd", live.pd).err) is is_beside


def test_regions_that_end_inside_a_key_are_named(tmp_path: Path) -> None:
    """PD can be made to split anywhere, also where no key of API V2 ends: exit code 5, the region, and what to do about it."""
    backup, rows = f"local://{tmp_path}/backup", tmp_path / "rows.csv"
    rows.write_text("key,value\nraw1,b\nraw3,b\n")
    with (
        live_cluster(tmp_path / "a", ApiVersion.V2, stores=1, cluster_id=1) as live,
        live_cluster(tmp_path / "b", ApiVersion.V2, stores=1, cluster_id=2) as other,
    ):
        live.raw().batch_put(RAW_ROWS)
        succeed("backup", "raw", "--pd", live.pd, "-s", backup)
        live.run("split", keys=[b"r\0\0\0raw2".hex()])
        load = ("load", "raw", "--pd", live.pd, "--input", str(rows), "--key-column", "key", "--value-column", "value")
        for command in (
            ("raw", "scan", "--pd", live.pd),
            ("raw", "checksum", "--pd", live.pd),
            ("backup", "raw", "--pd", live.pd, "-s", f"local://{tmp_path}/scan", "--engine", "scan"),
            ("backup", "raw", "--pd", live.pd, "-s", f"local://{tmp_path}/store", "--engine", "store"),
            ("export", "raw", "--pd", live.pd, "-s", f"local://{tmp_path}/export"),
            ("restore", "raw", backup, "--pd", live.pd, "--allow-overwrite"),
            ("restore", "raw", backup, "--pd", live.pd, "--allow-overwrite", "--mode", "put"),
            (*load, "--allow-overwrite", "--staging", f"{tmp_path}/staging"),
            (*load, "--allow-overwrite", "--mode", "put"),
            ("diff", "--pd", live.pd, "--other-pd", other.pd),
            ("diff", "--pd", other.pd, "--other-pd", live.pd),
            ("verify", backup, "--level", "restore", "--pd", live.pd),
            ("raw", "delete-range", "--pd", live.pd, "--all", "--yes"),
        ):
            refused = tikv_br(*command)
            assert refused.code == 5, (command, refused)
            assert "not a valid key" in refused.err, (command, refused)
            assert "merge-region" in refused.err, (command, refused)
        assert succeed("raw", "get", "raw0", "--pd", live.pd).out == "row\n"
