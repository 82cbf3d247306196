"""Changes that no feed shows: the sync does not report them, a comparison finds them, and a repair copies them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.incremental.conftest import Clusters
from tests.support.background import Background
from tests.support.live_cluster import LiveCluster, contents
from tests.support.waiting import eventually
from tikv_br.backup.run import backup
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.dataflow.options import BackupOptions
from tikv_br.diff.options import ClusterChoice, DiffOptions
from tikv_br.diff.run import DiffSummary, diff, repair
from tikv_br.formats.api_version import ApiVersion
from tikv_br.incremental.feed.feed import FeedOptions
from tikv_br.incremental.handover import FromTs
from tikv_br.incremental.sinks.url import TikvTarget
from tikv_br.incremental.sync import SyncOptions, sync
from tikv_br.restore.options import Mode, RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation

ROWS = {b"row%03d" % at: b"value" for at in range(200)}
PATIENCE = 120.0
"""Seconds that a slow machine may take."""


class Following(Background):
    """A sync, for the length of a block."""

    def __init__(self, options: SyncOptions) -> None:
        super().__init__()
        self._spawn(self._follow, options)

    def _follow(self, options: SyncOptions) -> None:
        sync(options, self._enough, lambda _: None)


class Followed:
    """A source and the target that follows it."""

    def __init__(self, source: LiveCluster, target: LiveCluster) -> None:
        self.source, self.target = source, target
        self._marks = 0

    def catch_up(self) -> None:
        """Wait until the target has all that the feed shows of what was written before."""
        self._marks += 1
        mark = b"%d" % self._marks
        self.source.raw().put(b"mark", mark)
        eventually(lambda: self.target.raw().batch_get([b"mark"]) == {b"mark": mark}, PATIENCE)

    def compare(self) -> DiffSummary:
        """Compare source and target by checksums."""
        return diff(self._options()).summary

    def mend(self) -> None:
        """Have the target hold what the source holds."""
        assert repair(diff(self._options()), delete=True).summary.remaining == 0
        assert contents(self.target) == contents(self.source)

    def _options(self) -> DiffOptions:
        return DiffOptions(ClusterChoice(self.source.config), ClusterChoice(self.target.config), executor="driver")


@pytest.fixture
def followed(clusters: Clusters, targets: Clusters, tmp_path: Path) -> Iterator[Followed]:
    """A source with rows, and a target that has them by its feed."""
    source, target = clusters(ApiVersion.V2), targets(ApiVersion.V2)
    for live in (source, target):
        live.raw().delete_range(b"", b"")
    options = SyncOptions(
        changefeed_id="unseen",
        source=source.config,
        target=TikvTarget(target.config.pd),
        state=StorageLocation("local", str(tmp_path / "state")),
        scratch=tmp_path,
        start=FromTs(minus_seconds(source.cluster.pd.tso(), 10)),
        feed=FeedOptions(hold_back=0.0),
    )
    with Following(options):
        pair = Followed(source, target)
        source.raw().batch_put(ROWS)
        pair.catch_up()
        eventually(lambda: contents(target) == contents(source), PATIENCE)
        yield pair


def test_ranges_that_were_deleted_stay_at_the_target(followed: Followed) -> None:
    """RawDeleteRange: a comparison finds the keys at the target only, and a repair removes them."""
    followed.source.raw().delete_range(b"row050", b"row150")
    followed.catch_up()
    found = followed.compare()
    assert (found.only_a, found.only_b, found.value) == (0, 100, 0)
    followed.mend()


def test_restored_rows_are_followed(followed: Followed, tmp_path: Path) -> None:
    """A restore of files is announced and scanned, as it is in no feed; the same restore by puts is in the feed."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    source = followed.source
    backup(BackupOptions(source.config, place, safe_interval=0.0, engine="store", executor="driver"))
    for mode, prefix in ((Mode.INGEST, b"ing"), (Mode.PUT, b"put")):
        restore(RestoreOptions(source.config, place, mode=mode, rewrite_prefix=(b"row", prefix), allow_overwrite=True))
        followed.catch_up()
        eventually(lambda: followed.compare().only_a == 0, PATIENCE)
    assert followed.compare().remaining == 0


def test_expiry_needs_no_feed(followed: Followed) -> None:
    """The target's rows have times of their own: they go when the source's go."""
    followed.source.raw().batch_put(dict.fromkeys(ROWS, b"soon"), ttl=4)
    followed.catch_up()
    eventually(lambda: set(contents(followed.source)) == {b"mark"}, PATIENCE)
    eventually(lambda: set(contents(followed.target)) == {b"mark"}, PATIENCE)
    assert followed.compare().remaining == 0
