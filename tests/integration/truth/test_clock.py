"""Commands of a machine whose clock is two hours away from the cluster's: rows expire by the cluster's clock."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.truth.conftest import World, tikv_br
from tests.support.clock import move_clock
from tests.support.live_cluster import contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.cli.command import CommandPath
from tikv_br.cli.shared import pd_time
from tikv_br.cluster import clock
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.timestamps import parse_ts, seconds_between
from tikv_br.formats.api_version import ApiVersion
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.handover import FromTs
from tikv_br.incremental.pipeline import Replicator
from tikv_br.incremental.sinks.url import TikvTarget
from tikv_br.incremental.sync import SyncOptions, sync
from tikv_br.storage.url import parse

LASTING = {b"row%03d" % number: b"value %d" % number for number in range(20)}
LONG = {b"long%d" % number: b"expires within the two hours" for number in range(20)}
SHORT = {b"short%d" % number: b"expired within the two hours" for number in range(20)}
ROWS = LASTING | LONG
TTL = 3600
SHORT_TTL = 20
BOTH_WAYS = pytest.mark.parametrize("wrong_clock", [7200.0, -7200.0], indirect=True, ids=["ahead", "behind"])


@pytest.fixture(scope="module")
def expiring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A cluster with rows that expire, a backup of it that also has those that have expired since, a log, and a second cluster."""
    folder = tmp_path_factory.mktemp("clock")
    with (
        live_cluster(folder / "source", ApiVersion.V2) as source,
        live_cluster(folder / "target", ApiVersion.V2) as target,
    ):
        world = World(folder, source, target, target, "")
        names = ("sound", "log", "scratch", "exported", "staging")
        world.names |= {"pd": source.pd, "target": target.pd, **{name: str(folder / name) for name in names}}
        (folder / "scratch").mkdir()
        for rows, ttl in ((LASTING, 0), (LONG, TTL), (SHORT, SHORT_TTL)):
            source.raw().batch_put(rows, ttl)
        assert world.call(("backup", "raw"), new=world.names["sound"]).code == 0
        eventually(lambda: contents(source).keys() == ROWS.keys())
        world.log_to(folder / "log")
        source.raw().delete(b"row000")  # what the log wrote lasts
        source.raw().put(b"row000", LASTING[b"row000"])
        yield world


@pytest.fixture
def wrong_clock(request: pytest.FixtureRequest, expiring: World, monkeypatch: pytest.MonkeyPatch) -> float:
    """Move the tool's clock by so many seconds."""
    target = expiring.target.raw()
    target.batch_delete(list(contents(expiring.target)))
    seconds: float = request.param
    move_clock(monkeypatch, seconds)
    return seconds


def check_target(world: World) -> None:
    """The second cluster has all rows that have not expired, with their remaining TTLs."""
    assert contents(world.target) == ROWS
    raw = world.target.raw()
    assert {raw.get_ttl(key) for key in LASTING} == {0}
    assert all(0 < (raw.get_ttl(key) or 0) <= TTL for key in LONG)


@BOTH_WAYS
def test_a_backup_equals_its_cluster(expiring: World, wrong_clock: float, tmp_path: Path) -> None:
    """With both engines; the message names the difference of the clocks."""
    for engine in ("store", "scan"):
        ended = expiring.call(("backup", "raw"), "--checksum", "--engine", engine, new=str(tmp_path / engine))
        assert ended.code == 0, ended
    ended = expiring.call(("verify",), "--level", "restore", "--pd", expiring.source.pd, sound=str(tmp_path / "scan"))
    assert ended.code == 0, ended
    assert wrong_clock


@BOTH_WAYS
@pytest.mark.parametrize(
    "command", [("restore", "raw"), ("restore", "point"), ("restore", "raw", "--log"), ("restore", "raw", "--mode")]
)
def test_a_restored_cluster_equals_the_backup(expiring: World, wrong_clock: float, command: CommandPath) -> None:
    """By files and by puts, to the end of the backup and to a point in time; the message has the clocks' difference."""
    more = ["--mode", "put"] if command[-1] == "--mode" else []
    ended = expiring.call(("restore", "raw") if more else command, *more)
    assert ended.code == 0, ended
    side = "ahead of" if wrong_clock > 0 else "behind"
    assert f"This machine's clock is 2 h 0 min {side} PD's. Expiry is judged by PD's." in ended.err
    check_target(expiring)


