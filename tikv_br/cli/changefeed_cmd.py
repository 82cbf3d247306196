"""``tikv-br changefeed``, ``capture`` and ``processor``: syncs that several captures share."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tikv_br.cli import shared
from tikv_br.cli.command import REQUIRED, argument, command, flag
from tikv_br.cli.output import KeyForm, Output, human_bytes, human_seconds, show
from tikv_br.cli.sync_options import (
    LOG_ID,
    MAX_BATCH_ROWS,
    SCRATCH_DIR,
    SORTER_MEMORY,
    FeedFlags,
    SinkFlags,
    SinkTlsFlags,
    StartFlags,
    StatusFlags,
    SyncRangeFlags,
    scratch_folder,
)
from tikv_br.cli.sync_view import signals_stop, watching
from tikv_br.cluster.timestamps import physical_ms, show_time
from tikv_br.errors import SyncDegraded, UsageError
from tikv_br.formats.keys.codec import PREFIX_SIZE

if TYPE_CHECKING:
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.incremental.group.changefeeds import Changefeeds
    from tikv_br.incremental.group.model import ChangefeedInfo, ChangefeedTask, GroupState, Progress
    from tikv_br.incremental.group.store import GroupStore

log = logging.getLogger(__name__)
COLUMNS = ("id", "state", "checkpoint", "captures", "sub-spans", "sink", "error")
CAPTURE_COLUMNS = ("id", "owner", "sub-spans", "started", "version", "status page")
PROCESSOR_COLUMNS = (
    "changefeed",
    "sub-span",
    "capture",
    "checkpoint",
    "regions",
    "events/s",
    "sorter",
    "from",
    "error",
)
SHORTEST_LEASE = 2.0
CHANGEFEED_ID = "changefeed"
"""Default name of a changefeed."""


class Group(NamedTuple):
    """The source cluster, and the state of its group in etcd."""

    cluster: Cluster
    store: GroupStore

    @property
    def changefeeds(self) -> Changefeeds:
        """Operations on changefeeds."""
        from tikv_br.incremental.group.changefeeds import Changefeeds

        return Changefeeds(self.store, self.cluster.pd)


class GroupFlags(shared.CommandFlags):
    """The source cluster, and the etcd of its group."""

    cluster: shared.ClusterFlags
    etcd: shared.EtcdFlags

    @contextlib.contextmanager
    def group(self) -> Iterator[Group]:
        """Connect. Raises `UsageError`, `ClusterError`, `EtcdError`."""
        config = self.etcd.etcd_config(self.cluster)
        from tikv_br.cluster.cluster import Cluster
        from tikv_br.cluster.etcd import Etcd
        from tikv_br.incremental.group.store import GroupStore

        with Cluster.connect(self.cluster.config()) as cluster, Etcd.open(config) as etcd:
            yield Group(cluster, GroupStore(etcd, cluster.cluster_id))


CHANGEFEED = partial(argument, REQUIRED, "ID", "Name of the changefeed.")


class ChangefeedFlags(GroupFlags):
    """One changefeed."""

    changefeed_id: str = CHANGEFEED()


class SharedSinkFlags(SinkFlags):
    """The sink of a changefeed, to which several captures write."""

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
        metavar="NAME",
        show_default=CHANGEFEED_ID,
    )
    spans: int = flag(2, "Number of sub-spans. Up to this many captures share the work.", limits=(1, 100))
    sink: SharedSinkFlags
    start: StartFlags
    feed: FeedFlags
    sorter_memory: int = SORTER_MEMORY()
    storage_flags: shared.StorageFlags


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
        gc_ttl=round(flags.feed.gc_ttl),
        drop_ttls=bool(flags.sink.allow_loss),
        concurrency=flags.sink.sink_concurrency,
        sorter_bytes=flags.sorter_memory,
        patience_ms=round(flags.sink.sink_patience * 1000),
        backoff_ms=round(flags.sink.sink_backoff * 1000),
        batch_rows=flags.sink.sink_batch_size,
        rate_limit=flags.sink.sink_ratelimit,
    )
    start = flags.start.required(flags.storage_flags)
    with flags.group() as group:
        from tikv_br.incremental.feed.feed import hold_back_for
        from tikv_br.incremental.group.changefeeds import resolved
        from tikv_br.incremental.handover import CHANGEFEED_STATE, check_runs_alone, service_id

        wanted = replace(wanted, hold_back_ms=round(1000 * hold_back_for(group.cluster, flags.feed.hold_back)))
        info = resolved(wanted, group.cluster, flags.keyspace, start, flags.sink.options(flags.cluster))
        check_runs_alone(group.cluster, info.id, CHANGEFEED_STATE, threading.Event())
        group.changefeeds.create(info, former_id="" if flags.name else LOG_ID)
        group.cluster.ingests.register_follower(service_id(info.id), CHANGEFEED_STATE)
        _show(flags.out, group.store.snapshot(), info.id)


@command("changefeed list", example="--pd 10.0.0.1:2379")
def list_changefeeds(flags: GroupFlags) -> None:
    """List the changefeeds of a cluster."""
    with flags.group() as group:
        state = group.store.snapshot()
    from tikv_br.incremental.group.changefeeds import check_sound

    rows = [_changefeed_row(flags.out, state, info) for info in state.changefeeds.values()]
    flags.out.table(COLUMNS, rows, prose=("error",), drop=("sub-spans", "captures", "sink"))
    check_sound(state, *state.damaged)


@command("changefeed query", example="east --pd 10.0.0.1:2379")
def query(flags: ChangefeedFlags) -> None:
    """Show a changefeed and the status of its sub-spans. Exit code 76 if its sink lacks rows that no change feed delivers."""
    with flags.group() as group:
        state = group.store.snapshot()
        _show(flags.out, state, flags.changefeed_id)
        _show_processors(flags.out, state, flags.changefeed_id)
    if missed := state.missed(flags.changefeed_id):
        flags.out.flush()
        raise SyncDegraded(
            f"the sink of changefeed {flags.changefeed_id} lacks rows that no change feed delivers: {'; '.join(missed)}"
        )


@command("changefeed pause", example="east --pd 10.0.0.1:2379")
def pause(flags: ChangefeedFlags) -> None:
    """Pause a changefeed. GC waits for it for at most its --gc-ttl; resume it before that."""
    with flags.group() as group:
        group.changefeeds.pause(flags.changefeed_id)
        _show(flags.out, group.store.snapshot(), flags.changefeed_id)


@command("changefeed resume", example="east --pd 10.0.0.1:2379")
def resume(flags: ChangefeedFlags) -> None:
    """Resume a paused or failed changefeed from its checkpoint."""
    with flags.group() as group:
        group.changefeeds.resume(flags.changefeed_id)
        _show(flags.out, group.store.snapshot(), flags.changefeed_id)


NEW_VALUE = "New value; see `changefeed create --help`."


class UpdateFlags(ChangefeedFlags):
    """Flags of ``changefeed update``; None = unchanged."""

    sink: str = flag("", "New address of the same target: another cluster or keyspace is refused.", metavar="URL")
    sink_tls: SinkTlsFlags
    sink_concurrency: int | None = flag(None, NEW_VALUE, limits=(1, shared.MAX_CONCURRENCY))
    sink_batch_size: int | None = flag(None, NEW_VALUE, limits=(1, MAX_BATCH_ROWS))
    sink_ratelimit: int | None = flag(None, NEW_VALUE, kind=shared.RATE)
    sink_backoff: float | None = flag(None, NEW_VALUE, kind=shared.TIME)
    sink_patience: float | None = flag(None, NEW_VALUE, kind=shared.TIME)
    sorter_memory: int | None = flag(None, NEW_VALUE, kind=shared.SIZE)
    hold_back: float | None = flag(None, NEW_VALUE, kind=shared.TIME)
    gc_ttl: float | None = flag(None, NEW_VALUE, "--gc-ttl", "--gcttl", kind=shared.TIME)

    def changes(self) -> dict[str, Any]:
        """The fields of `ChangefeedInfo` to change."""
        values = {
            "concurrency": self.sink_concurrency,
            "batch_rows": self.sink_batch_size,
            "rate_limit": self.sink_ratelimit,
            "backoff_ms": None if self.sink_backoff is None else round(self.sink_backoff * 1000),
            "patience_ms": None if self.sink_patience is None else round(self.sink_patience * 1000),
            "sorter_bytes": self.sorter_memory,
            "hold_back_ms": None if self.hold_back is None else round(self.hold_back * 1000),
            "gc_ttl": None if self.gc_ttl is None else round(self.gc_ttl),
        }
        return {name: value for name, value in values.items() if value is not None}


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
    changes = flags.changes()
    if not (flags.sink or changes):
        raise UsageError("no setting to change was given", hint="See `tikv-br changefeed update --help`.")
    from tikv_br.incremental.sinks.url import check_shared, parse

    target = parse(flags.sink) if flags.sink else None
    if target is not None:
        check_shared(target)
    with flags.group() as group:
        from tikv_br.incremental.feed.feed import hold_back_for
        from tikv_br.incremental.group.changefeeds import moved
        from tikv_br.incremental.sinks.open import SinkOptions

        if flags.hold_back is not None:
            hold_back_for(group.cluster, flags.hold_back)

        def edit(found: ChangefeedInfo) -> ChangefeedInfo:
            check_applies(changes, found.sink)
            changed: ChangefeedInfo = replace(found, **changes)
            if target is None:
                return changed
            skip = flags.cluster.skip_version_check
            options = SinkOptions(tls=flags.sink_tls.tls(flags.cluster), skip_version_check=skip)
            return moved(changed, str(target), group.cluster, options)

        group.changefeeds.update(flags.changefeed_id, edit)
        _show(flags.out, group.store.snapshot(), flags.changefeed_id)


class RemoveFlags(ChangefeedFlags):
    wait: float = flag("2m", "Maximum time to wait for captures to stop.", kind=shared.TIME)


@command("changefeed remove", example="east --pd 10.0.0.1:2379")
def remove(flags: RemoveFlags) -> None:
    """Stop and delete a changefeed, its checkpoint and its safe point."""
    with flags.group() as group:
        group.changefeeds.remove(flags.changefeed_id, flags.wait)
    flags.out.result("removed", {"id": flags.changefeed_id}, f"removed changefeed {flags.changefeed_id}")


def _lag(ts: int) -> float:
    """Seconds from a timestamp of PD to now, by this machine's clock."""
    return round(time.time() - physical_ms(ts) / 1000, 3)


