"""The steps that follow the source for a while after the restore, and rehearse the moment when clients move over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from formats.keys import KeyCodec
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import KeyRange, intersection
from tikv_br.cluster import timestamp
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.shared import shared_cluster
from tikv_br.diff.options import ClusterChoice, DiffOptions
from tikv_br.drill.canary import Canary
from tikv_br.drill.context import DrillContext
from tikv_br.drill.journal import Journal
from tikv_br.drill.live_diff import compare_live
from tikv_br.drill.scratch import ClusterTarget
from tikv_br.drill.stewardship import Stewardship
from tikv_br.drill.tail import MOST_LANES, Course, Following, Lane, TailOptions
from tikv_br.drill.target import Target
from tikv_br.errors import CutOverFailed, UsageError
from tikv_br.progress_events import Notice
from tikv_br.proof.fit import check_gives_checksums
from tikv_br.proof.ranges import codec_of, user_range
from tikv_br.report.facts import Compared

POLL_SECONDS = 0.1
BEAT_SECONDS = 1.0
RPO_METHOD = (
    "With a tail, by the source's own timestamps: from the checkpoint, up to which every write was at the target, until "
    "{moment}, when the writes were taken to stop. What was lost had the source been gone at that moment."
)

BY_CHECKSUMS = "by the stores' checksums of both sides, down to the rows where these differ"
BY_ROWS = "by reading all rows of both sides, for passes that compare checksums do not see every change"


@dataclass
class Rehearsal:
    """A tail under way."""

    options: TailOptions
    source: ClusterConfig
    lanes: tuple[Lane, ...]
    canary: Canary | None
    check: Callable[[], None]
    """Raises `LeaseLost`: who has lost the drill's lease waits for nothing any more."""
    canary_lane: Lane | None = None
    following: Following | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def running(self) -> Following:
        """The tail, once it runs."""
        if self.following is None:
            raise ValueError("a step was left out")
        return self.following

    def now_ts(self) -> int:
        """A timestamp of the source: whatever was written there before has a smaller one."""
        return shared_cluster(self.source).pd.tso()

    def lag(self) -> float:
        """Seconds, by the source's timestamps, that the target is behind."""
        checkpoint = self.running.checkpoint_ts()
        if not checkpoint:
            return float("inf")
        return max(timestamp.physical_ms(self.now_ts()) - timestamp.physical_ms(checkpoint), 0) / 1000

    def catch_up(self, meanwhile: Callable[[], None]) -> None:
        """Return when the target has all that the source has now. Raises `CutOverFailed` when that takes too long."""
        wanted = self.now_ts()

        def reached() -> bool:
            meanwhile()
            return self.running.checkpoint_ts() >= wanted

        self.wait(reached, "reach what the source had")

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for a state of the tail."""
        until = time.monotonic() + self.options.patience
        while not reached():
            self.check()
            if time.monotonic() > until:
                raise CutOverFailed(
                    f"the tail did not {what} within {self.options.patience:g} s: it is {self.lag():.1f} s behind"
                )
            time.sleep(POLL_SECONDS)


def require_source(context: DrillContext) -> None:
    """Refuse a source that cannot be followed, before anything is made. Raises `UsageError`, `ClusterUnfit`."""
    options, source = _asked(context)
    info = shared_cluster(source).info()
    check_gives_checksums(info, hint="Clusters from 6.1.1 on can; leave out --tail.")
    made = context.options.backup
    written = info.api_version if made is None or made.dst_api_version is None else made.dst_api_version
    options.tail.check_source(info.api_version, written)


def require_hand_over(context: DrillContext) -> None:
    """Refuse a backup from which the source cannot be followed to where the target is. Raises `UsageError`."""
    options, source = _asked(context)
    backup, cluster = context.backup_set, shared_cluster(source)
    if backup.cluster_id != cluster.cluster_id:
        raise UsageError(f"--tail: the backup is of cluster {backup.cluster_id}, and --pd is {cluster.cluster_id}")
    options.tail.check_backup(backup)
    lanes = lanes_of(backup, context.options.target)
    _check_apart(context, lanes)
    canary, lane = None, None
    if options.canary:
        lane = next((each for each in lanes if _holds(each, options.canary)), None)
        if lane is None:
            raise UsageError(f"--canary {options.canary.hex()} lies outside of the backup's range")
        canary = Canary(source, lane.keyspace, options.canary, context.id)
        canary.check()
    context.rehearsal = Rehearsal(options, source, lanes, canary, context.check, lane)


def lanes_of(backup: BackupSet, target: Target) -> tuple[Lane, ...]:
    """The ranges of a backup, each in its keyspace, and where they go. Raises `UsageError` for too many, or a target that cannot be."""
    if len(backup.ranges) > MOST_LANES:
        raise UsageError(
            f"--tail follows up to {MOST_LANES} ranges, and the backup has {len(backup.ranges)}",
            hint="Rehearse some keyspaces by a drill of its own.",
        )
    to, below = None, b""
    if isinstance(target, ClusterTarget):
        to = shared_cluster(target.cluster).pd.keyspace_id(target.keyspace) if target.keyspace else None
        below = target.prefix
    found = []
    for span in backup.ranges:
        codec = codec_of(backup.api_version, span)
        there = KeyCodec(backup.api_version, codec.keyspace_id if to is None else to, below)
        found.append(Lane(span, codec.keyspace_id, *user_range(codec, span), there))
    return tuple(found)


def _check_apart(context: DrillContext, lanes: Sequence[Lane]) -> None:
    """What a tail writes must not be what it follows: it would follow itself, for ever."""
    target = context.options.target
    if not isinstance(target, ClusterTarget):
        return
    if shared_cluster(target.cluster).cluster_id != context.backup_set.cluster_id:
        return
    for lane in lanes:
        written = KeyRange(*lane.target.rpc_range(lane.start, lane.end))
        followed = next((each for each in lanes if not intersection(each.span, written).is_empty), None)
        if followed is not None:
            raise UsageError(
                f"--tail would write into {followed.span}, which it follows",
                hint="Take another keyspace or another cluster, or back up a range without the prefix.",
            )


def _holds(lane: Lane, key: bytes) -> bool:
    return lane.start <= key and (not lane.end or key < lane.end)


def follow(context: DrillContext) -> None:
    """Follow the source for the time that was asked for, and until the target is near enough."""
    here = context.under_way
    canary, options = here.canary, here.options
    for creation in options.tail.plan(context.id, here.lanes):
        context.ledger.note(creation)
    foreign = context.target_creation is not None and context.target_creation.scratch is not None
    state = context.options.home.child(f"{context.folder}/sync")
    journal = Journal(context.home, context.id)
    steward = Stewardship(context.backup_set, journal) if foreign else None
    course = Course(context.place, here.lanes, context.target.cluster, state, steward, context.check)
    here.following = here.stack.enter_context(options.tail.follow(context.id, course))
    if canary is not None:
        canary.check()  # once more: the restore may have taken hours
        context.ledger.note(canary.creation)
    until = context.recorder.now + options.seconds
    while (left := until - context.recorder.now) > 0:
        context.check()
        here.running.checkpoint_ts()
        if canary is not None:
            canary.beat()
        time.sleep(min(BEAT_SECONDS, left))
    here.wait(lambda: here.lag() <= options.lag, f"come within {options.lag:g} s of the source")
    context.recorder(Notice(f"the tail has written {here.running.written():,} rows, and is {here.lag():.1f} s behind"))


def stop(context: DrillContext) -> None:
    """End the tail, if it runs; its last checkpoint is saved, unless the lease is lost."""
    if context.rehearsal is not None:
        context.rehearsal.stack.close()


def cut_over(context: DrillContext) -> None:
    """Take the writes to stop, bring the target up to then, compare it with the source, and end the tail."""
    here = context.under_way
    if here.canary is not None:
        here.canary.beat()
    here.running.make_sure()
    began, stopped_ts = context.recorder.now, here.now_ts()
    behind = max(timestamp.physical_ms(stopped_ts) - timestamp.physical_ms(here.running.checkpoint_ts()), 0) / 1000
    moment = "the drill's own last write" if here.canary is not None else "a timestamp of the source"
    context.measured = replace(context.measured, rpo=behind, rpo_method=RPO_METHOD.format(moment=moment))
    here.wait(lambda: here.running.checkpoint_ts() >= stopped_ts, "reach the end of the writes")
    caught_up = context.recorder.now - began
    _check_canary(context)
    same = [compare_live(_comparison(context, lane), here.catch_up, context.recorder.inside) for lane in here.lanes]
    stop(context)
    context.measured = replace(context.measured, cut_over=round(context.recorder.now - began, 3))
    canary = f" The drill's own {here.canary.beats} writes were followed up to the last." if here.canary else ""
    restless = sum(each.moving for each in same)
    moving = f" {restless} keys changed at the source between any two looks, and say nothing." if restless else ""
    how = BY_ROWS if here.options.tail.compares else BY_CHECKSUMS
    context.compared.append(
        Compared(
            "the target with the source, after the cut-over",
            f"{how}; rows that differ because the source is written to all the while were looked at until the target had what "
            f"the source had before. The target had all writes {caught_up:.1f} s after they were taken to stop.{canary}{moving}",
            sum(each.rows for each in same),
            sum(each.bytes for each in same),
        )
    )


def _comparison(context: DrillContext, lane: Lane) -> DiffOptions:
    here = context.under_way
    return DiffOptions(
        ClusterChoice(here.source, str(lane.keyspace)),
        lane.there(context.target.cluster),
        lane.start,
        lane.end,
        exact=here.options.tail.compares,
        executor="driver",
    )


def _check_canary(context: DrillContext) -> None:
    """Raise `CutOverFailed` unless the last of the drill's own writes is at the target."""
    here = context.under_way
    if here.canary is None or here.canary_lane is None:
        return
    there = here.canary_lane.target
    raw = shared_cluster(context.target.cluster).raw(there.keyspace_id, below=there.below)
    found = raw.get(here.options.canary)
    if found != here.canary.value:
        raise CutOverFailed(
            f"the checkpoint has passed the drill's own last write, and the target has {found!r} instead of it",
            hint="This is a defect of tikv-br: please report it, with the drill's report.",
        )


def _asked(context: DrillContext) -> tuple[TailOptions, ClusterConfig]:
    if context.options.tail is None or context.options.source is None:
        raise ValueError("no tail was asked for")
    return context.options.tail, context.options.source