@BOTH_WAYS
@pytest.mark.usefixtures("wrong_clock")
def test_verify_and_diff_find_no_difference(expiring: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the backup, and a cluster with its rows, whichever rows are read; the clock is measured once per cluster."""
    measured: list[object] = []
    measure = clock.measure_clock

    def counted(pd: PdClient) -> clock.ClockDifference:
        measured.append(pd)
        return measure(pd)

    monkeypatch.setattr(clock, "measure_clock", counted)
    commands: list[tuple[CommandPath, list[str]]] = [
        (("verify",), ["--level", "restore", "--pd", expiring.source.pd]),
        (("diff",), []),
        (("diff",), ["--exact"]),
    ]
    for command, more in commands:
        measured.clear()
        ended = expiring.call(command, *more)
        assert ended.code == 0, ended
        assert len(measured) == 1, command


@BOTH_WAYS
@pytest.mark.usefixtures("wrong_clock")
def test_diff_repairs_rows_with_their_ttls(expiring: World) -> None:
    """Rows that expire later are missing, and are written; those that have expired are neither."""
    ended = expiring.call(("diff",), "--repair", "--yes", "--output", "json", pd=expiring.target.pd)
    assert ended.code == 0, ended
    assert ended.last["puts"] == len(ROWS)
    check_target(expiring)


@BOTH_WAYS
@pytest.mark.usefixtures("wrong_clock")
def test_a_sync_keeps_live_rows_and_deletes_expired_ones(expiring: World, tmp_path: Path) -> None:
    """By the clock of the target's PD; the lag is by the source's."""
    expiring.target.raw().batch_put({b"expired": b"older value"})
    start = expiring.source.cluster.pd.tso()
    source = expiring.source.raw()
    for rows, ttl in ((LASTING, 0), (LONG, TTL), ({b"expired": b"newer value"}, 1)):
        source.batch_put(rows, ttl)
    options = SyncOptions(
        changefeed_id="clock",
        source=expiring.source.config,
        target=TikvTarget(expiring.target.config.pd, ""),
        state=parse(f"local://{tmp_path}/state"),
        scratch=tmp_path,
        start=FromTs(start),
        feed=FeedOptions(hold_back=3),
    )
    stop, running = threading.Event(), list[Replicator]()
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(sync, options, stop, running.append)
        try:
            eventually(lambda: done.done() or (bool(running) and contents(expiring.target) == ROWS))
            lags = [each.status().checkpoint_lag for each in running]
        finally:
            stop.set()
        assert done.result() is not None
    assert 0 <= lags[0] < 60
    check_target(expiring)


@BOTH_WAYS
@pytest.mark.usefixtures("wrong_clock")
def test_an_age_counts_back_from_the_time_of_pd(expiring: World) -> None:
    """Not from this machine's."""
    before = expiring.source.cluster.pd.tso()
    found = parse_ts("-10m", "--until", partial(pd_time, expiring.target.config))
    assert 590 < seconds_between(found, before) < 610
    ended = expiring.call(("restore", "point"), "--until", "-4h")
    assert ended.code != 0
    assert "outside the restorable window" in ended.err


@BOTH_WAYS
@pytest.mark.usefixtures("wrong_clock")
def test_an_export_of_a_backup_has_the_rows_of_its_time(expiring: World, tmp_path: Path) -> None:
    """Rows that have expired since are in it, with their expiry; whatever this machine's clock shows."""
    ended = expiring.call(("export", "raw", "--from-backup"), exported=str(tmp_path))
    assert ended.code == 0, ended
    text = "".join(path.read_text() for path in tmp_path.glob("part-*"))
    assert all(key.decode() in text or key.hex() in text for key in LASTING | LONG | SHORT)


@BOTH_WAYS
@pytest.mark.usefixtures("wrong_clock")
def test_an_export_can_be_loaded(expiring: World) -> None:
    """Expiries in the files are by the cluster's clock, and so are the TTLs of what is loaded."""
    ended = expiring.call(("export", "raw"), "--overwrite")
    assert ended.code == 0, ended
    for path in sorted(Path(expiring.names["exported"]).glob("part-*.jsonl")):
        ended = tikv_br("raw", "load", str(path), "--pd", expiring.target.pd)
        assert ended.code == 0, ended
    check_target(expiring)


@BOTH_WAYS
@pytest.mark.usefixtures("wrong_clock")
def test_ttls_of_loaded_rows_count_from_now(expiring: World, tmp_path: Path) -> None:
    """From files to the cluster, by puts and by ingest; ``raw scan`` and ``raw ttl`` say when they expire."""
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"key": list(LONG), "value": list(LONG.values()), "ttl": [TTL] * len(LONG)}), table)
    expiring.target.raw().batch_put(LASTING)
    ended = expiring.call(
        ("load", "raw"), "--ttl-column", "ttl", "--executor", "driver", "--allow-overwrite", table=str(table)
    )
    assert ended.code == 0, ended
    check_target(expiring)
    expiring.target.raw().batch_delete(list(LONG))
    ended = tikv_br("raw", "load", str(table), "--pd", expiring.target.pd)
    assert ended.code == 0, ended
    check_target(expiring)
    ended = tikv_br("raw", "ttl", "long0", "--output", "json", "--pd", expiring.target.pd)
    expiries = [ended.last["expire_ts"]]
    scan = ("--with-ttl", "--start", "long", "--end", "lonh", "--output", "json")
    ended = expiring.call(("raw", "scan"), *scan, pd=expiring.target.pd)
    soon = expiring.target.cluster.pd.tso() / (1000 << 18) + TTL
    expiries += [json.loads(line)["expire_ts"] for line in ended.out.splitlines()]
    assert len(expiries) == len(LONG) + 1
    assert all(soon - TTL < each < soon + clock.CLOCK_SECONDS for each in expiries)