def _show(out: Output, state: GroupState, changefeed_id: str) -> None:
    from tikv_br.incremental.group.changefeeds import find

    info = find(state, changefeed_id)
    row = _changefeed_row(out, state, info)
    rows = [
        *zip(COLUMNS, row, strict=True),
        ("checkpoint-ts", str(state.checkpoint_ts(info.id))),
        ("keyspace", str(info.keyspace_id)),
        ("created", show_time(info.created_ms)),
        ("start", show(info.start_key, KeyForm.RAW)),
        ("end", show(info.end_key, KeyForm.RAW)),
        ("gc-ttl", human_seconds(info.gc_ttl)),
        ("hold-back", human_seconds(info.hold_back_ms / 1000)),
        ("sorter-memory", human_bytes(info.sorter_bytes)),
        ("sink-concurrency", str(info.concurrency)),
        ("sink-batch-size", str(info.batch_rows)),
        ("sink-ratelimit", f"{human_bytes(info.rate_limit)}/s" if info.rate_limit else ""),
        ("sink-backoff", human_seconds(info.backoff_ms / 1000)),
        ("sink-patience", human_seconds(info.patience_ms / 1000)),
        ("allow-loss", "ttl" if info.drop_ttls else ""),
    ]
    out.pairs([each for each in rows if each[1]])
    if info.state.value == "normal" and not state.captures:
        log.warning("no capture is running: start one with `tikv-br capture start` and the same --pd and --etcd")


