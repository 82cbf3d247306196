"""The bounds of ranges that commands send to stores of API V2, by TiKV's rule for each call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.command import QUICK, tikv_br
from tests.integration.playground.clients import Client, running
from tests.support.txn import TxnClient, put
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.txnkv import has_transactions, txn_checksum
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode, encode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.gc.worker import resolve_locks
from tikv_br.playground.failpoints import FailpointTable
from tikv_br.playground.txn.reads import TxnReads

LAST = 0xFF_FFFF
PLAIN = {"RawScan", "RawBatchScan", "RawDeleteRange", "RawChecksum", "backup"}
"""Calls whose bounds stores check as sent (of ``backup`` for raw data only)."""
ENCODED = {"KvScan", "KvDeleteRange"}
"""Calls whose bounds stores check in memcomparable form."""
UNCHECKED = {"KvScanLock", "Coprocessor", "ScanRegions", "UnsafeDestroyRange"}
"""Calls with bounds that may be anything: stores, or PD, do not compare them with a mode."""

Request = tuple[str, Any]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """All requests that the playgrounds of this process receive."""
    requests: list[Request] = []
    answer = FailpointTable.answer

    def record(
        table: FailpointTable, rpc: str, request: object, *, store_id: int, context: grpc.ServicerContext
    ) -> Any:  # noqa: ANN401
        requests.append((rpc, request))
        return answer(table, rpc, request, store_id=store_id, context=context)

    monkeypatch.setattr(FailpointTable, "answer", record)
    return requests


@pytest.fixture
def client(tmp_path: Path, sent: list[Request]) -> Iterator[Client]:
    """A playground with rows of both modes in the first and the last keyspace."""
    with running(tmp_path / "cluster", ApiVersion.V2, stores=1, keyspaces=(f"last={LAST}",)) as client:
        transactions = TxnClient(client)
        for keyspace in (0, LAST):
            prefix = b"x" + keyspace.to_bytes(3, "big")
            transactions.write(put(prefix + b"key", b"value"), put(prefix + b"\xff" * 9, b"value"))
            run("raw", "put", "key", "value", "--keyspace", str(keyspace), "--pd", client.playground.state.address)
        sent.clear()
        yield client
        wrong = [(rpc, bounds) for rpc, bounds in checked(sent) if not store_takes(*bounds)]
        assert not wrong


def run(*arguments: str) -> None:
    """Run a command that must exit 0."""
    done = tikv_br(*arguments, **QUICK)  # type: ignore[arg-type]
    assert done.code == 0, done


def bounds_of(request: Any) -> list[tuple[bytes, bytes]]:  # noqa: ANN401
    """The ranges of a request, in the order of its fields: that of a reverse scan is the upper end first."""
    fields = request.DESCRIPTOR.fields_by_name
    if "ranges" in fields:
        return [
            (each.start_key, each.end_key) if hasattr(each, "start_key") else (each.start, each.end)
            for each in request.ranges
        ]
    return [(request.start_key, request.end_key)] if "start_key" in fields and "end_key" in fields else []


def checked(sent: list[Request]) -> Iterator[tuple[str, tuple[bytes, bytes]]]:
    """The bounds that stores check, as they compare them. A call with bounds that no rule is known for fails."""
    for rpc, request in sent:
        if not hasattr(request, "DESCRIPTOR") or not (bounds := bounds_of(request)):
            continue
        assert rpc in PLAIN | ENCODED | UNCHECKED, f"{rpc}: {request}"
        if rpc in ENCODED:
            yield from ((rpc, (encode(start), encode(end) if end else b"")) for start, end in bounds)
        elif rpc in PLAIN and getattr(request, "is_raw_kv", True):
            yield from ((rpc, each) for each in bounds)


def store_takes(start: bytes, end: bytes) -> bool:
    """The rule, written down from TiKV's source: one mode, or as end exactly the byte after it."""
    return start[:1] in {b"r", b"x"} and (end[:1] == start[:1] or end == {b"r": b"s", b"x": b"y"}[start[:1]])


