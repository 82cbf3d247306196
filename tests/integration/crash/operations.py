"""The operations that the matrix breaks: their options, their steps, and what a whole backup is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from tests.integration.crash.cells import FULL, Cell, cells, some
from tests.integration.crash.conftest import ROWS
from tests.integration.crash.world import files
from tests.support.live_cluster import LiveCluster
from tests.support.logs import LOG_ID
from tests.unit.archive.samples import LOG
from tikv_br.archive.compact import CompactionOptions, compaction_steps
from tikv_br.archive.log import LogSource
from tikv_br.backup import run
from tikv_br.backup.merge import MergeOptions, merge_backup, merge_steps
from tikv_br.backup.run import backup, backup_steps
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import BackupOptions
from tikv_br.drill.ledger import EntryKind as Made
from tikv_br.drill.options import DrillOptions, PointChoice, Scenario, TailOptions
from tikv_br.drill.playground import PlaygroundTarget
from tikv_br.drill.run import drill_steps, report_steps
from tikv_br.drill.targets import ClusterTarget
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.incremental.backup import back_up_changes, increment_steps
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.progress_events import Reporter
from tikv_br.restore.options import Mode, RestoreOptions
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions
from tikv_br.verify.options import Level, VerifyOptions
from tikv_br.verify.run import verify

BACKUP = BackupOptions(
    ClusterConfig(pd=("nobody:1",)),
    StorageLocation("local", "/nowhere"),
    checksum=True,
    executor="driver",
    concurrency=2,
    safe_interval=0,
)


def run_backup(options: BackupOptions, reporter: Reporter) -> None:
    """Back up."""
    backup(options, reporter)


def run_txn_backup(options: BackupOptions, reporter: Reporter) -> None:
    """Back up transactional data."""
    run.backup_txn(options, reporter)


def run_increment(options: BackupOptions, base: StorageLocation, reporter: Reporter) -> None:
    """Back up the changes since a backup."""
    back_up_changes(options, base, reporter)


def run_merge(options: MergeOptions, reporter: Reporter) -> None:
    """Merge backups and a log."""
    merge_backup(options, reporter)


def check_whole(live: LiveCluster, place: Path) -> None:
    """Every row of the cluster is in the backup, as its records say and its files hold."""
    location = StorageLocation("local", str(place))
    found = BackupSet.open(open_store(location))
    sums = live.raw().checksum()
    assert (found.totals.crc64xor, found.totals.total_kvs) == (sums.crc64xor, len(ROWS))
    assert verify(VerifyOptions(location, Level.DATA, executor="driver")).rows_checked == len(ROWS)


def check_alone(live: LiveCluster, place: Path, *, protected: bool = True) -> None:
    """Nothing else is there: no object, no file of a writer, no empty folder, one entry in the index, one safe point or none."""
    found = BackupSet.open(open_store(StorageLocation("local", str(place))), key_mode=None)
    assert found.manifest is not None
    entry = Index(open_store(StorageLocation("local", str(place.parent)))).read()
    assert [each.entry.path for each in entry] == ["backup"]
    names = {layout.META, layout.LOCK, layout.MANIFEST} | {file.name for file in found.files}
    index = {"snapshot.json", f"entries/{entry[0].entry.id}.json"}
    expected = {f"backup/{name}" for name in names} | {f"tikv-br-index/{name}" for name in index}
    assert set(files(place.parent, but="//")) == expected
    assert list(live.safe_points().values()) == ([found.backup_ts - 1] if protected else [])


INGEST = RestoreOptions(
    ClusterConfig(pd=("nobody:1",)),
    StorageLocation("local", "/nowhere"),
    import_mode=True,
    rate_limit=1 << 30,
    executor=ExecutorOptions(executor="driver", concurrency=2),
)


TXN_INGEST = structs.replace(INGEST, key_mode=KeyMode.TXN)
PUT = structs.replace(INGEST, mode=Mode.PUT, import_mode=False, rate_limit=0)


@dataclass(frozen=True)
class Lender:
    """Lends a running cluster instead of starting one; it is empty again when it is given back."""

    pd: str

    def start_detached(self, folder: Path, _api_version: ApiVersion, _stores: int) -> str:
        """Lend it."""
        folder.mkdir()
        return self.pd

    def stop(self, folder: Path) -> None:
        """Take it back."""
        if folder.exists():
            with Cluster.connect(ClusterConfig(pd=(self.pd,))) as cluster:
                cluster.raw(0).delete_range(EVERY_KEY)


@dataclass(frozen=True)
class Variant:
    """A kind of drill."""

    scenario: Scenario
    makes_backup: bool = False
    """Else it takes one that is there."""
    tail: bool = False
    """Whether it follows the source, into a keyspace that it owns; else it restores into a cluster that is lent."""
    source: ApiVersion = ApiVersion.V2

    def __str__(self) -> str:
        return f"tail-of-{self.source.label}" if self.tail else self.scenario


VARIANTS = (
    Variant(Scenario.DELETED_RANGE),
    Variant(Scenario.LOST_CLUSTER, makes_backup=True),
    Variant(Scenario.CORRUPT_BACKUP),
    # It moves GC of the cluster that is lent for good: each drill's backup must be younger than that.
    Variant(Scenario.STALE_SAFE_POINT, makes_backup=True),
    Variant(Scenario.LOST_CLUSTER, tail=True),
    Variant(Scenario.LOST_CLUSTER, tail=True, makes_backup=True, source=ApiVersion.V1),
    Variant(Scenario.POINT_IN_TIME),
)


READS_ONLY = {
    "check the target",
    "select the backup",
    "check that the backup has a timestamp",
    "check the source for the tail",
    "check the backup for the tail",
}
"""Steps that are only broken with `FULL`, or in no variant."""


SCRATCH = 7
"""The keyspace that a tail goes to."""


def drill_options(variant: Variant, folder: Path, source: ClusterConfig, target: ClusterConfig) -> DrillOptions:
    """A drill below a folder."""
    backups = StorageLocation("local", str(folder / "backups"))
    lent = PlaygroundTarget(Lender(target.pd[0]), folder / "targets")
    tail = TailOptions(0.2, lag=60.0, scratch=folder, feed=FeedOptions(hold_back=0), interval=0.1)
    asked = structs.replace(BACKUP, cluster=source, storage=backups, dst_api_version=ApiVersion.V2)
    return DrillOptions(
        backups=backups,
        home=StorageLocation("local", str(folder / "drills")),
        target=ClusterTarget(target, str(SCRATCH)) if variant.tail else lent,
        backup=asked if variant.makes_backup else None,
        source=source,
        tail=tail if variant.tail else None,
        removers={Made.PLAYGROUND: lent},
        scenario=variant.scenario,
        span=KeyRange(b"row", b"") if variant.scenario is Scenario.DELETED_RANGE else EVERY_KEY,
        point=PointChoice(LogSource(backups.child("log"), LOG_ID))
        if variant.scenario is Scenario.POINT_IN_TIME
        else None,
    )


def drill_cells(variant: Variant) -> list[Cell]:
    """The cells of a drill, up to the last step of its ending."""
    options = drill_options(variant, Path("/nobody"), BACKUP.cluster, BACKUP.cluster)
    return cells([*drill_steps(options), *report_steps()])


def chosen_drills() -> list[tuple[Variant, Cell]]:
    """With `FULL` all cells of all variants; else of each only the steps that those before it have not."""
    found: list[tuple[Variant, Cell]] = []
    known = set(READS_ONLY)
    for number, variant in enumerate(VARIANTS):
        mine = some(drill_cells(variant), offset=number)
        if not os.environ.get(FULL):
            mine = [cell for cell in mine if cell.step not in known]
        known |= {cell.step for cell in mine}
        found += [(variant, cell) for cell in mine]
    return found


BACKUP_STEPS = backup_steps(BACKUP)
TXN_STEPS = run.txn_backup_steps(BACKUP)
INCREMENT_STEPS = increment_steps(BACKUP)
MERGE_STEPS = merge_steps(MergeOptions(BACKUP, BACKUP.storage))
COMPACTION = CompactionOptions(BACKUP.storage, LOG, grace=0.0, executor="driver", concurrency=1)
COMPACTION_STEPS = compaction_steps(COMPACTION)
