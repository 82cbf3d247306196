"""Following the source into a drill's target: a sync, or comparing passes, for each range of the backup.

They run in threads beside the drill's own steps. Their safe points at the source are in the drill's ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec import structs

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of
from tikv_br.cluster import safepoint
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.timestamps import seconds_between
from tikv_br.diff.places import ClusterChoice, DiffOptions
from tikv_br.drill.ledger import Creation, EntryKind
from tikv_br.drill.options import TailOptions
from tikv_br.errors import CutOverFailed, DrillRemains
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.diff_mode import DiffMode, DiffModeOptions, Pass
from tikv_br.incremental.handover import FromBackup, service_id
from tikv_br.incremental.pipeline import Replicator
from tikv_br.incremental.sinks.open import SinkOptions
from tikv_br.incremental.sinks.url import TikvTarget
from tikv_br.incremental.sync import SyncOptions, sync
from tikv_br.retry import wait_until
from tikv_br.storage.url import StorageLocation

POLL_SECONDS = 0.1
GC_TTL = 600
"""Seconds after which the safe point of a killed drill expires."""


@dataclass(frozen=True, slots=True)
class FollowedRange:
    """A range of the backup that is followed from the source to the target."""

    keyspace: int
    span: KeyRange
    """User keys."""
    target_keyspace: int

    @classmethod
    def of(cls, backup: BackupSet, span: KeyRange, target_keyspace: int | None) -> FollowedRange:
        """``span`` has RPC keys; None = rows stay in their keyspace."""
        codec = codec_of(backup.api_version, span)
        target = codec.keyspace_id if target_keyspace is None else target_keyspace
        return cls(codec.keyspace_id, codec.user_range(span), target)


@dataclass(frozen=True, slots=True)
class TailPlan:
    """Source and target of the replication."""

    drill: str
    clusters: ClusterPool
    options: TailOptions
    source: ClusterConfig
    target: ClusterConfig
    backup: StorageLocation
    ranges: tuple[FollowedRange, ...]
    state: StorageLocation
    """A folder of the drill's own for checkpoints."""
    check_lease: Callable[[], None]
    """Raises `LeaseLost` once the home is another drill's; nothing is written from then on."""

    @property
    def uses_feed(self) -> bool:
        """Return whether the source has a change feed; if not, passes compare it with the target."""
        return self.clusters.get(self.source).api_version is ApiVersion.V2

    def safe_points(self) -> list[Creation]:
        """The ledger entries of the syncs' safe points at the source."""
        if not self.uses_feed:
            return []
        cluster_id = self.clusters.get(self.source).cluster_id
        return [
            Creation(EntryKind.SAFE_POINT, f"{cluster_id}/{service_id(_sync_name(self.drill, number))}")
            for number in range(len(self.ranges))
        ]


class FeedRunner:
    """Follows one range by the change feed, as `sync --from-backup` does."""

    def __init__(self, options: SyncOptions, stop: threading.Event) -> None:
        self._options, self._stop = options, stop
        self._replicator: Replicator | None = None

    def run(self) -> None:
        """Run until ``stop`` is set. Raises as `sync`."""
        sync(self._options, self._stop, self._set_replicator)

    def checkpoint_ts(self) -> int:
        """0 before the sync has started."""
        return 0 if self._replicator is None else self._replicator.status().checkpoint_ts

    def written(self) -> int:
        return 0 if self._replicator is None else self._replicator.status().written

    def force_exact(self) -> None:
        """Do nothing: a feed has every change."""

    def _set_replicator(self, replicator: Replicator) -> None:
        self._replicator = replicator


class DiffRunner:
    """Follows one range by comparing passes, as `sync --mode diff` does. Its checkpoint is the start of the last complete pass."""

    def __init__(self, options: DiffModeOptions, now_ts: Callable[[], int], stop: threading.Event) -> None:
        self._mode = DiffMode(options, stop)
        self._now_ts = now_ts
        self._start_ts = self._checkpoint_ts = self._written = 0

    def run(self) -> None:
        """Run until ``stop`` is set. Raises as `DiffMode.run`."""
        self._mode.run(self._finish_pass, self._start_pass)

    def checkpoint_ts(self) -> int:
        """0 before the end of the first pass."""
        return self._checkpoint_ts

    def written(self) -> int:
        return self._written

    def force_exact(self) -> None:
        """Read all rows in each pass that starts from now on."""
        self._mode.force_exact()

    def _start_pass(self) -> None:
        self._start_ts = self._now_ts()

    def _finish_pass(self, done: Pass) -> None:
        self._written += done.puts + done.deletes
        self._checkpoint_ts = self._start_ts


Runner = FeedRunner | DiffRunner


