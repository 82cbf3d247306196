"""``tikv-br sync``."""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Literal

from tikv_br import signals
from tikv_br.cli import backup_flags, kinds, shared
from tikv_br.cli.command import Flags, command, flag
from tikv_br.cli.output import Output
from tikv_br.cli.status_flags import StatusFlags
from tikv_br.cli.sync_flags import (
    LOG_ID,
    SYNC_ID,
    FeedFlags,
    SinkFlags,
    StartFlags,
    StateFlags,
    SyncRangeFlags,
    scratch_folder,
)
from tikv_br.cli.sync_view import describe, serving, watching
from tikv_br.errors import LOG_DEGRADED, SyncDegraded, UsageError

if TYPE_CHECKING:
    from tikv_br.incremental.diff_mode import DiffModeOptions, Pass
    from tikv_br.incremental.sinks.url import Target
    from tikv_br.incremental.status import SyncStatus
    from tikv_br.incremental.sync import SyncOptions

log = logging.getLogger(__name__)
SAVED = "The checkpoint is saved: run the same command to resume."


class DiffModeFlags(Flags):
    """The passes of ``--mode diff``."""

    interval: float = flag(
        "30s", "With --mode diff: time from the start of one pass to the start of the next.", kind=kinds.TIME
    )
    exact_every: int = flag(
        0,
        "With --mode diff: read all rows in every Nth pass, to find what checksums miss.",
        limits=(0, 1_000_000),
        show_default="never",
    )


class FollowFlags(shared.CommandFlags):
    """Flags of what follows a cluster's change feed."""

    cluster: shared.ClusterFlags
    range: SyncRangeFlags
    start: StartFlags
    state: StateFlags
    etcd: shared.EtcdFlags
    feed: FeedFlags
    status: StatusFlags
    storage_flags: backup_flags.StorageFlags
    take_over: bool = flag(False, "End a running process of the same name and state, and continue from its checkpoint.")

    def options(self, target: Target, patience: float, keyspace: str = "", *more_keyspaces: str) -> SyncOptions:
        """Return the options, with defaults for what the sink of a log does not have. Raises `UsageError`."""
        source, scratch = self.cluster.config(), scratch_folder(self.state.scratch_dir)
        state = self.state.state(self.cluster, self.storage_flags, self.etcd, target)
        start, span = self.start.start(self.storage_flags, source), self.range.key_range()
        from tikv_br.incremental.feed.events import FeedOptions
        from tikv_br.incremental.sinks.writer import ReplicateOptions
        from tikv_br.incremental.sync import SyncOptions

        return SyncOptions(
            changefeed_id=self.state.id_for(target),
            former_id="" if self.state.name else LOG_ID,
            source=source,
            target=target,
            state=state,
            scratch=scratch,
            start=start,
            keyspace=keyspace,
            more_keyspaces=more_keyspaces,
            span=span,
            gc_ttl=round(self.feed.gc_ttl),
            sorter_bytes=self.state.sorter_memory,
            take_over=self.take_over,
            feed=FeedOptions(hold_back=self.feed.hold_back),
            replicate=ReplicateOptions(self.state.checkpoint_every, patience),
        )


class SyncFlags(FollowFlags):
    cluster: shared.ClusterFlags
    keyspace: str = shared.KEYSPACE()
    sink: SinkFlags
    mode: Literal["feed", "diff"] = flag(
        "feed", "How changes are found: feed (TiKV CDC, API V2 only) or diff (repeated comparison, any version)."
    )
    diff: DiffModeFlags
    allow_incomplete: bool = flag(False, "With --from-backup: start although the sink lacks the rows of the backup.")


@command(
    "sync",
    example="--pd 10.0.0.1:2379 --sink tikv://10.0.1.1:2379 --from-backup s3://backups/monday --state-dir s3://backups/sync",
)
def follow(flags: SyncFlags) -> None:
    """Replicate changes to another cluster or a file, until stopped."""
    flags.range.key_range()  # here and below: refuse wrong flags before heavy imports
    flags.status.check()
    if flags.mode == "diff":
        _follow_by_diff(flags)
    else:
        follow_feed(flags.out, _feed_options(flags), flags.status)


def _follow_by_diff(flags: SyncFlags) -> None:
    """Run passes until stopped. Raises `Terminated` or `Interrupted` then, and as `DiffMode`."""
    options = _diff_options(flags)
    from tikv_br.incremental.diff_mode import DiffMode
    from tikv_br.incremental.watch.status import PassTracker

    ends = ",".join(flags.cluster.config().pd), str(flags.sink.target())
    stop, passes, out = threading.Event(), PassTracker(flags.state.name or SYNC_ID, *ends), flags.out

    def report(done: Pass) -> None:
        passes.record(done)
        _show_pass(out, done)

    hint = "Run the same command to resume: its first pass finds all differences."
    with signals.stopping(stop, hint) as received, serving(out, passes, flags.status):
        DiffMode(options, stop).run(report, on_failure=passes.record_failure)
    if received:
        raise received[0]