@pytest.mark.parametrize("keyspaces", ["0", str(LAST)])
def test_raw_commands(client: Client, sent: list[Request], tmp_path: Path, keyspaces: str) -> None:
    """Backups by both engines, restore, export, diff, and raw commands; a reverse scan from the end of a keyspace."""
    pd = ("--pd", client.playground.state.address)
    for engine in ("store", "scan"):
        made = str(tmp_path / engine)
        run("backup", "raw", "-s", made, *pd, "--keyspace", keyspaces, "--engine", engine, "--checksum")
    run("restore", "raw", "-s", made, *pd, "--allow-overwrite")
    run("export", "raw", "-s", str(tmp_path / "rows"), *pd, "--keyspace", keyspaces)
    for command in (["checksum"], ["scan"], ["delete-range", "--confirm", "--start", "a", "--end", "b"]):
        run("raw", *command, *pd, "--keyspace", keyspaces)
    with Cluster.connect(ClusterConfig(pd=(client.playground.state.address,))) as cluster:
        assert cluster.raw(int(keyspaces)).last_key(EVERY_KEY) == b"key"
    assert {"RawScan", "RawChecksum", "RawDeleteRange", "backup"} <= {rpc for rpc, _ in sent}


@pytest.mark.parametrize("keyspaces", ["0", str(LAST), "all"])
def test_transactional_backups(client: Client, sent: list[Request], tmp_path: Path, keyspaces: str) -> None:
    """A backup, and a restore whose looks at the target scan to the end of the mode."""
    pd = ("--pd", client.playground.state.address)
    run("backup", "txn", "-s", str(tmp_path / "backup"), *pd, "--keyspace", keyspaces, "--checksum")
    run("restore", "txn", "-s", str(tmp_path / "backup"), *pd)  # it is there already
    assert {"Coprocessor", "KvScan"} <= {rpc for rpc, _ in sent}


def test_gc(client: Client, sent: list[Request]) -> None:
    """The look for transactions comes to the last key of the mode, and locks are resolved up to its end."""
    with Cluster.connect(ClusterConfig(pd=(client.playground.state.address,))) as cluster:
        assert has_transactions(cluster)
        client.playground.nodes[1].engine.delete_range(b"zx", b"zy", ("default", "write"))
        assert not has_transactions(cluster)
        assert resolve_locks(cluster, cluster.pd.tso(), lambda _seconds: None).resolved == 0
    assert {"KvScan", "KvScanLock"} <= {rpc for rpc, _ in sent}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each item, stores of playgrounds that start afterwards give up a checksum."""
    left: list[bool] = []
    coprocessor = TxnReads.coprocessor

    def give_up(reads: TxnReads, request: Any) -> Any:  # noqa: ANN401
        answer = coprocessor(reads, request)
        if left and left.pop():
            answer.other_error = "exceeding the deadline"
        return answer

    monkeypatch.setattr(TxnReads, "coprocessor", give_up)
    return left


def test_a_checksum_that_is_too_slow(slow: list[bool], client: Client, sent: list[Request]) -> None:
    """It is halved between the first key of the mode and the last one, to which the second scan looks back."""
    with Cluster.connect(ClusterConfig(pd=(client.playground.state.address,))) as cluster:
        last = next(each for each in client.playground.regions.all() if not each.end)
        span = KeyRange(b"x\xff\xff\xff", KeyMode.TXN.keys.end)
        assert last.contains(encode(span.start))
        locks = SnapshotLocks(cluster, cluster.pd.tso())
        expected = txn_checksum(cluster, span, locks)
        assert expected.total_kvs == 2
        slow.append(True)
        assert txn_checksum(cluster, span, locks) == expected
    assert [request.reverse for rpc, request in sent if rpc == "KvScan"] == [False, True]
