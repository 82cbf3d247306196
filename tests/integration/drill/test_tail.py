"""Drills that follow their source after the restore, and rehearse the cut-over while others write to it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.data import when
from tests.integration.drill.conftest import assert_nothing_left as assert_no_playground
from tests.integration.drill.killing import killed_at
from tests.integration.incremental.writer import Writer
from tests.support.background import Background
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, contents, live_cluster, make_keyspaces
from tikv_br.backupset import lease
from tikv_br.cluster.safepoint import release
from tikv_br.dataflow.options import BackupOptions
from tikv_br.drill import cutover
from tikv_br.drill.ledger import EntryKind, read_ledgers
from tikv_br.drill.objectives import Objectives
from tikv_br.drill.options import DrillOptions, TailOptions
from tikv_br.drill.playground import PlaygroundTarget
from tikv_br.drill.run import drill
from tikv_br.drill.targets import ClusterTarget
from tikv_br.errors import (
    DifferencesFound,
    LeaseLost,
    ObjectivesMissed,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.playground import launcher
from tikv_br.progress_events import StepStarted
from tikv_br.report.facts import DrillVerdict
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

SCRATCH = 7
ROWS = {b"row%03d" % number: b"value" * 10 for number in range(300)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V2 cluster that holds `ROWS`; it is soon resolved what was written."""
    quick = {"resolved_ts_interval": 0.1, "ts_ahead": 0.3}
    with live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1, **quick) as live:
        make_keyspaces(live, SCRATCH)
        live.raw().batch_put(ROWS)
        yield live


@pytest.fixture
def options(source: LiveCluster, tmp_path: Path) -> DrillOptions:
    """A drill that backs up, restores into a keyspace of the source itself, and follows for a moment."""
    backups = parse(str(tmp_path / "backups"))
    return DrillOptions(
        backups=backups,
        home=parse(str(tmp_path / "home")),
        target=ClusterTarget(source.config, str(SCRATCH)),
        backup=BackupOptions(cluster=source.config, storage=backups, executor="driver", safe_interval=0.0),
        source=source.config,
        tail=TailOptions(1.0, lag=30.0, scratch=tmp_path, feed=FeedOptions(hold_back=0.3), interval=0.1),
    )


@pytest.fixture(autouse=True)
def the_source_is_left_clean(source: LiveCluster) -> Iterator[None]:
    """Neither a safe point nor a row in the drill's keyspace outlasts a test."""
    yield
    assert contents(source, SCRATCH) == {}
    assert not [name for name in safe_points(source) if "drill" in name]


def safe_points(live: LiveCluster) -> list[str]:
    """Names of the services that hold GC."""
    return [each["service_id"] for each in live.get("/pd/api/v1/gc/safepoint")["service_gc_safe_points"]]


def assert_nothing_left(options: DrillOptions) -> None:
    """No copy, checkpoint or ledger entry remains."""
    home = open_store(options.home)
    assert read_ledgers(home) == []
    assert {info.name.partition("/")[0] for info in home.list()} <= {"reports", "index.html"}


def test_a_cut_over_is_rehearsed_while_others_write(options: DrillOptions, source: LiveCluster) -> None:
    """Into an empty keyspace: all is equal at the end, the figures are there, all is removed."""
    with Writer(source, 1, pause=0.02):
        found = drill(replace(options, objectives=Objectives(rpo=3600, rto=3600, cut_over=3600)))
    assert found.verdict is DrillVerdict.PASSED
    assert 0 <= (found.value("RPO") or 0) < 60
    assert 0 < (found.value("cut-over") or 0) < found.seconds
    assert found.compared[-1].what == "target and source after the cut-over"
    assert found.compared[-1].keys >= len(ROWS)
    assert "until the assumed end of writes" in next(goal.method for goal in found.goals if goal.name == "RPO")
    assert_nothing_left(options)


