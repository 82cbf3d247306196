"""Syncs broken in every call between their parts, in every way, and run again until the clusters are equal.

A sync is no list of steps: its boundaries are the calls of feed, sorter, sink, checkpoint and safe point, taken here from the
very classes, so that a new method is covered from its first day.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.integration.crash.cells import Kind, When
from tests.integration.crash.sync_cells import break_in, chosen, name_of, run_until
from tests.integration.crash.world import files, forget_safe_points
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tikv_br.cluster.ingests import Ingest, Ingests
from tikv_br.cluster.safepoint import SafePointKeeper
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.incremental.checkpoint import CheckpointStore, ObjectCheckpoints
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.feed.feed import Feed
from tikv_br.incremental.handover import FromTs
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.tikv import TikvSink
from tikv_br.incremental.sinks.url import parse
from tikv_br.incremental.sinks.writer import ReplicateOptions
from tikv_br.incremental.sorter import Sorter
from tikv_br.incremental.sync import SyncOptions
from tikv_br.storage.url import StorageLocation


class WatchedIngests(Protocol):
    """The methods of `Ingests` that a feed uses."""

    def revision(self) -> int:
        """The revision of the last change of any announcement."""

    def read(self) -> tuple[Ingest, ...]:
        """All announcements."""


PARTS: tuple[tuple[type, type], ...] = (
    (ObjectCheckpoints, CheckpointStore),
    (SafePointKeeper, SafePointKeeper),
    (Feed, Feed),
    (Sorter, Sorter),
    (TikvSink, Sink),
    (Ingests, WatchedIngests),
)
"""Parts of a sync, with the class that describes the calls."""
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster to follow."""
    settings = {"stores": 1, "regions": 2, "resolved_ts_interval": 0.1, "ts_ahead": 0.1}
    with live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, **settings) as live:
        yield live


@pytest.mark.parametrize(("part", "name", "when", "kind"), chosen(PARTS), ids=name_of)
def test_a_sync_broken_in_a_call(
    part: type,
    name: str,
    when: When,
    kind: Kind,
    source: LiveCluster,
    target: LiveCluster,
    forks: Forks,
    tmp_path: Path,
) -> None:
    """It ends with its exit code; run again, the target has every change, one checkpoint and one safe point are there."""
    turn = next(numbers)
    state = StorageLocation("local", str(tmp_path / "state"))
    options = SyncOptions(
        changefeed_id="broken",
        source=source.config,
        target=parse(f"tikv://{target.pd}"),
        state=state,
        start=FromTs(minus_seconds(source.cluster.pd.tso(), 10)),
        scratch=tmp_path,
        feed=FeedOptions(hold_back=0.1),
        replicate=ReplicateOptions(save_every=0.01),
    )
    source.raw().batch_put({b"key-%d" % number: b"turn %d" % turn for number in range(turn, turn + 5)})
    source.raw().delete(b"key-%d" % turn)
    break_in(options, source.cluster.pd.tso(), part, name, when, kind, forks)
    run_until(options, lambda: contents(target) == contents(source))
    assert list(source.safe_points()) == ["tikv-br-sync-broken"]
    left = sorted(name.partition("-")[0] for name in files(tmp_path / "state" / "broken"))
    assert left == ["checkpoint", "epoch"]
    assert set(files(tmp_path, but="/state/")) == set()
    forget_safe_points(source)
    source.raw().delete_range(EVERY_KEY)
