"""Checksums of transactional rows: the recorded requests are sent, and the recorded answers are those of the rows."""

from __future__ import annotations

import itertools
import json
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from fastcrc import crc64
from msgspec import structs

from tests.support.txn_backups import recorded_codec, recorded_value
from tests.unit.cluster.fakes import KV, FakeCluster, region, with_leader
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.pb import coprocessor_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.txnkv import LAST_KEY, txn_checksum
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyMode, encode


class Replay:
    """The regions of recorded requests, and a store that answers each as it did."""

    def __init__(self, fake: FakeCluster, folder: Path) -> None:
        self.folder, self.fake = folder, fake
        self.requests: list[coprocessor_pb2.Request] = []
        self.answers: dict[int, list[coprocessor_pb2.Response]] = {}
        for number in itertools.count():
            path = folder / f"checksum-request-{number}.pb"
            if not path.exists():
                break
            request = coprocessor_pb2.Request.FromString(path.read_bytes())
            answer = (folder / f"checksum-response-{number}.pb").read_bytes()
            self.answers[request.context.region_id] = [coprocessor_pb2.Response.FromString(answer)]
            self.requests.append(request)
        fake.regions = []
        for request in self.requests:
            start, end = request.ranges[0].start, request.ranges[0].end.removeprefix(LAST_KEY)
            first, last = (encode(key) if key else b"" for key in (start, end))
            fake.regions.append(with_leader(region(request.context.region_id, first, last)))
        fake.kv("Coprocessor", self._answer)

    @property
    def ts(self) -> int:
        """The timestamp of all requests."""
        return self.requests[0].start_ts

    def _answer(self, data: bytes) -> coprocessor_pb2.Response:
        answers = self.answers[coprocessor_pb2.Request.FromString(data).context.region_id]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def checksum(self) -> Checksum:
        """The checksum of the whole range."""
        codec = structs.replace(recorded_codec(self.folder), mode=KeyMode.TXN)
        with Cluster.connect(self.fake.config()) as connected:
            cluster = SimpleNamespace(
                router=connected.router,
                api_version=codec.api_version,
                cluster_id=7,
                config=connected.config,
                pd=SimpleNamespace(tso=lambda: self.ts),
            )
            locks = SnapshotLocks(cast("Cluster", cluster), self.ts)
            return txn_checksum(cast("Cluster", cluster), codec.rpc_range(), locks)

    def sent(self) -> list[coprocessor_pb2.Request]:
        """The requests for checksums."""
        return self.fake.stores[1].seen(KV + "Coprocessor", coprocessor_pb2.Request)


@pytest.mark.parametrize("backup", ["full", "full-later", "gc-fence"])
def test_recorded_checksums(fake: FakeCluster, txn_recording: Path, backup: str) -> None:
    """The sums of all regions are those of the recorded rows; nothing but the context differs in the requests."""
    replay = Replay(fake, txn_recording / backup)
    rows = json.loads((replay.folder / "rows.json").read_text())["rows"]
    pairs = [bytes.fromhex(row["key"]) + recorded_value(row) for row in rows]
    expected = (Checksum(crc64.xz(pair), 1, len(pair)) for pair in pairs)
    assert replay.checksum() == reduce(Checksum.merge, expected)
    sent = replay.sent()
    assert [each.context.region_id for each in sent] == [each.context.region_id for each in replay.requests]
    for each in (*sent, *replay.requests):
        each.ClearField("context")
    assert sent == replay.requests


def test_a_recorded_lock(fake: FakeCluster, txn_recording: Path) -> None:
    """Its transaction is pushed, and its region is requested again with a note that its locks do not count."""
    replay = Replay(fake, txn_recording / "locked")
    by_region = {number: answers[0] for number, answers in replay.answers.items() if answers[0].HasField("locked")}
    (number,) = by_region
    lock = by_region[number].locked
    status = (replay.folder / "check-txn-status-alive.pb").read_bytes()
    fake.kv("KvScanLock", kv.ScanLockResponse(locks=[lock]))
    fake.kv("KvCheckTxnStatus", kv.CheckTxnStatusResponse.FromString(status))
    replay.answers[number].append(coprocessor_pb2.Response())
    replay.checksum()
    asked = [list(each.context.resolved_locks) for each in replay.sent() if each.context.region_id == number]
    assert asked == [[], [lock.lock_version]]
    (check,) = fake.stores[1].seen(KV + "KvCheckTxnStatus", kv.CheckTxnStatusRequest)
    assert (check.primary_key, check.caller_start_ts) == (lock.primary_lock, replay.ts)