def _diff_options(flags: SyncFlags) -> DiffModeOptions:
    """Return the options of comparing passes. Raises `UsageError` for flags that ``--mode diff`` does not support."""
    if flags.start != StartFlags():
        raise UsageError(
            "--mode diff takes no start: its first pass finds all differences",
            hint="Omit --from-backup, --from-backup-ts and --start-ts.",
        )
    if flags.sink.sink_ratelimit:
        raise UsageError("--sink-ratelimit cannot be combined with --mode diff, which writes only differences")
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.diff.places import ClusterChoice, DiffOptions
    from tikv_br.incremental.diff_mode import DiffModeOptions
    from tikv_br.incremental.sinks.url import TikvTarget

    target = flags.sink.target()
    if not isinstance(target, TikvTarget):
        raise UsageError("--mode diff needs a tikv:// sink: it compares two clusters")
    if flags.sink.allow_loss:
        raise UsageError("--allow-loss cannot be combined with --mode diff, which never drops TTLs")
    a = ClusterChoice(flags.cluster.config(), flags.keyspace)
    tls, skip = flags.sink.sink_tls.tls(flags.cluster), flags.cluster.skip_version_check
    b = ClusterChoice(ClusterConfig(pd=target.pd, tls=tls, skip_version_check=skip), target.keyspace)
    concurrency = flags.sink.sink_concurrency
    return DiffModeOptions(
        DiffOptions(
            a, b, flags.range.key_range(), keys=0, allow_empty=True, executor="driver", concurrency=concurrency
        ),
        target.check,
        flags.diff.interval,
        flags.diff.exact_every,
        flags.sink.sink_patience,
    )


def _show_pass(out: Output, done: Pass) -> None:
    exact = "exact " if done.exact else ""
    text = (
        f"{exact}pass {done.number}: {done.changed_ranges:,} of {done.ranges:,} ranges changed, {done.puts:,} rows "
        f"written, {done.deletes:,} deleted, {done.remaining:,} still changing; took {done.seconds:.1f} s"
    )
    out.result("pass", asdict(done), text)
    out.flush()


def _feed_options(flags: SyncFlags) -> SyncOptions:
    """Return the options of a sync by change feed. Raises `UsageError`."""
    target = flags.sink.target(flags.storage_flags)
    from tikv_br.incremental.sinks.url import StdoutTarget

    if isinstance(target, StdoutTarget) and flags.out.is_json:
        raise UsageError(
            "--sink - and --output json cannot be combined: both write to standard output",
            hint="Use --log-format json or --status-addr instead of --output json, or use --sink file:///PATH.",
        )
    sink, options = flags.sink, flags.options(target, flags.sink.sink_patience, flags.keyspace)
    replicate = replace(options.replicate, longest_wait=sink.sink_backoff, rate_limit=sink.sink_ratelimit)
    return replace(
        options,
        sink=sink.options(flags.cluster),
        replicate=replicate,
        allow_incomplete=flags.allow_incomplete,
    )


def follow_feed(out: Output, options: SyncOptions, status_flags: StatusFlags) -> None:
    """Run a sync until stopped. Raises `Terminated` or `Interrupted` then, and as `sync`."""
    from tikv_br.incremental.sinks.url import LogTarget, StdoutTarget
    from tikv_br.incremental.sync import sync
    from tikv_br.incremental.watch.status import FeedTracker

    ends = ",".join(options.source.pd), str(options.target)
    stop, running = threading.Event(), FeedTracker(options.changefeed_id, *ends)
    to_stdout = isinstance(options.target, StdoutTarget)
    with (
        signals.stopping(stop, SAVED, lambda: running.has_begun) as received,
        watching(out, running, status_flags, lines=to_stdout and sys.stdout.isatty()),
    ):
        status = sync(options, stop, running.begin, running.wait)
    if status is not None:
        _end(out, status, quiet=to_stdout)
        if status.missed:
            raise SyncDegraded(
                f"the sink of {options.changefeed_id} lacks rows that no change feed delivers: {'; '.join(status.missed)}",
                hint=LOG_DEGRADED if isinstance(options.target, LogTarget) else None,
            )
    if received:
        raise received[0]


def _end(out: Output, status: SyncStatus, *, quiet: bool) -> None:
    """Print the summary; as text it is logged if standard output is the sink."""
    if quiet and not out.is_json:
        log.info("stopped: %s", describe(status))
    else:
        out.result("summary", asdict(status), f"Stopped: {describe(status)}")
    out.flush()
