"""``tikv-br sync``."""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from tikv_br.cli import options, sync_options
from tikv_br.cli.etcd_flags import EtcdFlags
from tikv_br.cli.keys import read_range
from tikv_br.cli.option_groups import ClusterFlags, grouped
from tikv_br.cli.options import KeyForm, OutputForm
from tikv_br.cli.output import Output
from tikv_br.cli.status_flags import StatusFlags
from tikv_br.cli.stop_signals import signals_stop
from tikv_br.cli.storage_flags import StorageFlags
from tikv_br.cli.sync_by_diff import DiffModeFlags, follow_by_diff
from tikv_br.cli.sync_options import SinkFlags, StartFlags, StateFlags, SyncMode
from tikv_br.cli.sync_view import Running, describe, watching
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from incremental.replicate import SyncStatus
    from incremental.sinks.url import Target
    from incremental.sync import SyncOptions

app = typer.Typer(rich_markup_mode=None)
log = logging.getLogger(__name__)
SAVED = "The checkpoint is saved: the same command goes on from there."


@app.command("sync", no_args_is_help=True)
@grouped
def follow(
    *,
    cluster: ClusterFlags,
    keyspace: options.KeyspaceOption = "",
    start: sync_options.StartKeyOption = "",
    end: sync_options.EndKeyOption = "",
    form: options.FormatOption = KeyForm.RAW,
    sink_flags: SinkFlags,
    start_flags: StartFlags,
    mode: sync_options.ModeOption = SyncMode.FEED,
    diff_flags: DiffModeFlags,
    state_flags: StateFlags,
    etcd_flags: EtcdFlags,
    gc_ttl: sync_options.SyncGcTtlOption = 86400.0,
    hold_back: sync_options.HoldBackOption = 3.0,
    status_flags: StatusFlags,
    storage_flags: StorageFlags,
    output: options.OutputOption = OutputForm.CONSOLE,
) -> None:
    """Keep a second cluster seconds behind a first, from a backup on, until told to stop."""
    span = read_range(start, end, form)
    status_flags.check()
    if mode is SyncMode.DIFF:
        if start_flags != StartFlags():
            raise UsageError(
                "--mode diff has no start: its first pass finds whatever differs", hint="Leave out the start."
            )
        asked_diff = diff_flags.options(cluster, keyspace, span, sink_flags)
        follow_by_diff(Output(output), asked_diff, state_flags.name, status_flags)
        return
    # What can be refused is looked at before anything heavy is loaded.
    source, target, scratch = cluster.config(), sink_flags.target(), state_flags.scratch()
    _check_stdout(target, output)
    state = state_flags.state(cluster, storage_flags, etcd_flags)
    begin = start_flags.start(storage_flags)
    from incremental.feed.options import FeedOptions
    from incremental.replicate import ReplicateOptions
    from incremental.sync import SyncOptions

    asked = SyncOptions(
        changefeed_id=state_flags.name,
        source=source,
        target=target,
        state=state,
        scratch=scratch,
        start=begin,
        keyspace=keyspace,
        start_key=span[0],
        end_key=span[1],
        gc_ttl=round(gc_ttl),
        sorter_bytes=state_flags.sorter_memory,
        sink=sink_flags.options(cluster),
        feed=FeedOptions(hold_back=hold_back),
        replicate=ReplicateOptions(
            state_flags.checkpoint_every, sink_flags.sink_patience, longest_wait=sink_flags.sink_backoff
        ),
    )
    _follow_feed(Output(output), asked, status_flags)


def _check_stdout(target: Target, output: OutputForm) -> None:
    from incremental.sinks.url import StdoutTarget

    if isinstance(target, StdoutTarget) and output is OutputForm.JSON:
        raise UsageError(
            "--sink - writes changes to standard output, where --output json would mix its lines with them",
            hint="Leave out --output json, and say --log-format json or --status-addr; or take --sink file:///PATH.",
        )


def _follow_feed(out: Output, asked: SyncOptions, status_flags: StatusFlags) -> None:
    from incremental.sinks.url import StdoutTarget
    from incremental.sync import sync

    stop, running = threading.Event(), Running(asked.changefeed_id)
    to_stdout = isinstance(asked.target, StdoutTarget)
    with (
        signals_stop(stop, SAVED) as told,
        watching(out, running, status_flags, lines=to_stdout and sys.stdout.isatty()),
    ):
        status = sync(asked, stop, running.begin)
    _end(out, status, quiet=to_stdout)
    if told:
        raise told[0]


def _end(out: Output, status: SyncStatus, *, quiet: bool) -> None:
    """The last word; to people it is only logged where standard output is the sink."""
    if quiet and not out.is_json:
        log.info("stopped: %s", describe(status))
    else:
        out.result("summary", asdict(status), f"Stopped: {describe(status)}")
    out.flush()
