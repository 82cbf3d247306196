"""Transactions of client-go on the playground: isolation, clients that die, and what others make of their locks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.interop.conftest import Clusters, ConnectTxn
from tests.interop.line_client import TxnLineClient
from tests.support.live_cluster import LiveCluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import encode

MODES = ["optimistic", "pessimistic", "async", "1pc"]
ACCOUNTS = 30
ROWS = {
    b"\0": b"0", b"a255": b"v" * 255, b"a256": b"v" * 256, b"b": b"long" * 30_000, b"r": b"raw?",
    b"\xff": b"1", b"\xff" * 8: b"8", b"\xff" * 9: b"9",
}  # fmt: skip


@pytest.fixture(scope="module", params=[ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)
def live(request: pytest.FixtureRequest, clusters: Clusters) -> LiveCluster:
    """A playground of three stores with regions between the rows and the accounts."""
    found = clusters(request.param)
    prefix = prefix_of(found)
    bounds = [b"a256", b"account/0010", b"account/0020", b"m", b"\xff" * 8]
    found.split(*(encode(prefix + key) for key in bounds))
    return found


@pytest.fixture
def go(live: LiveCluster, client_go_txn: ConnectTxn) -> Iterator[TxnLineClient]:
    """A client; its rows are deleted at the end."""
    client = client_go_txn(live)
    yield client
    client.delete_range(b"", b"\xff" * 16)


def prefix_of(live: LiveCluster) -> bytes:
    """What the store's keys have in front of the client's."""
    return b"x\0\0\0" if live.raw().codec.is_v2 else b""


@pytest.mark.parametrize("mode", MODES)
def test_it_reads_what_it_writes(go: TxnLineClient, mode: str) -> None:
    """Over several regions, forward and backward, the newest version and the one before."""
    rows = ROWS
    go.write(rows, mode)
    before = go.write({b"a255": b"new", b"b": None}, mode)
    expected = sorted(rows.items())
    assert go.scan(b"", b"", ts=before) == expected
    newest = sorted({**rows, b"a255": b"new"}.items())
    newest.remove((b"b", rows[b"b"]))
    assert go.scan(b"", b"") == newest
    assert go.scan(b"", b"\xff" * 16, reverse=True) == newest[::-1]
    assert go.get(b"a255", b"b", b"\xff" * 9) == [b"new", None, b"9"]
    assert go.get(b"b", ts=before) == [rows[b"b"]]


@pytest.mark.parametrize("mode", MODES)
def test_transfers_keep_the_sum(live: LiveCluster, go: TxnLineClient, mode: str) -> None:
    """Each snapshot adds up, while several goroutines transfer over three regions that change leaders and split."""
    go.open_accounts(ACCOUNTS)
    over = threading.Event()

    def disturb() -> None:
        for number in range(11, 20):
            if over.wait(0.05):
                return
            live.split(encode(prefix_of(live) + b"account/%04d" % number))
            for region in live.regions():
                others = [store for store in live.store_ids if store != region["leader_store"]]
                live.transfer_leader(region_id=region["id"], store_id=others[number % len(others)])

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        counts = go.transfer(mode, ACCOUNTS, workers=6, count=25)
    finally:
        over.set()
        disturber.join()
    assert counts["committed"] == 6 * 25
    assert counts["sums"] > 0


@pytest.mark.parametrize("mode", ["optimistic", "async", pytest.param("pessimistic", marks=pytest.mark.slow)])
def test_a_killed_client_leaves_no_half(
    live: LiveCluster, client_go_txn: ConnectTxn, go: TxnLineClient, mode: str
) -> None:
    """Killed between prewrite and commit: readers see all of the transaction (async commit) or nothing, and its keys can be written."""
    keys = [b"a1", b"account/0015", b"zz"]
    go.write(dict.fromkeys(keys, b"old"))
    client_go_txn(live).prewrite_and_die(dict.fromkeys(keys, b"new"), mode)
    began = time.monotonic()
    expected = b"new" if mode == "async" else b"old"
    assert {value for _, value in go.scan(b"", b"")} == {expected}
    assert time.monotonic() - began < 30
    assert go.get(*keys) == [expected] * 3
    go.write(dict.fromkeys(keys, b"newer"), "pessimistic")
    assert go.get(*keys) == [b"newer"] * 3


def test_gc_resolves_locks_and_removes_versions(
    live: LiveCluster, client_go_txn: ConnectTxn, go: TxnLineClient
) -> None:
    """client-go's own GC, as JuiceFS runs it: no lock remains below the safe point, and no older version."""
    go.write({b"a1": b"old", b"a2": b"deleted"})
    before = go.write({b"a1": b"new", b"a2": None})
    client_go_txn(live).prewrite_and_die({b"a3": b"never"}, "optimistic")
    after = live.cluster.pd.tso()
    assert go.scan(b"", b"", ts=before) == [(b"a1", b"old"), (b"a2", b"deleted")]
    assert go.collect_garbage(after) == after
    assert go.scan(b"", b"") == [(b"a1", b"new")]