def test_a_cut_over_to_a_playground_is_one_too(options: DrillOptions, tmp_path: Path) -> None:
    """The limit of the cut-over is more than can be met, and it alone is missed."""
    target = PlaygroundTarget(launcher, tmp_path / "targets", stores=1)
    assert options.tail is not None
    asked = replace(
        options,
        target=target,
        removers={EntryKind.PLAYGROUND: target},
        tail=replace(options.tail, seconds=0.5),
        objectives=Objectives(cut_over=0.0),
    )
    with pytest.raises(ObjectivesMissed, match=r"missed cut-over \([^,]+, objective 0 s\)$"):
        drill(asked)
    assert_no_playground(asked)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V1 cluster that holds `ROWS`."""
    with live_cluster(tmp_path_factory.mktemp("old"), ApiVersion.V1, stores=1) as live:
        live.raw().batch_put(ROWS)
        yield live


def test_a_source_without_feed_is_followed_by_comparing(
    options: DrillOptions, source: LiveCluster, old: LiveCluster, tmp_path: Path
) -> None:
    """From V1 into a keyspace of a V2 cluster: its changes arrive, deletions too, and a row that only the target has goes."""
    assert options.backup is not None
    assert options.tail is not None
    asked = replace(
        options,
        source=old.config,
        backup=structs.replace(options.backup, cluster=old.config, dst_api_version=ApiVersion.V2),
    )

    def change() -> None:
        old.raw().delete(b"row007")
        old.raw().batch_put({b"row008": b"otherwise", b"new": b"row"})

    def meddle() -> None:
        source.raw(SCRATCH).put(b"foreign", b"x")

    found = drill(asked, when(StepStarted, "follow the source", change))
    assert found.verdict is DrillVerdict.PASSED
    assert (found.compared[-1].keys, found.value("keys")) == (len(ROWS), len(ROWS))
    assert "by reading all rows of both sides" in found.compared[-1].how
    assert contents(source, SCRATCH) == {}
    assert_nothing_left(asked)
    again = drill(replace(asked, backup=None), when(StepStarted, "follow the source", meddle))
    assert again.verdict is DrillVerdict.PASSED
    assert_nothing_left(asked)


def test_several_ranges_are_followed(options: DrillOptions, source: LiveCluster) -> None:
    """Each by a sync of its own, into one keyspace."""
    assert options.backup is not None
    source.raw().batch_put({b"a%d" % number: b"a" for number in range(9)})
    before = contents(source)
    asked = replace(
        options, backup=structs.replace(options.backup, ranges=(KeyRange(b"a", b"b"), KeyRange(b"row", b"zz/d")))
    )

    def change() -> None:
        source.raw().batch_put({b"a1": b"changed", b"row001": b"changed"})
        source.raw().delete(b"row002")

    found = drill(asked, when(StepStarted, "follow the source", change))
    assert found.verdict is DrillVerdict.PASSED
    assert found.compared[-1].keys == len(ROWS) - 1 + 9
    del before[b"row002"]
    assert contents(source) == before | {b"a1": b"changed", b"row001": b"changed"}
    assert_nothing_left(asked)
    source.raw().batch_put(ROWS)
    source.raw().delete_range(KeyRange(b"a", b"b"))


def test_sources_without_timestamps_are_refused_before_anything_is_made(options: DrillOptions) -> None:
    """The backup has no timestamps, although its source has them."""
    assert options.backup is not None
    with pytest.raises(UsageError, match="has no timestamps"):
        drill(replace(options, backup=structs.replace(options.backup, dst_api_version=ApiVersion.V1)))
    assert not list(Path(options.backups.path).glob("drill-*"))
    assert_nothing_left(options)


def test_a_different_row_of_the_target_fails_the_drill(
    options: DrillOptions, source: LiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client overwrites a row of the target: the comparison finds it."""
    monkeypatch.setattr(cutover, "TRIES", 1)

    def meddle() -> None:
        source.raw(SCRATCH).put(b"row001", b"otherwise")

    assert options.tail is not None
    with pytest.raises(DifferencesFound, match="1 keys of the target differ"):
        drill(
            replace(options, tail=replace(options.tail, seconds=0.1)),
            when(StepStarted, "rehearse the cut-over", meddle),
        )
    assert_nothing_left(options)


def test_a_drill_that_loses_its_home_stops_its_tail(
    options: DrillOptions, source: LiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the replication: later writes do not reach the target, and no safe point is written."""
    monkeypatch.setattr(lease, "acquire", partial(lease.acquire, renew_every=0.05))
    assert options.tail is not None

    def steal() -> None:
        if any("drill" in name for name in safe_points(source)) and contents(source, SCRATCH):
            lease.break_lease(open_store(options.home), force=True)

    with Background([(steal, 0.05)]), pytest.raises(LeaseLost):
        drill(replace(options, tail=replace(options.tail, seconds=120.0)))
    left = left_state(source, options)
    source.raw().put(b"row000", b"after the loss")
    time.sleep(2.0)
    assert left_state(source, options) == left
    assert contents(source, SCRATCH)[b"row000"] == ROWS[b"row000"]
    source.raw().put(b"row000", ROWS[b"row000"])
    assert drill(options).verdict is DrillVerdict.PASSED
    assert_nothing_left(options)
    expire_safe_points(source)


def expire_safe_points(source: LiveCluster) -> None:
    """End the safe points of killed drills, which expire after ten minutes."""
    for name in safe_points(source):
        if name.startswith("tikv-br-sync-drill-"):
            release(source.cluster.pd, name)


def left_state(source: LiveCluster, options: DrillOptions) -> list[object]:
    """State that a tail changes."""
    files = sorted(str(path) for path in Path(options.home.path).rglob("*") if path.is_file())
    return [contents(source, SCRATCH), safe_points(source), files]


def test_remains_of_a_drill_killed_in_its_tail_are_removed(
    options: DrillOptions, source: LiveCluster, forks: Forks
) -> None:
    """Killed with new rows at the target and a safe point at the source; the source keeps all of its rows."""
    with Writer(source, 2, pause=0.02):
        forks.start(partial(killed_at, options, "rehearse the cut-over"))
        assert forks.wait() == -signal.SIGKILL
    before = contents(source)
    assert any("drill" in name for name in safe_points(source))
    assert len(contents(source, SCRATCH)) > len(ROWS)
    assert drill(options).verdict is DrillVerdict.PASSED
    assert contents(source) == before
    assert_nothing_left(options)
    expire_safe_points(source)