def _changefeed_row(out: Output, state: GroupState, info: ChangefeedInfo) -> tuple[str, ...]:
    """Write a changefeed as a JSON line; returns it as a row of a table."""
    checkpoint_ts = state.checkpoint_ts(info.id)
    status, tasks = state.statuses.get(info.id), state.tasks_of(info.id)
    captures = sorted({task.capture for task in tasks} - {""})
    behind = _lag(checkpoint_ts)
    out.result(
        "changefeed",
        {
            "id": info.id,
            "state": _state(state, info),
            "error": info.error,
            "missed": state.missed(info.id),
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
            "rate_limit": info.rate_limit,
            "created_ms": info.created_ms,
        },
    )
    figures = (show_time(physical_ms(checkpoint_ts)), str(len(captures)), str(len(tasks) or info.spans))
    error = info.error or "; ".join(state.missed(info.id))
    return (info.id, _state(state, info), *figures, info.sink, error)


def _state(state: GroupState, info: ChangefeedInfo) -> str:
    """The state of a changefeed; ``degraded`` = it runs, but its sink lacks rows."""
    return "degraded" if info.state.value == "normal" and state.missed(info.id) else info.state.value


class CaptureFlags(GroupFlags):
    cluster: shared.ClusterFlags
    etcd: shared.EtcdFlags
    sink_tls: SinkTlsFlags
    scratch_dir: str = SCRATCH_DIR()
    lease: float = flag(
        "10s",
        "Lease TTL of this capture. If it stops answering, others take over its work within three times this TTL.",
        kind=shared.TIME,
    )
    status: StatusFlags


