"""Log archives on a real S3 server: of a changefeed whose capture is killed, and of a process whose server goes away."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import PROGRAM, environment, succeed
from tests.integration.incremental.members import wait_for_state
from tests.integration.incremental.writer import Writer
from tests.integration.s3_servers import ACCESS_KEY, SECRET_KEY, S3Server, versitygw_server
from tests.support.etcd import real_etcd
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.ports import reserved_ports
from tests.support.waiting import PATIENCE, eventually
from tikv_br.archive.log import LogArchive, LogSource
from tikv_br.backup.run import backup
from tikv_br.cluster.etcd import Etcd
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.read import MergeSources
from tikv_br.formats.api_version import ApiVersion
from tikv_br.incremental.group.store import GroupStore
from tikv_br.point_in_time import PointOptions, restore_to_point
from tikv_br.restore.options import RestoreOptions
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

V2 = ApiVersion.V2
LEASE = 6
AWAY_SECONDS = 60.0 if os.environ.get("TIKV_BR_CRASH_MATRIX") else 5.0
MOST_BYTES = 192 << 20
"""More memory than this a process may not take on while its storage is away: its buffers are bounded by 80 MiB."""
KEYS_OF_S3 = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
ROWS = {b"row%04d" % number: b"value %d" % number for number in range(1000)}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[LiveCluster]:
    """Rows in four regions."""
    with live_cluster(tmp_path / "source", V2, stores=2, regions=4, resolved_ts_interval=0.2) as live:
        live.raw().batch_put(ROWS)
        yield live


@pytest.fixture
def full(source: LiveCluster, tmp_path: Path) -> StorageLocation:
    """A full backup, with whose backup-ts a log may start."""
    place = parse(f"local://{tmp_path / 'full'}")
    backup(BackupOptions(source.config, place, executor="driver", safe_interval=0.0, gc_ttl=600))
    return place


@contextlib.contextmanager
def running(*command: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the credentials of the S3 server in its environment, as captures need them."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [str(PROGRAM), *command], stdout=file, stderr=file, env=environment(**KEYS_OF_S3), cwd="/"
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def catch_up(source: LiveCluster, full: StorageLocation, log: LogSource) -> None:
    """Wait until this moment can be restored."""
    until = source.cluster.pd.tso()

    def has_come() -> bool:
        for store_id in source.store_ids:  # or their cached timestamps would be waited for
            source.flush(store_id)
        return MergeSources.open(full, log).window()[1] > until

    eventually(has_come, 2 * PATIENCE, every=0.2)


def check_restored(source: LiveCluster, full: StorageLocation, log: LogSource, folder: Path) -> None:
    """Fail unless the log is whole, and a cluster restored from it has the rows of the source."""
    archive = LogArchive.open(open_store(log.storage), log.id)
    assert (archive.damage, archive.gaps(), archive.verify_files(whole=True)) == ((), [], [])
    with live_cluster(folder / "target", V2, stores=1) as target:
        restore_to_point(
            PointOptions(RestoreOptions(target.config, full), log, 0, work=parse(f"local://{folder / 'work'}"))
        )
        assert contents(target) == contents(source)


@pytest.mark.timeout(400)
def test_captures_write_a_log_together(source: LiveCluster, full: StorageLocation, tmp_path: Path) -> None:
    """Two share a changefeed to S3; one is killed while rows are written, and from backup and log come the rows of the source."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(versitygw_server(tmp_path / "s3"))
        etcd = stack.enter_context(real_etcd(tmp_path / "etcd"))
        group = ("--pd", source.pd, "--etcd", etcd.address)
        # The log's address has no credentials: it is saved in etcd.
        sink = server.url("log", access_key="", secret_access_key="") + "&flush-interval=300ms&id=shared"
        create = ("--id", "feed", "--sink", sink, "--from-backup", full.redacted(), "--hold-back", "0s")
        succeed("changefeed", "create", *group, *create, AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)
        captures = [
            stack.enter_context(
                running(
                    *("changefeed", "capture", *group, "--lease", f"{LEASE}s", "--scratch-dir", str(tmp_path)),
                    output=tmp_path / f"capture-{number}.log",
                )
            )
            for number in range(2)
        ]
        store = GroupStore(stack.enter_context(Etcd.connect([etcd.address])), source.cluster.cluster_id)

        def wait_for_workers(count: int) -> int:
            """Wait until so many captures have tasks, and the checkpoint has moved since; the checkpoint."""
            state = wait_for_state(
                store, "work", lambda state: len({each.capture for each in state.tasks.values()} - {""}) == count, 120
            )
            before = state.checkpoint_ts("feed")
            return wait_for_state(
                store, "progress", lambda state: state.checkpoint_ts("feed") > before, 120
            ).checkpoint_ts("feed")

        with Writer(source, 1), Writer(source, 2):
            wait_for_workers(2)
            captures[0].kill()
            captures[0].wait()
            wait_for_workers(1)
        log = LogSource(server.location("log"), "shared")
        catch_up(source, full, log)
        segments = LogArchive.open(open_store(log.storage), log.id).segments
        assert len({segment.span for segment in segments}) == 2
        assert any(segment.inexact for segment in segments)
        check_restored(source, full, log, tmp_path)


@pytest.mark.timeout(500)
def test_a_log_rides_out_an_outage_of_its_storage(source: LiveCluster, full: StorageLocation, tmp_path: Path) -> None:
    """During the outage rows are written: the process lives, its memory is bounded, its status has the lag."""
    with reserved_ports(1) as [port], contextlib.ExitStack() as stack:

        def begin() -> S3Server:
            return stack.enter_context(versitygw_server(tmp_path / "s3", port=port))

        server = begin()
        log = LogSource(server.location("log"), "default")
        place = ("--storage", server.url("log", access_key="", secret_access_key=""))
        start = ("--from-backup", full.redacted(), "--hold-back", "0s", "--flush-interval", "300ms")
        limits = ("--flush-size", "1MiB", "--sorter-memory", "16MiB", "--status-every", "1s")
        command = ("log", "start", "--pd", source.pd, *place, *start, *limits, "--scratch-dir", str(tmp_path))
        output = tmp_path / "log.txt"
        process = stack.enter_context(running(*command, "--output", "json", output=output))
        eventually(lambda: list((tmp_path / "s3").glob("*/log/default/segments/*")), 2 * PATIENCE)
        with Writer(source, 1, 0.002), Writer(source, 2, 0.002):
            catch_up(source, full, log)
            before = psutil.Process(process.pid).memory_info().rss
            server.kill()
            most, back = before, time.monotonic() + AWAY_SECONDS
            while time.monotonic() < back:  # the length of the outage, not a wait for something
                assert process.poll() is None, output.read_text()[-3000:]
                most = max(most, psutil.Process(process.pid).memory_info().rss)
                time.sleep(0.1)
            said = output.read_text()
            begin()
        catch_up(source, full, log)
        process.terminate()
        assert process.wait(PATIENCE) == 143, output.read_text()[-3000:]
        print(f"{before >> 20} MiB before, at most {most >> 20} MiB while away for {AWAY_SECONDS:g} s")  # noqa: T201
        assert most - before < MOST_BYTES
        lags = [
            line["checkpoint_lag"]
            for line in map(json.loads, filter(lambda each: each.startswith("{"), said.splitlines()))
            if line.get("message_type") == "status" and "checkpoint_lag" in line
        ]
        assert max(lags[-3:]) > AWAY_SECONDS / 2
        check_restored(source, full, log, tmp_path)
