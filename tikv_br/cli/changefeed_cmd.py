"""``tikv-br changefeed``: what a group of captures is to sync."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tikv_br.cli import options, sync_options
from tikv_br.cli.group_session import GroupSession, IdArgument, group_command, lag
from tikv_br.cli.keys import read_range, show
from tikv_br.cli.options import KeyForm, parse_duration, parse_size
from tikv_br.cli.processor_cmd import show_processors
from tikv_br.cli.storage_flags import StorageFlags
from tikv_br.cli.storage_session import utc
from tikv_br.cli.sync_options import SinkFlags, SinkTlsFlags, StartFlags
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from incremental.group.model import ChangefeedInfo, GroupState

log = logging.getLogger(__name__)
app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)
COLUMNS = ("id", "state", "checkpoint", "lag", "captures", "sub-spans", "sink", "error")

NameOption = Annotated[
    str, typer.Option("--id", metavar="NAME", help="Name of the changefeed, and of its safe point tikv-br-sync-NAME.")
]
SpansOption = Annotated[
    int,
    typer.Option("--spans", min=1, max=100, metavar="N", help="Sub-spans, so that N captures can share the work."),
]
WaitOption = Annotated[
    float,
    typer.Option(
        "--wait",
        parser=parse_duration,
        metavar="TIME",
        show_default="2m",
        help="How long to wait for captures to stop.",
    ),
]
NewTime = Annotated[float | None, typer.Option(parser=parse_duration, metavar="TIME", help="As for create.")]
NewSize = Annotated[int | None, typer.Option(parser=parse_size, metavar="SIZE", help="As for create.")]
NewNumber = Annotated[int | None, typer.Option(min=1, metavar="N", help="As for create.")]


@app.callback()
def changefeed() -> None:
    """Make and look after what a group of captures syncs."""


@app.command("create", no_args_is_help=True)
@group_command
def create(
    session: GroupSession,
    *,
    keyspace: options.KeyspaceOption = "",
    start: sync_options.StartKeyOption = "",
    end: sync_options.EndKeyOption = "",
    form: options.FormatOption = KeyForm.RAW,
    name: NameOption = "default",
    spans: SpansOption = 2,
    sink_flags: SinkFlags,
    start_flags: StartFlags,
    gc_ttl: sync_options.SyncGcTtlOption = 86400.0,
    hold_back: sync_options.HoldBackOption = 3.0,
    sorter_memory: sync_options.SorterMemoryOption = 256 << 20,
    storage_flags: StorageFlags,
) -> None:
    """Make a changefeed; the captures of the group begin with it at once."""
    first, last = read_range(start, end, form)
    target = sink_flags.target()
    from incremental.checkpoint import check_id
    from incremental.group.model import ChangefeedInfo
    from incremental.sinks.url import check_shared

    check_shared(target)
    asked = ChangefeedInfo(
        id=check_id(name),
        sink=str(target),
        keyspace_id=0,
        start_key=first,
        end_key=last,
        start_ts=0,
        created_ms=time.time_ns() // 1_000_000,
        spans=spans,
        gc_ttl=round(gc_ttl),
        drop_ttls=bool(sink_flags.allow_loss),
        concurrency=sink_flags.sink_concurrency,
        sorter_bytes=sorter_memory,
        hold_back_ms=round(hold_back * 1000),
        patience_ms=round(sink_flags.sink_patience * 1000),
        backoff_ms=round(sink_flags.sink_backoff * 1000),
        batch_rows=sink_flags.sink_batch_size,
    )
    begin = start_flags.required(storage_flags)
    from incremental.group.creation import resolved

    info = resolved(asked, session.cluster, keyspace, begin, sink_flags.options(session.flags))
    session.changefeeds.create(info)
    _show(session, info.id)


@app.command("list")
@group_command
def list_changefeeds(session: GroupSession) -> None:
    """List the changefeeds of a cluster."""
    from incremental.group.changefeeds import check_sound

    state = session.store.snapshot()
    rows = [_told(session, state, info) for info in state.changefeeds.values()]
    session.output.table(COLUMNS, rows)
    check_sound(state, *state.damaged)


@app.command("query", no_args_is_help=True)
@group_command
def query(session: GroupSession, changefeed_id: IdArgument) -> None:
    """Show one changefeed, and how each of its sub-spans is doing."""
    _show(session, changefeed_id)
    show_processors(session.output, session.store.snapshot(), changefeed_id)


@app.command("pause", no_args_is_help=True)
@group_command
def pause(session: GroupSession, changefeed_id: IdArgument) -> None:
    """Have a changefeed rest; GC waits for it as long as its --gc-ttl says."""
    session.changefeeds.pause(changefeed_id)
    _show(session, changefeed_id)


@app.command("resume", no_args_is_help=True)
@group_command
def resume(session: GroupSession, changefeed_id: IdArgument) -> None:
    """Go on with a changefeed that was paused or has failed, from its checkpoint."""
    session.changefeeds.resume(changefeed_id)
    _show(session, changefeed_id)


@app.command("update", no_args_is_help=True)
@group_command
def update(
    session: GroupSession,
    *,
    changefeed_id: IdArgument,
    sink: Annotated[str, typer.Option(metavar="URL", help="Another address of the same sink.")] = "",
    sink_tls: SinkTlsFlags,
    sink_concurrency: NewNumber = None,
    sink_batch_size: NewNumber = None,
    sink_backoff: NewTime = None,
    sink_patience: NewTime = None,
    sorter_memory: NewSize = None,
    hold_back: NewTime = None,
    gc_ttl: NewTime = None,
) -> None:
    """Change how a changefeed works, while it is paused or has failed."""
    changes: dict[str, object] = {
        "concurrency": sink_concurrency,
        "batch_rows": sink_batch_size,
        "backoff_ms": None if sink_backoff is None else round(sink_backoff * 1000),
        "patience_ms": None if sink_patience is None else round(sink_patience * 1000),
        "sorter_bytes": sorter_memory,
        "hold_back_ms": None if hold_back is None else round(hold_back * 1000),
        "gc_ttl": None if gc_ttl is None else round(gc_ttl),
    }
    said: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    if not (sink or said):
        raise UsageError("nothing is to be changed", hint="Say what: see `tikv-br changefeed update --help`.")
    from incremental.sinks.url import check_shared, parse

    target = parse(sink) if sink else None
    if target is not None:
        check_shared(target)
    from incremental.group.creation import moved
    from incremental.sinks.open import SinkOptions

    def edit(found: ChangefeedInfo) -> ChangefeedInfo:
        changed: ChangefeedInfo = replace(found, **said)
        if target is None:
            return changed
        return moved(changed, str(target), session.cluster, SinkOptions(tls=sink_tls.tls(session.flags)))

    session.changefeeds.update(changefeed_id, edit)
    _show(session, changefeed_id)


@app.command("remove", no_args_is_help=True)
@group_command
def remove(session: GroupSession, changefeed_id: IdArgument, wait: WaitOption = 120.0) -> None:
    """Stop a changefeed, and forget it with its checkpoint and its safe point."""
    session.changefeeds.remove(changefeed_id, wait)
    session.output.result("removed", {"id": changefeed_id}, f"changefeed {changefeed_id} is removed")


def _show(session: GroupSession, changefeed_id: str) -> None:
    from incremental.group.changefeeds import find

    state = session.store.snapshot()
    info = find(state, changefeed_id)
    row = _told(session, state, info)
    shown = [
        *zip(COLUMNS, row, strict=True),
        ("keyspace", str(info.keyspace_id)),
        ("created (UTC)", utc(info.created_ms)),
    ]
    session.output.table(("what", "value"), [each for each in [*shown, *_settings(info)] if each[1]])
    if info.state.value == "normal" and not state.captures:
        log.warning("no capture takes part: start one by `tikv-br capture start`, with this --pd and --etcd")


def _settings(info: ChangefeedInfo) -> list[tuple[str, str]]:
    """What people have said of how it works, by the names of the flags."""
    return [
        ("start", show(info.start_key, KeyForm.RAW)),
        ("end", show(info.end_key, KeyForm.RAW)),
        ("gc-ttl", human_seconds(info.gc_ttl)),
        ("hold-back", human_seconds(info.hold_back_ms / 1000)),
        ("sorter-memory", human_bytes(info.sorter_bytes)),
        ("sink-concurrency", str(info.concurrency)),
        ("sink-batch-size", str(info.batch_rows)),
        ("sink-backoff", human_seconds(info.backoff_ms / 1000)),
        ("sink-patience", human_seconds(info.patience_ms / 1000)),
        ("allow-loss", "ttl" if info.drop_ttls else ""),
    ]


def _told(session: GroupSession, state: GroupState, info: ChangefeedInfo) -> tuple[str, ...]:
    """Write a changefeed as a JSON line; returns it as a row for people."""
    checkpoint_ts = state.checkpoint_ts(info.id)
    status, tasks = state.statuses.get(info.id), state.tasks_of(info.id)
    captures = sorted({task.capture for task in tasks} - {""})
    behind = lag(checkpoint_ts)
    session.output.result(
        "changefeed",
        {
            "id": info.id,
            "state": info.state.value,
            "error": info.error,
            "checkpoint_ts": checkpoint_ts,
            "resolved_ts": checkpoint_ts if status is None else status.resolved_ts,
            "checkpoint_lag": behind,
            "start_ts": info.start_ts,
            "sink": info.sink,
            "keyspace_id": info.keyspace_id,
            "start": info.start_key.hex(),
            "end": info.end_key.hex(),
            "spans": info.spans,
            "captures": captures,
            "gc_ttl": info.gc_ttl,
            "drop_ttls": info.drop_ttls,
            "concurrency": info.concurrency,
            "sorter_bytes": info.sorter_bytes,
            "hold_back_ms": info.hold_back_ms,
            "patience_ms": info.patience_ms,
            "backoff_ms": info.backoff_ms,
            "batch_rows": info.batch_rows,
            "created_ms": info.created_ms,
        },
    )
    figures = (str(checkpoint_ts), human_seconds(max(behind, 0)), str(len(captures)), str(len(tasks) or info.spans))
    return (info.id, info.state.value, *figures, info.sink, info.error)