@command("capture start", example="--pd 10.0.0.1:2379 --status-addr 8391")
def start_capture(flags: CaptureFlags) -> None:
    """Run a capture until stopped; others then take over its work."""
    from tikv_br.incremental.group.model import MAX_LEASE_SECONDS

    if not SHORTEST_LEASE <= flags.lease <= MAX_LEASE_SECONDS:
        raise UsageError(f"--lease {flags.lease:g}s is out of range: pass {SHORTEST_LEASE:g}s to {MAX_LEASE_SECONDS}s")
    scratch = scratch_folder(flags.scratch_dir)
    flags.status.check()
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.cluster.etcd import Etcd
    from tikv_br.cluster.versions import RAW
    from tikv_br.incremental.group.capture import Capture, CaptureOptions

    options = CaptureOptions(scratch, lease=round(flags.lease), sink_tls=flags.sink_tls.tls(flags.cluster))
    stop, etcd_config = threading.Event(), flags.etcd.etcd_config(flags.cluster)
    with Cluster.connect(flags.cluster.config()) as source, Etcd.open(etcd_config) as etcd:
        source.require(RAW)
        joined = Capture(etcd, source, options)
        with (
            signals_stop(stop, "Other captures take over its work.") as received,
            watching(flags.out, joined.statuses, flags.status) as page,
        ):
            joined.run(stop, page)
    flags.out.flush()
    if received:
        raise received[0]


@command("capture list", example="--pd 10.0.0.1:2379")
def list_captures(flags: GroupFlags) -> None:
    """List the captures of a cluster."""
    with flags.group() as group:
        state = group.store.snapshot()
    rows = []
    for info in state.captures.values():
        owner, tasks = info.id == state.owner, sum(task.capture == info.id for task in state.tasks.values())
        flags.out.result(
            "capture",
            {
                "id": info.id,
                "owner": owner,
                "spans": tasks,
                "address": info.address,
                "started_ms": info.started_ms,
                "tool_version": info.version,
            },
        )
        rows.append(
            (info.id, "yes" if owner else "", str(tasks), show_time(info.started_ms), info.version, info.address)
        )
    flags.out.table(CAPTURE_COLUMNS, rows, drop=("version", "sub-spans"))


@command("processor list", example="--pd 10.0.0.1:2379")
def list_processors(flags: GroupFlags) -> None:
    """List sub-spans and the capture that runs each."""
    with flags.group() as group:
        _show_processors(flags.out, group.store.snapshot())


def _show_processors(out: Output, state: GroupState, changefeed_id: str = "") -> None:
    """Write the sub-spans of one changefeed, or of all."""
    tasks = [state.tasks[each] for each in sorted(state.tasks) if changefeed_id in {"", each.changefeed}]
    rows = [_processor_row(out, task, state.progress.get(task.id), state) for task in tasks]
    out.table(PROCESSOR_COLUMNS, rows, prose=("error",), drop=("sorter", "events/s", "regions"))


def _processor_row(out: Output, task: ChangefeedTask, progress: Progress | None, state: GroupState) -> tuple[str, ...]:
    """Write a sub-span as a JSON line; returns it as a row of a table."""
    from tikv_br.incremental.group.model import Progress

    info = state.changefeeds.get(task.changefeed)
    began = info.start_ts if info is not None else 0
    known = progress or Progress(task.changefeed, task.number, began, began, task.epoch, task.capture, saved_ms=0)
    behind = _lag(known.checkpoint_ts)
    out.result(
        "processor",
        {
            "changefeed": task.changefeed,
            "number": task.number,
            "capture": task.capture,
            "epoch": task.epoch,
            "stopping": task.stopping,
            "start": task.start.hex(),
            "end": task.end.hex(),
            "checkpoint_ts": known.checkpoint_ts,
            "resolved_ts": known.resolved_ts,
            "checkpoint_lag": behind,
            "events": known.events,
            "written": known.written,
            "events_per_second": known.events_per_second,
            "regions": known.regions,
            "sorter_bytes": known.sorter_bytes,
            "error": known.error,
        },
    )
    figures = str(known.regions), str(known.events_per_second), human_bytes(known.sorter_bytes)
    return (
        task.changefeed,
        str(task.number),
        f"{task.capture or '-'}{' (stopping)' if task.stopping else ''}",
        show_time(physical_ms(known.checkpoint_ts)),
        *(figures if progress is not None else "---"),
        show(task.start[PREFIX_SIZE:], KeyForm.RAW) or "start",
        known.error,
    )