class Tail:
    """The runners of all ranges, each in a thread of its own."""

    def __init__(self, plan: TailPlan, runners: Sequence[Runner], stop: threading.Event) -> None:
        self._plan, self._runners, self._stop = plan, runners, stop
        self._error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(runner,), name=f"tail-{number}", daemon=True)
            for number, runner in enumerate(runners)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop with saved checkpoints. Errors of the runners are only raised by `checkpoint_ts`."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def checkpoint_ts(self) -> int:
        """Return the timestamp up to which the target has all ranges; 0 = unknown.

        Raises the error of a runner, `CutOverFailed`.
        """
        if self._error is not None:
            raise self._error
        if not all(thread.is_alive() for thread in self._threads):
            raise CutOverFailed("the sync stopped without an error")
        return min(runner.checkpoint_ts() for runner in self._runners)

    def written(self) -> int:
        return sum(runner.written() for runner in self._runners)

    def force_exact(self) -> None:
        """Do not rely on checksums alone for checkpoints from now on."""
        for runner in self._runners:
            runner.force_exact()

    def now_ts(self) -> int:
        """Return a timestamp of the source that is larger than the timestamps of all earlier writes."""
        return self._plan.clusters.get(self._plan.source).pd.tso()

    def lag(self) -> float:
        """Seconds, by the source's timestamps, that the target is behind."""
        checkpoint = self.checkpoint_ts()
        return seconds_between(checkpoint, self.now_ts()) if checkpoint else float("inf")

    def catch_up(self, poll: Callable[[], None]) -> None:
        """Return when the target has all that the source has now, calling ``poll`` until then. Raises `CutOverFailed`."""
        now = self.now_ts()

        def is_reached() -> bool:
            poll()
            return self.checkpoint_ts() >= now

        self.wait(is_reached, "did not reach the source's current timestamp")

    def wait(self, is_reached: Callable[[], bool], failure: str) -> None:
        """Wait for a state of the tail. Raises `CutOverFailed` when that takes too long."""
        patience = self._plan.options.patience

        def too_late() -> CutOverFailed:
            return CutOverFailed(f"the tail {failure} within {patience:g} s: it is {self.lag():.1f} s behind")

        wait_until(is_reached, patience, too_late, poll=POLL_SECONDS, check=self._plan.check_lease)

    def _run(self, runner: Runner) -> None:
        try:
            runner.run()
        except Exception as error:  # noqa: BLE001 - `checkpoint_ts` raises it in the drill's thread
            self._error = self._error or error


@contextmanager
def follow_source(plan: TailPlan) -> Iterator[Tail]:
    """Follow the source until the end of the block."""
    stop = threading.Event()
    runners: list[Runner] = []
    for number, followed in enumerate(plan.ranges):
        if plan.uses_feed:
            runners.append(FeedRunner(_sync_options(plan, followed, _sync_name(plan.drill, number)), stop))
        else:
            runners.append(DiffRunner(_pass_options(plan, followed), plan.clusters.get(plan.source).pd.tso, stop))
    tail = Tail(plan, runners, stop)
    tail.start()
    try:
        yield tail
    finally:
        tail.stop()


@dataclass(frozen=True, slots=True)
class SafePointRemover:
    """Releases the safe points of this drill's syncs. Those of earlier ones, which only a ledger names, expire."""

    drill: str
    source: ClusterConfig

    def remove(self, creation: Creation, drill: str) -> None:
        """Release it. Raises `DrillRemains` for one of another cluster or another sync."""
        if drill != self.drill:
            return
        cluster_id, _, name = creation.place.partition("/")
        number = name.rpartition("-")[2]
        with Cluster.connect(self.source) as cluster:
            if name != service_id(f"drill-{drill}-{number}") or cluster.cluster_id != int(cluster_id):
                raise DrillRemains(
                    f"the safe point {name} is in cluster {cluster_id}, and the source is cluster {cluster.cluster_id}",
                    hint=f"It expires within {GC_TTL} s.",
                )
            safepoint.release(cluster.pd, name)


def diff_options(plan: TailPlan, followed: FollowedRange) -> DiffOptions:
    source = ClusterChoice(plan.source, followed.keyspace)
    target = ClusterChoice(plan.target, followed.target_keyspace)
    return DiffOptions(source, target, followed.span, allow_empty=True, executor="driver")


def _sync_options(plan: TailPlan, followed: FollowedRange, name: str) -> SyncOptions:
    return SyncOptions(
        changefeed_id=name,
        source=plan.source,
        target=TikvTarget(plan.target.pd, followed.target_keyspace),
        state=plan.state,
        scratch=plan.options.scratch,
        start=FromBackup(plan.backup),
        keyspace=followed.keyspace,
        span=followed.span,
        gc_ttl=GC_TTL,
        feed=plan.options.feed,
        fence=plan.check_lease,
        sink=SinkOptions(tls=plan.target.tls, skip_version_check=plan.target.skip_version_check),
    )


def _pass_options(plan: TailPlan, followed: FollowedRange) -> DiffModeOptions:
    return DiffModeOptions(
        structs.replace(diff_options(plan, followed), keys=0), interval=plan.options.interval, fence=plan.check_lease
    )


def _sync_name(drill: str, number: int) -> str:
    return f"drill-{drill}-{number}"
