"""``tikv-br changefeed``: syncs that several captures share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import structs

from tikv_br.backupset.coverage import shown_keyspaces
from tikv_br.cli import backup_flags, kinds, shared
from tikv_br.cli.capture_cmd import Group, GroupFlags, lag_of, show_processors
from tikv_br.cli.command import Flags, argument, command, flag
from tikv_br.cli.output import KeyForm, Output, human_bytes, human_seconds, picked, show
from tikv_br.cli.sync_flags import (
    LOG_ID,
    MAX_BATCH_ROWS,
    SORTER_MEMORY,
    FeedFlags,
    SinkFlags,
    SinkTlsFlags,
    StartFlags,
    SyncRangeFlags,
)
from tikv_br.cluster.timestamps import physical_ms, show_time
from tikv_br.errors import LOG_DEGRADED, SyncDegraded, UsageError

if TYPE_CHECKING:
    from tikv_br.incremental.group.model import ChangefeedInfo, GroupState

log = logging.getLogger(__name__)
COLUMNS = ("id", "state", "checkpoint", "captures", "sub-spans", "sink", "error")
CHANGEFEED_ID = "changefeed"
"""Default name of a changefeed."""


class ChangefeedFlags(GroupFlags):
    chosen: str = argument("", "ID", "Name of the changefeed.")
    name: str = flag("", "Name of the changefeed, instead of the argument.", "--id", "--changefeed-id", metavar="NAME")

    @property
    def changefeed_id(self) -> str:
        """The name of the changefeed. Raises `UsageError`."""
        if not (self.chosen or self.name) or (self.chosen and self.name and self.chosen != self.name):
            raise UsageError(
                "ID and --id contradict each other" if self.name else "ID is missing",
                hint="Pass the name of one changefeed; `tikv-br changefeed list` prints them.",
            )
        return self.chosen or self.name

    @contextmanager
    def group(self) -> Iterator[Group]:
        """Connect as `GroupFlags.group`, but check the name first: without one, `UsageError` is raised before anything is asked."""
        _ = self.changefeed_id
        with super().group() as group:
            yield group


class SharedSinkFlags(SinkFlags):
    sink: str = flag(
        "",
        "Sink (required): tikv://PD[,PD][?keyspace=ID&api-version=v2], s3://BUCKET/PREFIX, gcs:// or azure:// (a log archive), "
        "kafka://HOST:PORT[,HOST:PORT]/TOPIC[?protocol=open-protocol|json&…] or blackhole:// (discard).",
        metavar="URL",
    )


class CreateFlags(GroupFlags):
    keyspace: str = shared.KEYSPACE()
    range: SyncRangeFlags
    name: str = flag(
        "",
        "Name of the changefeed. Its safe point is tikv-br-sync-NAME.",
        "--id",
        "--changefeed-id",
        metavar="NAME",
        show_default=CHANGEFEED_ID,
    )
    # A transaction of etcd has at most 128 operations.
    spans: int = flag(2, "Number of sub-spans. Up to this many captures share the work.", limits=(1, 100))
    sink: SharedSinkFlags
    start: StartFlags
    feed: FeedFlags
    sorter_memory: int = SORTER_MEMORY()
    storage_flags: backup_flags.StorageFlags


@command("changefeed create", example="--pd 10.0.0.1:2379 --id east --sink tikv://10.0.1.1:2379 --start-ts now")
def create(flags: CreateFlags) -> None:
    """Create a changefeed; captures start it at once."""
    flags.etcd.etcd_config(flags.cluster)  # here and below: refuse wrong flags before heavy imports
    span = flags.range.key_range()
    target = flags.sink.target()
    from tikv_br.archive.records import check_id
    from tikv_br.incremental.group.model import ChangefeedInfo
    from tikv_br.incremental.sinks.url import check_shared

    check_shared(target)
    wanted = ChangefeedInfo(
        id=check_id(flags.name or CHANGEFEED_ID),
        sink=str(target),
        keyspace_id=0,
        start_key=span.start,
        end_key=span.end,
        start_ts=0,
        created_ms=time.time_ns() // 1_000_000,
        spans=flags.spans,
        drop_ttls=bool(flags.sink.allow_loss),
        **settings(flags),
    )
    start = flags.start.required(flags.storage_flags, flags.cluster.config())
    with flags.group() as group:
        from tikv_br.cluster.ingests import Follower
        from tikv_br.incremental.feed.events import hold_back_for
        from tikv_br.incremental.group.changefeeds import resolved
        from tikv_br.incremental.handover import CHANGEFEED_STATE, check_runs_alone, service_id

        wanted = structs.replace(wanted, hold_back_ms=round(1000 * hold_back_for(group.cluster, flags.feed.hold_back)))
        info = resolved(wanted, group.cluster, flags.keyspace, start, flags.sink.options(flags.cluster))
        check_runs_alone(group.cluster, info.id, CHANGEFEED_STATE, threading.Event())
        group.changefeeds.create(info, former_id="" if flags.name else LOG_ID)
        group.cluster.ingests.register_follower(service_id(info.id), Follower(CHANGEFEED_STATE))
        _show(flags.out, group.store.snapshot(), info.id, group.cluster.clock.shown())


@command("changefeed list", example="--pd 10.0.0.1:2379")
def list_changefeeds(flags: GroupFlags) -> None:
    """List the changefeeds of a cluster."""
    with flags.group() as group:
        state, now = group.store.snapshot(), group.cluster.clock.shown()
    from tikv_br.incremental.group.changefeeds import check_sound

    rows = [_changefeed_row(flags.out, state, info, now) for info in state.changefeeds.values()]
    flags.out.table(COLUMNS, rows, prose=("error",), drop=("sub-spans", "captures", "sink"))
    check_sound(state, *state.damaged)


@command("changefeed query", example="east --pd 10.0.0.1:2379")
def query(flags: ChangefeedFlags) -> None:
    """Show a changefeed and the status of its sub-spans. Exit code 76 if its sink lacks rows that no change feed delivers."""
    with flags.group() as group:
        state, now = group.store.snapshot(), group.cluster.clock.shown()
        _show(flags.out, state, flags.changefeed_id, now)
        show_processors(flags.out, state, now, flags.changefeed_id)
    if missed := state.missed(flags.changefeed_id):
        from tikv_br.incremental.sinks.url import LogTarget, parse

        flags.out.flush()
        raise SyncDegraded(
            f"the sink of changefeed {flags.changefeed_id} lacks rows that no change feed delivers: {'; '.join(missed)}",
            hint=LOG_DEGRADED if isinstance(parse(state.changefeeds[flags.changefeed_id].sink), LogTarget) else None,
        )


@command("changefeed pause", example="east --pd 10.0.0.1:2379")
def pause(flags: ChangefeedFlags) -> None:
    """Pause a changefeed. GC waits for it for at most its --gc-ttl; resume it before that."""
    with flags.group() as group:
        group.changefeeds.pause(flags.changefeed_id)
        _show(flags.out, group.store.snapshot(), flags.changefeed_id, group.cluster.clock.shown())


@command("changefeed resume", example="east --pd 10.0.0.1:2379")
def resume(flags: ChangefeedFlags) -> None:
    """Resume a paused or failed changefeed from its checkpoint."""
    with flags.group() as group:
        group.changefeeds.resume(flags.changefeed_id)
        _show(flags.out, group.store.snapshot(), flags.changefeed_id, group.cluster.clock.shown())


SETTINGS: tuple[tuple[str, str, int, Callable[[Any], str]], ...] = (
    ("gc_ttl", "gc_ttl", 1, human_seconds),
    ("hold_back", "hold_back_ms", 1000, human_seconds),
    ("sorter_memory", "sorter_bytes", 1, human_bytes),
    ("sink_concurrency", "concurrency", 1, str),
    ("sink_batch_size", "batch_rows", 1, str),
    ("sink_ratelimit", "rate_limit", 1, lambda rate: f"{human_bytes(rate)}/s" if rate else ""),
    ("sink_backoff", "backoff_ms", 1000, human_seconds),
    ("sink_patience", "patience_ms", 1000, human_seconds),
)
"""Flag, field of `ChangefeedInfo`, number of its units in one of the flag's, and text of the flag's value."""
NEW_VALUE = "New value; see `changefeed create --help`."


class UpdateFlags(ChangefeedFlags):
    """Flags of ``changefeed update``; None = unchanged."""

    sink: str = flag("", "New address of the same target: another cluster or keyspace is refused.", metavar="URL")
    sink_tls: SinkTlsFlags
    sink_concurrency: int | None = flag(None, NEW_VALUE, limits=(1, kinds.MAX_CONCURRENCY))
    sink_batch_size: int | None = flag(None, NEW_VALUE, limits=(1, MAX_BATCH_ROWS))
    sink_ratelimit: int | None = flag(None, NEW_VALUE, kind=kinds.RATE)
    sink_backoff: float | None = flag(None, NEW_VALUE, kind=kinds.TIME)
    sink_patience: float | None = flag(None, NEW_VALUE, kind=kinds.TIME)
    sorter_memory: int | None = flag(None, NEW_VALUE, kind=kinds.SIZE)
    hold_back: float | None = flag(None, NEW_VALUE, kind=kinds.TIME)
    gc_ttl: float | None = flag(None, NEW_VALUE, "--gc-ttl", "--gcttl", kind=kinds.TIME)


def settings(flags: Flags) -> dict[str, Any]:
    """The fields of `ChangefeedInfo` that flags set; none for a flag that was not given."""
    given = flags.values(UpdateFlags)
    return {name: round(given[each] * units) for each, name, units, _ in SETTINGS if given[each] is not None}


def check_applies(changes: Collection[str], sink: str) -> None:
    """Refuse new values of fields that have no effect on a sink of this address. Raises `UsageError`."""
    if sink.startswith("kafka:") and not {"concurrency", "batch_rows"}.isdisjoint(changes):
        raise UsageError(
            "--sink-concurrency and --sink-batch-size are for a tikv:// sink; this changefeed writes to Kafka",
            hint="Pass --sink with max-batch-size=N in the kafka:// address.",
        )


@command("changefeed update", example="east --pd 10.0.0.1:2379 --sink-concurrency 8")
def update(flags: UpdateFlags) -> None:
    """Change the settings of a paused or failed changefeed."""
    changes = settings(flags)
    if not (flags.sink or changes):
        raise UsageError("no setting to change was given", hint="See `tikv-br changefeed update --help`.")
    from tikv_br.incremental.sinks.url import check_shared, parse

    target = parse(flags.sink) if flags.sink else None
    if target is not None:
        check_shared(target)
    with flags.group() as group:
        from tikv_br.incremental.feed.events import hold_back_for
        from tikv_br.incremental.group.changefeeds import moved
        from tikv_br.incremental.sinks.open import SinkOptions

        if flags.hold_back is not None:
            hold_back_for(group.cluster, flags.hold_back)

        def edit(found: ChangefeedInfo) -> ChangefeedInfo:
            check_applies(changes, found.sink)
            changed: ChangefeedInfo = structs.replace(found, **changes)
            if target is None:
                return changed
            skip = flags.cluster.skip_version_check
            options = SinkOptions(tls=flags.sink_tls.tls(flags.cluster), skip_version_check=skip)
            return moved(changed, str(target), group.cluster, options)

        group.changefeeds.update(flags.changefeed_id, edit)
        _show(flags.out, group.store.snapshot(), flags.changefeed_id, group.cluster.clock.shown())


class RemoveFlags(ChangefeedFlags):
    wait: float = flag("2m", "Maximum time to wait for captures to stop.", kind=kinds.TIME)


@command("changefeed remove", example="east --pd 10.0.0.1:2379")
def remove(flags: RemoveFlags) -> None:
    """Stop and delete a changefeed, its checkpoint and its safe point."""
    with flags.group() as group:
        group.changefeeds.remove(flags.changefeed_id, flags.wait)
    flags.out.result("removed", {"id": flags.changefeed_id}, f"removed changefeed {flags.changefeed_id}")


def _show(out: Output, state: GroupState, changefeed_id: str, now: float) -> None:
    from tikv_br.incremental.group.changefeeds import find

    info = find(state, changefeed_id)
    row = _changefeed_row(out, state, info, now)
    rows = [
        *zip(COLUMNS, row, strict=True),
        ("checkpoint-ts", str(state.checkpoint_ts(info.id))),
        ("keyspace", shown_keyspaces([info.keyspace_id], [info.keyspace_name])),
        ("created", show_time(info.created_ms)),
        ("start", show(info.start_key, KeyForm.RAW)),
        ("end", show(info.end_key, KeyForm.RAW)),
        *(
            (given.replace("_", "-"), text(getattr(info, name) / units if units > 1 else getattr(info, name)))
            for given, name, units, text in SETTINGS
        ),
        ("allow-loss", "ttl" if info.drop_ttls else ""),
    ]
    out.pairs([each for each in rows if each[1]])
    if info.state.value == "normal" and not state.captures:
        log.warning("no capture is running: start one with `tikv-br changefeed capture` and the same --pd and --etcd")


def _changefeed_row(out: Output, state: GroupState, info: ChangefeedInfo, now: float) -> tuple[str, ...]:
    """Write a changefeed as a JSON line; returns it as a row of a table."""
    checkpoint_ts = state.checkpoint_ts(info.id)
    status, tasks = state.statuses.get(info.id), state.tasks_of(info.id)
    captures = sorted({task.capture for task in tasks} - {""})
    out.result(
        "changefeed",
        {
            **picked(
                info, "id", "error", "start_ts", "sink", "keyspace_id", "keyspace_name", "spans", "gc_ttl", "drop_ttls"
            ),
            **picked(info, "concurrency", "sorter_bytes", "hold_back_ms", "patience_ms", "backoff_ms", "batch_rows"),
            **picked(info, "rate_limit", "created_ms"),
            "state": _state(state, info),
            "missed": state.missed(info.id),
            "checkpoint_ts": checkpoint_ts,
            "resolved_ts": checkpoint_ts if status is None else status.resolved_ts,
            "checkpoint_lag": lag_of(checkpoint_ts, now),
            "start": info.start_key.hex(),
            "end": info.end_key.hex(),
            "captures": captures,
        },
    )
    figures = (show_time(physical_ms(checkpoint_ts)), str(len(captures)), str(len(tasks) or info.spans))
    error = info.error or "; ".join(state.missed(info.id))
    return (info.id, _state(state, info), *figures, info.sink, error)


def _state(state: GroupState, info: ChangefeedInfo) -> str:
    """The state of a changefeed; ``degraded`` = it runs, but its sink lacks rows."""
    return "degraded" if info.state.value == "normal" and state.missed(info.id) else info.state.value
