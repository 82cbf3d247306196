"""Transactions of client-go beside ``gc run --resolve-locks``, as a service that an operator runs."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import PROGRAM, environment
from tests.interop.conftest import Clusters, ConnectTxn
from tests.interop.line_client import TxnLineClient
from tests.support.etcd import real_etcd
from tests.support.live_cluster import LiveCluster
from tests.support.waiting import eventually
from tikv_br.cluster.locks import LockResolver
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode, encode
from tikv_br.formats.keys.ranges import EVERY_KEY

ACCOUNTS = 30
LIFE_SECONDS = 10
"""More than any transfer takes, also on a busy machine."""


@pytest.fixture(scope="module", params=[ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)
def live(request: pytest.FixtureRequest, clusters: Clusters) -> LiveCluster:
    """A playground of three stores with regions between the accounts."""
    found = clusters(request.param)
    found.split(*(encode(prefix_of(found) + key) for key in (b"account/0010", b"account/0020", b"m")))
    return found


@pytest.fixture
def go(live: LiveCluster, client_go_txn: ConnectTxn) -> TxnLineClient:
    """A client."""
    return client_go_txn(live)


def prefix_of(live: LiveCluster) -> bytes:
    """What the store's keys have in front of the client's."""
    return b"x\0\0\0" if live.raw().codec.is_v2 else b""


class Gc:
    """A ``gc run --resolve-locks``, and the lines that it has written."""

    def __init__(self, live: LiveCluster, log: Path) -> None:
        self._live, self._log = live, log

    @property
    def log(self) -> list[dict[str, Any]]:
        """Its log so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def passes(self, ts: int, seconds: float = 60) -> None:
        """Wait until the GC safe point is above a timestamp."""
        eventually(lambda: self._live.cluster.pd.gc_safe_point() > ts, seconds)


@pytest.fixture
def gc(live: LiveCluster, tmp_path: Path) -> Iterator[Gc]:
    """A worker that has advanced the safe point; nothing of it may fail."""
    log = tmp_path / "gc.log"
    times = ["--life-time", f"{LIFE_SECONDS}s", "--interval", "1s"]
    with real_etcd(tmp_path / "etcd") as server, contextlib.ExitStack() as stack:
        command = [str(PROGRAM), "gc", "run", "--pd", live.pd, "--etcd", server.address, *times, "--resolve-locks"]
        logged = ["--log-file", str(log), "--log-format", "json", "--quiet"]
        process = stack.enter_context(subprocess.Popen([*command, *logged], env=environment(), cwd="/"))
        stack.callback(process.terminate)
        running = Gc(live, log)
        running.passes(0)
        yield running
        assert process.poll() is None
        assert not [line for line in running.log if line["level"] not in {"info", "debug"}]


V1, V2 = ApiVersion.V1, ApiVersion.V2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("live", "mode"), [(V1, "pessimistic"), (V1, "1pc"), (V2, "optimistic"), (V2, "async")], indirect=["live"]
)
def test_transfers_beside_gc(
    live: LiveCluster, go: TxnLineClient, gc: Gc, client_go_txn: ConnectTxn, mode: str
) -> None:
    """The sum stays right, while the safe point passes transfers and clients are killed between prewrite and commit."""
    go.open_accounts(ACCOUNTS)
    keys = [b"a1", b"account/9999", b"zz"]
    go.write(dict.fromkeys(keys, b"old"))
    dying = mode if mode != "1pc" else "optimistic"
    client_go_txn(live).prewrite_and_die(dict.fromkeys(keys, b"new"), dying)
    until = live.cluster.pd.tso()
    transfers = 0
    while live.cluster.pd.gc_safe_point() < until or not transfers:
        counts = go.transfer(mode, ACCOUNTS, workers=4, count=10)
        assert counts["sums"] > 0
        transfers += counts["committed"]
    gc.passes(live.cluster.pd.tso())
    span = KeyMode.TXN.keys if prefix_of(live) else EVERY_KEY
    report = LockResolver(live.cluster).resolve(span, live.cluster.pd.gc_safe_point())
    assert (report.resolved, report.live) == (0, ())
    assert go.get(*keys) == [b"new" if mode == "async" else b"old"] * 3
    assert go.transfer(mode, ACCOUNTS, workers=1, count=1)["committed"] == 1
