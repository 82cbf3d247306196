"""Restores by puts: the same rows as by ingest, as any client would have written them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.integration.backup.reading import golden_rows
from tests.integration.restore.conftest import FILES, ROWS, rows_of
from tests.integration.restore.restores import break_off, restore_golden
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.raw_calls import put_with_ttls
from tikv_br.backup.run import backup
from tikv_br.cluster.clock import ClusterClock
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.values import decode_value
from tikv_br.playground.engine import RocksEngine
from tikv_br.restore.options import Mode, RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation, parse
from tikv_br.tasks.executor import ExecutorOptions


@pytest.mark.parametrize("name", ["v1", "v1ttl", "v2"])
def test_a_recorded_backup_is_put_whole(golden: Path, tmp_path: Path, name: str) -> None:
    """Keys, values and remaining TTLs equal the recording; expired rows are counted and omitted."""
    expected = golden_rows(golden / "backups" / name)
    now = time.time()
    alive = {row["k"]: row for row in expected if not row["e"] or row["e"] > now}
    version = {"v1": ApiVersion.V1, "v1ttl": ApiVersion.V1TTL, "v2": ApiVersion.V2}[name]
    with live_cluster(tmp_path / "cluster", version) as live:
        summary = restore_golden(live, golden, name, mode=Mode.PUT)
        raw = live.raw()
        rows = {raw.codec.rpc_key(key): value for key, value in rows_of(live).items()}
        expiring = [key for key, row in alive.items() if row["e"]][:50]
        ttls = {key: raw.get_ttl(raw.codec.user_key(key)) for key in expiring}
    assert rows == {key: row["v"] for key, row in alive.items()}
    assert summary.verified
    assert (summary.engine, summary.total_kvs, summary.regions) == ("put", len(alive), 0)
    assert summary.expired_kvs == len(expected) - len(alive)
    assert all(abs(alive[key]["e"] - time.time() - (ttls[key] or 0)) < 30 for key in expiring)


def expiries(playground: Path) -> dict[bytes, int]:
    """The expiry of each row that a stopped V1TTL playground holds, expired or not, in seconds since the epoch."""
    engine = RocksEngine.open(playground / "rocksdb")
    try:
        return {key: decode_value(ApiVersion.V1TTL, value).expire_ts for key, value in engine.iterate(b"", b"")}
    finally:
        engine.close()


def test_slow_puts_do_not_prolong_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore of 8 s: stores get each TTL as it is when its request is sent, and no row that has expired by then.

    By the clock of the puts the first rows expire 5 s after the start, however long load and backup take.
    """
    later = 600
    location = parse(f"local://{tmp_path / 'expiring'}")
    with live_cluster(tmp_path / "source", ApiVersion.V1TTL) as live:
        loaded = time.time()
        rows = [(b"row%05d" % row, b"value", later + 5 + row * 7919 % 40) for row in range(10_000)]
        put_with_ttls(live.raw(), rows)
        backup(BackupOptions(cluster=live.config, storage=location, executor="driver"))
        one = pa.array([b"warm"], pa.large_binary())  # kernels are not to be compiled between a TTL and its request
        live.raw().column_writer().put(one, one, np.array([int(loaded) + later], np.uint64))
    with live_cluster(tmp_path / "target", ApiVersion.V1TTL, stores=1) as live:
        slow = live.fail("RawBatchPut", {"delay": {"seconds": 0.4}}, count=-1)
        ahead = later - int(time.time() - loaded)
        monkeypatch.setattr(ClusterClock, "now", lambda _clock: int(time.time() + ahead))
        began = time.monotonic()
        options = RestoreOptions(cluster=live.config, storage=location, mode=Mode.PUT, checksum=False, concurrency=1)
        summary = restore(options)
        seconds = time.monotonic() - began
        assert live.hits(slow) > 10
    written, recorded = expiries(tmp_path / "target"), expiries(tmp_path / "source")
    late = {written[key] + ahead - recorded[key] for key in written}
    assert seconds > 5
    assert len(written) + summary.expired_kvs == summary.total_kvs == 10_000
    assert summary.expired_kvs > 0
    assert min(late) >= 0
    # With TTLs as of the start it is as long as the restore; a busy machine adds to each request.
    assert max(late) <= max(2, seconds / 4), f"rows live up to {max(late)} s longer than the backup says"


def test_rows_from_the_future_are_put_with_timestamps_of_now(
    source: StorageLocation, target: LiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put row is as new as any write: the rows' own timestamps do not matter, and a later write is seen."""
    monkeypatch.setattr("tikv_br.restore.run.check_timestamps", lambda _context: pytest.fail("asked for timestamps"))
    assert restore(RestoreOptions(cluster=target.config, storage=source, mode=Mode.PUT)).verified
    assert rows_of(target) == ROWS
    target.raw().put(b"row00001", b"new")
    assert target.raw().get(b"row00001") == b"new"


def test_a_restore_by_puts_goes_on_too(source: StorageLocation, target: LiveCluster) -> None:
    """Ended in the middle, the same command puts only what is missing."""
    break_off(target, source, "RawBatchPut", mode=Mode.PUT)
    summary = restore(RestoreOptions(cluster=target.config, storage=source, mode=Mode.PUT))
    assert FILES // 2 <= summary.resumed_files < summary.files
    assert rows_of(target) == ROWS


@pytest.mark.slow
def test_rows_are_put_by_spark(source: StorageLocation, target: LiveCluster) -> None:
    """The same tasks in Spark's workers: job, parts and results survive the way there and back."""
    spark = ExecutorOptions(executor="spark", spark_master="local[2]")
    assert restore(RestoreOptions(cluster=target.config, storage=source, mode=Mode.PUT, executor=spark)).verified
    assert rows_of(target) == ROWS
