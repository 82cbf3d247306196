"""Syncs for a drill: they run beside the drill's own steps, and leave nothing that the drill does not know of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from formats.api_version import ApiVersion
from incremental.diff_mode import DiffMode, DiffModeOptions, Pass
from incremental.feed.options import FeedOptions
from incremental.handover import FromBackup, service_id
from incremental.replicate import Replicator
from incremental.sinks.open import SinkOptions
from incremental.sinks.url import TikvTarget
from incremental.sync import SyncOptions, sync
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster import safepoint
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.shared import shared_cluster
from tikv_br.diff.options import ClusterChoice, DiffOptions
from tikv_br.drill.ledger import Creation, Kind
from tikv_br.drill.tail import Course, Lane
from tikv_br.errors import CutOverFailed, DrillRemains, UsageError

GC_TTL = 600
"""Seconds that GC waits at most for a drill that is no more."""
PASS_SECONDS = 5.0
"""From the begin of one pass that compares to that of the next."""


class Runner(Protocol):
    """What keeps one lane behind the source, in a thread of its own."""

    def run(self) -> None:
        """Go on until told to stop. Raises what ends it before."""

    def checkpoint_ts(self) -> int:
        """See `tikv_br.drill.tail.Following`."""

    def written(self) -> int:
        """See `tikv_br.drill.tail.Following`."""

    def make_sure(self) -> None:
        """See `tikv_br.drill.tail.Following`."""


class FeedRunner:
    """By the change feed."""

    def __init__(self, options: SyncOptions, stop: threading.Event) -> None:
        self._options, self._stop = options, stop
        self._replicator: Replicator | None = None

    def run(self) -> None:
        """As `sync`."""
        sync(self._options, self._stop, self._begin)

    def checkpoint_ts(self) -> int:
        """0 until it has begun."""
        return 0 if self._replicator is None else self._replicator.status().checkpoint_ts

    def written(self) -> int:
        """0 until it has begun."""
        return 0 if self._replicator is None else self._replicator.status().written

    def make_sure(self) -> None:
        """A feed tells of every change."""

    def _begin(self, replicator: Replicator) -> None:
        self._replicator = replicator


class DiffRunner:
    """By passes that compare; a checkpoint is the moment when the last of them that has ended began."""

    def __init__(self, options: DiffModeOptions, now_ts: Callable[[], int], stop: threading.Event) -> None:
        self._mode = DiffMode(options, stop)
        self._now_ts = now_ts
        self._began_ts = self._checkpoint_ts = self._written = 0

    def run(self) -> None:
        """As `DiffMode.run`."""
        self._mode.run(self._ended, self._begins)

    def checkpoint_ts(self) -> int:
        """0 until a pass has ended."""
        return self._checkpoint_ts

    def written(self) -> int:
        """By all passes."""
        return self._written

    def make_sure(self) -> None:
        """Let each pass that begins from now on read all rows."""
        self._mode.make_sure()

    def _begins(self) -> None:
        self._began_ts = self._now_ts()

    def _ended(self, done: Pass) -> None:
        self._written += done.puts + done.deletes
        self._checkpoint_ts = self._began_ts


class RunningTail:
    """Some lanes that are followed, each by a thread of its own. A `tikv_br.drill.tail.Following`."""

    def __init__(self, runners: Sequence[Runner], stop: threading.Event) -> None:
        self._runners, self._stop = runners, stop
        self._error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(runner,), name=f"tail-{number}", daemon=True)
            for number, runner in enumerate(runners)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End it, with its checkpoints saved; what it ended with is raised by `checkpoint_ts` alone."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def checkpoint_ts(self) -> int:
        """The least of the lanes'."""
        if self._error is not None:
            raise self._error
        if not all(thread.is_alive() for thread in self._threads):
            raise CutOverFailed("the sync has ended by itself")
        return min(runner.checkpoint_ts() for runner in self._runners)

    def written(self) -> int:
        """In all lanes."""
        return sum(runner.written() for runner in self._runners)

    def make_sure(self) -> None:
        """In all lanes."""
        for runner in self._runners:
            runner.make_sure()

    def _run(self, runner: Runner) -> None:
        try:
            runner.run()
        except Exception as error:  # noqa: BLE001 - it is raised where the drill asks
            self._error = self._error or error


