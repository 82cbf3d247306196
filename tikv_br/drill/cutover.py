"""The steps that follow the source after the restore and rehearse the moment when clients move to the target.

Comparison of the target with a source that is still written to.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from tikv_br.cluster import versions
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.keyspaces import chosen_keyspace
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.timestamps import seconds_between
from tikv_br.diff.places import ClusterChoice, DiffOptions
from tikv_br.diff.run import DiffResult, diff
from tikv_br.drill.context import DrillContext
from tikv_br.drill.tail import FollowedRange, TailPlan, diff_options, follow_source
from tikv_br.errors import DifferencesFound, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Notice, Reporter
from tikv_br.report.facts import Compared

MAX_KEYS = 2000
"""Maximum number of differing keys that are read one by one; with more, their ranges are compared again."""
ROUNDS = 5
TRIES = 3
CatchUp = Callable[[Callable[[], None]], None]
"""Returns when B has all that A had at the time of the call; until then it calls its argument repeatedly."""


@dataclass(frozen=True, slots=True)
class LiveDiff:
    """The result of a comparison that found no difference."""

    rows: int
    bytes: int
    changing: int
    """Keys that changed at the source between any two reads, so they cannot be compared."""


def compare_live(clusters: ClusterPool, options: DiffOptions, catch_up: CatchUp, reporter: Reporter) -> LiveDiff:
    """Compare A, which is still written to, with B, which follows it.

    Raises `DifferencesFound` for a key that differs although A has not changed it.
    """
    found = [diff(structs.replace(options, keys=MAX_KEYS), reporter)]
    rows, size = found[0].summary.rows, found[0].summary.bytes
    for _round in range(ROUNDS):
        remaining = sum(each.summary.remaining for each in found)
        if remaining == sum(len(each.keys) for each in found):
            keys = [difference.key for each in found for difference in each.keys]
            return LiveDiff(rows, size, _follow_keys(clusters, options, keys, catch_up))
        catch_up(lambda: None)
        found = [diff(structs.replace(options, keys=MAX_KEYS, span=span), reporter) for span in _spans(found)]
    raise DifferencesFound(
        f"{remaining} keys of the target differ from the source's in each of {ROUNDS} comparisons",
        hint="If the source is written to that much, stop writes during the cut-over. Else compare with `tikv-br diff`.",
    )


def _spans(found: Sequence[DiffResult]) -> list[KeyRange]:
    """The ranges that differ, with adjacent ones merged."""
    spans: list[KeyRange] = []
    for span in sorted(each.span for result in found for each in result.ranges):
        if spans and spans[-1].end == span.start:
            spans[-1] = KeyRange(spans[-1].start, span.end)
        else:
            spans.append(span)
    return spans


def _follow_keys(clusters: ClusterPool, options: DiffOptions, keys: Sequence[bytes], catch_up: CatchUp) -> int:
    """Check that B has what A had, for each key; returns how many changed too fast to compare."""
    a, b = (_raw(clusters, side) for side in (options.a, options.b) if isinstance(side, ClusterChoice))
    wrong: list[bytes] = []
    for _try in range(TRIES):
        if not keys:
            return 0
        seen = _SourceValues(a, keys)
        seen.read()
        catch_up(seen.read)
        there = b.batch_get(keys)
        seen.read()
        keys = [key for key in keys if _digest(there.get(key)) not in seen.digests[key]]
        wrong = [key for key in keys if len(seen.digests[key]) == 1]
    if wrong:
        raise DifferencesFound(
            f"{len(wrong)} keys of the target differ from the source's, the first is {min(wrong).hex()}",
            hint="Compare with `tikv-br diff`. Either somebody writes to the target, or this is a defect of tikv-br.",
        )
    return len(keys)


class _SourceValues:
    def __init__(self, raw: RawClient, keys: Sequence[bytes]) -> None:
        self._raw = raw
        self.digests: dict[bytes, set[bytes | None]] = {key: set() for key in keys}

    def read(self) -> None:
        found = self._raw.batch_get(self.digests)
        for key, digests in self.digests.items():
            digests.add(_digest(found.get(key)))


def _digest(value: bytes | None) -> bytes | None:
    return None if value is None else hashlib.blake2b(value, digest_size=16).digest()


def _raw(clusters: ClusterPool, side: ClusterChoice) -> RawClient:
    cluster = clusters.get(side.config)
    return cluster.raw(chosen_keyspace(cluster, side.keyspace))


CHECK_SECONDS = 1.0
MAX_RANGES = 16
"""Each range is followed by a thread of its own."""


RPO_METHOD = (
    "With a tail, by the source's timestamps: from the checkpoint, up to which the target had every write, until the assumed "
    "end of writes. This is what would be lost if the source failed at that moment."
)


BY_CHECKSUMS = "by the stores' checksums of both sides, down to the rows where these differ"


BY_ROWS = (
    "by reading all rows of both sides, because comparing passes rely on checksums, which do not show every change"
)


def check_source(context: DrillContext) -> None:
    """Refuse a source that cannot be followed, before anything is made. Raises `UsageError`, `ClusterUnfit`."""
    source = context.options.source
    if source is None:
        return
    cluster = context.clusters.get(source)
    info = cluster.info(context.recorder)
    cluster.require(versions.CHECKSUMS)
    cluster.require(versions.FEED)
    made = context.options.backup
    written = info.api_version if made is None or made.dst_api_version is None else made.dst_api_version
    if info.api_version is ApiVersion.V2 and written is not ApiVersion.V2:
        raise UsageError(
            f"--tail starts from the backup-ts of a backup in API V2, and one in {written.label} has no timestamps",
            hint="Omit --dst-api-version, or --tail.",
        )


def check_start(context: DrillContext) -> None:
    """Refuse a backup from which the source cannot be followed. Raises `UsageError`."""
    if context.options.source is None:
        return
    source, backup = context.clusters.get(context.options.source), context.backup
    if backup.cluster_id != source.cluster_id:
        raise UsageError(
            f"--tail: the backup is of cluster {backup.cluster_id}, and --pd is cluster {source.cluster_id}"
        )
    if source.api_version is ApiVersion.V2 and not (backup.backup_ts and backup.api_version is ApiVersion.V2):
        raise UsageError("--tail starts from the backup-ts of a backup in API V2, and this backup has none")
    if len(backup.ranges) > MAX_RANGES:
        raise UsageError(
            f"--tail follows up to {MAX_RANGES} ranges, and the backup has {len(backup.ranges)}",
            hint="Run a drill for each group of keyspaces.",
        )


def follow(context: DrillContext) -> None:
    """Follow the source for the requested time, and until the lag is small enough."""
    plan = _plan(context)
    for creation in plan.safe_points():
        context.ledger.add(creation)
    follower = context.follower = context.tail.enter_context(follow_source(plan))
    until = context.recorder.now + plan.options.seconds
    while (left := until - context.recorder.now) > 0:
        context.check_lease()
        follower.checkpoint_ts()  # raises what stopped it
        time.sleep(min(CHECK_SECONDS, left))
    max_lag = plan.options.lag
    follower.wait(lambda: follower.lag() <= max_lag, f"did not come within {max_lag:g} s of the source")
    context.recorder(Notice(f"the tail has written {follower.written():,} rows and is {follower.lag():.1f} s behind"))


def stop(context: DrillContext) -> None:
    """Stop the tail if it runs. Its last checkpoint is saved unless the lease is lost."""
    context.tail.close()


def cut_over(context: DrillContext) -> None:
    """Assume that writes end, wait until the target has all of them, compare it with the source, and stop the tail."""
    follower = context.follower
    follower.force_exact()
    start, end_ts = context.recorder.now, follower.now_ts()
    lost = seconds_between(follower.checkpoint_ts(), end_ts)
    context.measured = replace(context.measured, rpo=lost, rpo_method=RPO_METHOD)
    follower.wait(lambda: follower.checkpoint_ts() >= end_ts, "did not reach the end of the writes")
    caught_up = context.recorder.now - start
    plan, reporter = _plan(context), context.recorder.nested
    wanted = [structs.replace(diff_options(plan, each), exact=not plan.uses_feed) for each in plan.ranges]
    found = [compare_live(plan.clusters, each, follower.catch_up, reporter) for each in wanted]
    stop(context)
    context.measured = replace(context.measured, cut_over=round(context.recorder.now - start, 3))
    changing = sum(each.changing for each in found)
    skipped = f" {changing} keys changed at the source between any two reads and were not compared." if changing else ""
    context.compared.append(
        Compared(
            "target and source after the cut-over",
            f"{BY_CHECKSUMS if plan.uses_feed else BY_ROWS}. The source is still written to: a row that differed was read "
            f"again until the target had what the source had before. The target had all writes {caught_up:.1f} s after "
            f"their assumed end.{skipped}",
            sum(each.rows for each in found),
            sum(each.bytes for each in found),
        )
    )


def _plan(context: DrillContext) -> TailPlan:
    options, destination = context.options, context.destination
    if options.tail is None or options.source is None:
        raise ValueError("no tail was requested")
    return TailPlan(
        drill=context.id,
        clusters=context.clusters,
        options=options.tail,
        source=options.source,
        target=destination.cluster,
        backup=context.location,
        ranges=tuple(FollowedRange.of(context.backup, span, destination.keyspace) for span in context.backup.ranges),
        state=options.home.child(f"{context.folder}/sync"),
        check_lease=context.check_lease,
    )