@dataclass(frozen=True, slots=True)
class SourceTail:
    """Follows by the change feed, as `tikv-br sync --from-backup` does, or, where there is none, as `sync --mode diff`."""

    source: ClusterConfig
    scratch: Path
    """A directory of this machine for what does not fit into memory; nothing stays there."""
    feed: FeedOptions = field(default_factory=FeedOptions)
    interval: float = PASS_SECONDS

    @property
    def compares(self) -> bool:
        """See `tikv_br.drill.tail.Tail`."""
        return shared_cluster(self.source).api_version is not ApiVersion.V2

    def check_source(self, source: ApiVersion, written: ApiVersion) -> None:
        """See `tikv_br.drill.tail.Tail`."""
        if source is ApiVersion.V2 and written is not ApiVersion.V2:
            raise UsageError(
                f"--tail begins at the backup-ts of a backup in API V2, and one in {written.label} keeps no timestamps",
                hint="Leave out --dst-api-version, or --tail.",
            )

    def check_backup(self, backup: BackupSet) -> None:
        """See `tikv_br.drill.tail.Tail`."""
        if not self.compares and not (backup.backup_ts and backup.api_version is ApiVersion.V2):
            raise UsageError("--tail begins at the backup-ts of a backup in API V2, and this one has none")

    def plan(self, drill: str, lanes: Sequence[Lane]) -> list[Creation]:
        """The syncs' safe points at the source; passes that compare leave nothing there."""
        if self.compares:
            return []
        cluster_id = shared_cluster(self.source).cluster_id
        return [Creation(Kind.TAIL, f"{cluster_id}/{service_id(_name(drill, number))}") for number in range(len(lanes))]

    @contextmanager
    def follow(self, drill: str, course: Course) -> Iterator[RunningTail]:
        """Follow until the end of the block."""
        runners: list[Runner] = []
        stop = threading.Event()
        for number, lane in enumerate(course.lanes):
            if self.compares:
                runners.append(DiffRunner(self._passes(course, lane), shared_cluster(self.source).pd.tso, stop))
            else:
                runners.append(FeedRunner(self._sync(course, lane, _name(drill, number)), stop))
        running = RunningTail(runners, stop)
        with ExitStack() as stack:
            stack.callback(running.stop)
            running.start()
            yield running

    def remove(self, creation: Creation, drill: str) -> None:
        """Have PD forget a safe point. Raises `DrillRemains` for that of another cluster, or of another sync."""
        cluster_id, _, name = creation.place.partition("/")
        cluster = shared_cluster(self.source)
        number = name.rpartition("-")[2]
        if name != service_id(f"drill-{drill}-{number}") or cluster.cluster_id != int(cluster_id):
            raise DrillRemains(
                f"the safe point {name} is in cluster {cluster_id}, and the source is {cluster.cluster_id}",
                hint=f"It runs out within {GC_TTL} s by itself.",
            )
        safepoint.release(cluster.pd, name)

    def _sync(self, course: Course, lane: Lane, name: str) -> SyncOptions:
        told = None if course.steward is None else partial(_tell, course, lane)
        return SyncOptions(
            changefeed_id=name,
            source=self.source,
            target=TikvTarget(course.cluster.pd, str(lane.target.keyspace_id), below=lane.target.below),
            state=course.state,
            scratch=self.scratch,
            start=FromBackup(course.backup),
            keyspace=str(lane.keyspace),
            start_key=lane.start,
            end_key=lane.end,
            gc_ttl=GC_TTL,
            feed=self.feed,
            fence=course.fence,
            sink=SinkOptions(tls=course.cluster.tls, told=told),
        )

    def _passes(self, course: Course, lane: Lane) -> DiffModeOptions:
        a, b = ClusterChoice(self.source, str(lane.keyspace)), lane.there(course.cluster)
        return DiffModeOptions(
            DiffOptions(a, b, lane.start, lane.end, keys=0, executor="driver"),
            interval=self.interval,
            told=partial(_tell, course, lane),
            spare=partial(_spare, course, lane),
        )


def _tell(course: Course, lane: Lane, keys: Iterable[bytes]) -> None:
    """Before keys are written. Raises `LeaseLost`: what is written down then would be another's to remove."""
    course.fence()
    if course.steward is not None:
        course.steward.told(lane, list(keys))


def _spare(course: Course, lane: Lane, keys: Sequence[bytes]) -> Collection[bytes]:
    """Before keys are removed. Raises `LeaseLost`."""
    course.fence()
    return () if course.steward is None else course.steward.spare(lane, keys)


def _name(drill: str, number: int) -> str:
    return f"drill-{drill}-{number}"
