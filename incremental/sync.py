"""One sync: opens source and sink, claims the checkpoint, protects the start, and replicates."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import structs

from tikv_br.archive.maintenance import check_active, state_of
from tikv_br.archive.records import LogState
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.lease import LeaseOwner
from tikv_br.backupset.rows import sample_keys
from tikv_br.cancellation import clean_up
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig, EtcdConfig
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.ingests import Follower
from tikv_br.cluster.keyspaces import keyspace_names
from tikv_br.cluster.safepoint import SafePointKeeper
from tikv_br.errors import (
    ClusterError,
    ClusterUnfit,
    EtcdError,
    LeaseLost,
    RetryBudgetExhausted,
    SafePointError,
    StorageUnreachable,
    SyncFenced,
    SyncStateDamaged,
    SyncStateMismatch,
    UsageError,
)
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.incremental.checkpoint import Checkpoint, CheckpointStore, EtcdCheckpoints, ObjectCheckpoints
from tikv_br.incremental.feed.events import hold_back_for
from tikv_br.incremental.handover import (
    GC_TTL,
    FromBackup,
    Start,
    at_once,
    check_has_feed,
    check_runs_alone,
    expiry,
    leave,
    protect,
    resolve,
    service_id,
    source_codec,
    state_name,
    unsaid,
    warn_of_scan_window,
)
from tikv_br.incremental.pipeline import PipelineOptions, Replicator, pipeline
from tikv_br.incremental.sinks.base import unfenced
from tikv_br.incremental.sinks.open import Origin, SinkOptions, wait_for_sink
from tikv_br.incremental.sinks.tikv import TikvSink
from tikv_br.incremental.sinks.url import LogTarget, Target
from tikv_br.incremental.status import SyncStatus
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions(PipelineOptions):
    """One sync. The span is in user keys."""

    changefeed_id: str
    former_id: str = ""
    """The sync is continued under this id if only that one has a checkpoint of the same source, range and sink."""
    source: ClusterConfig
    target: Target
    state: StorageLocation | EtcdConfig
    """Location of the checkpoint."""
    start: Start | None = None
    """Start without a checkpoint; None = a checkpoint is required."""
    keyspace: str | int = ""
    """Id or name; ``""`` = the default keyspace. A number is not looked up in PD."""
    more_keyspaces: tuple[str, ...] = ()
    """Further ones, of a log."""
    span: KeyRange = EVERY_KEY
    gc_ttl: int = GC_TTL
    """Seconds for which the safe point protects from GC while the sync is down."""
    take_over: bool = False
    """End a running sync with the same id and state, and continue from its checkpoint."""
    allow_incomplete: bool = False
    """Start after a backup although the sink lacks its rows."""
    fence: Callable[[], object] = unfenced
    """Called before every write of the sync: rows, checkpoint, safe point at the end. Raises `LeaseLost` if it must not write
    any more."""
    sink: SinkOptions = field(default_factory=SinkOptions)


def sync(
    options: SyncOptions,
    stop: threading.Event,
    watch: Callable[[Replicator], None],
    wait: Callable[[str], object] = unsaid,
) -> SyncStatus | None:
    """Replicate until `stop` is set. Calls `watch` with the replicator before it runs. Returns None if stopped before that.

    Waits for a sink that does not answer, for the patience of `options.replicate`, and to see whether another sync runs; `wait` is
    called with what it waits for.

    Raises `UsageError`, `SyncStateMismatch`, `SyncFenced`, `SafePointError`, other `ClusterError`, `StorageError`, `EtcdError`,
    `BackupSetError` for the backup to start from, `ConversionUnsupported` for a row that the sink cannot store, and the errors
    of the fence.
    """
    if isinstance(options.target, LogTarget):
        log_store, log_id = open_store(options.target.location), options.target.id_for(options.changefeed_id)
        check_active(log_store, log_id)
        options = replace(options, fence=partial(_stop_if_paused, options.fence, log_store, log_id, stop))
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster.connect(options.source))
        chosen = {source_codec(cluster, each) for each in (options.keyspace, *options.more_keyspaces)}
        codecs = sorted(chosen, key=lambda each: each.keyspace_id)
        codec, spans = codecs[0], [each.rpc_range(options.span) for each in codecs]
        known = keyspace_names(cluster, [each.keyspace_id for each in codecs])
        names = tuple(known.get(each.keyspace_id, "") for each in codecs)
        origin = Origin(
            cluster.cluster_id,
            codec.keyspace_id,
            options.changefeed_id,
            whole=spans[0],
            span=spans[0],
            state=options.state if isinstance(options.state, StorageLocation) else None,
            keyspace_name=names[0],
            ranges=tuple(spans) if len(spans) > 1 else (),
            keyspace_names=names if len(spans) > 1 else (),
        )
        # Before a sink makes its file:
        check_has_feed(cluster, writes_log=isinstance(options.target, LogTarget))
        if not hold_back_for(cluster, options.feed.hold_back):
            log.warning("sync %s: --hold-back is 0: changes are lost when leaders move", options.changefeed_id)
        is_new = _load(options, cluster.cluster_id) is None
        if is_new and options.start is not None:
            options = replace(options, start=at_once(options.start, cluster))
        sink_options = replace(options.sink, fence=lambda: _check_write_allowed(options, stop), wait=wait)
        origin = replace(origin, resumes=not is_new)
        sink = wait_for_sink(stack, options.target, origin, sink_options, options.replicate, stop)
        if sink is None:
            return None
        subject = f"cluster {cluster.cluster_id} {', '.join(map(str, spans))} to {sink.place}"
        keyspace = ", ".join(names)
        options = _continued(options, cluster.cluster_id, subject)
        checkpoints = stack.enter_context(_checkpoints(options, cluster.cluster_id))
        state = state_name(options.state)
        if not check_runs_alone(cluster, options.changefeed_id, state, stop, wait, take_over=options.take_over):
            return None
        start_ts = _start_ts(options, cluster, spans, checkpoints, (subject, keyspace))
        if isinstance(sink, TikvSink) and checkpoints.load() is None:
            _check_restored(options, cluster, codec, sink)
        running = origin.follower(state, sink, LeaseOwner.this_process())
        keeper = stack.enter_context(_protected(cluster, options, start_ts, running))
        cluster.ingests.register_follower(keeper.service_id, running)
        start = Checkpoint(options.changefeed_id, start_ts, start_ts, 0, 0, subject, keyspace)
        start = _take_over(checkpoints, keeper, start)
        replicator = stack.enter_context(
            pipeline(
                cluster,
                codec,
                spans,
                start,
                options,
                sink=sink,
                checkpoints=checkpoints,
                safe_point=keeper,
                stop=stop,
            )
        )
        watch(replicator)
        replicator.run()
        return replicator.status()


def _continued(options: SyncOptions, cluster_id: int, subject: str) -> SyncOptions:
    """The options with the former id if this sync was started under it."""
    former = replace(options, changefeed_id=options.former_id)
    if former.changefeed_id in {"", options.changefeed_id} or _load(options, cluster_id) is not None:
        return options
    found = _load(former, cluster_id)
    if found is None or found.subject != subject:
        return options
    log.info("sync %s: continues the sync %s, as its former default --id was", options.changefeed_id, former.former_id)
    return former


def _load(options: SyncOptions, cluster_id: int) -> Checkpoint | None:
    with _checkpoints(options, cluster_id) as store:
        return store.load()


def _stop_if_paused(fence: Callable[[], object], store: ObjectStore, log_id: str, stop: threading.Event) -> None:
    fence()
    with suppress(StorageUnreachable):  # the next save looks again
        if state_of(store, log_id) is not LogState.ACTIVE:
            stop.set()


def _check_write_allowed(options: SyncOptions, stop: threading.Event) -> None:
    options.fence()
    if stop.is_set():  # else a write to a failing sink would be retried until its budget is spent
        raise RetryBudgetExhausted("the sync is stopping")


@contextmanager
def _checkpoints(options: SyncOptions, cluster_id: int) -> Iterator[CheckpointStore]:
    match options.state:
        case EtcdConfig():
            with Etcd.open(options.state) as etcd:
                yield EtcdCheckpoints(etcd, cluster_id, options.changefeed_id, options.fence)
        case StorageLocation():
            yield ObjectCheckpoints(open_store(options.state), options.changefeed_id, options.fence)


def _start_ts(
    options: SyncOptions, cluster: Cluster, spans: list[KeyRange], checkpoints: CheckpointStore, of: tuple[str, str]
) -> int:
    """The checkpoint of an earlier run of the same sync; without one, the start in the options."""
    found = checkpoints.load()
    if found is not None:
        _check_subject(found, *of)
        _check_checkpoint(found, cluster.pd.tso())
        passed = "" if options.start is None else "; the start in the flags is for a sync without one"
        log.info("sync %s: resuming from checkpoint %d%s", options.changefeed_id, found.checkpoint_ts, passed)
        return found.checkpoint_ts
    if options.start is None:
        place = options.state if isinstance(options.state, EtcdConfig) else options.state.redacted()
        raise UsageError(
            f"cannot resume sync {options.changefeed_id}: it has no checkpoint at {place}",
            hint="Pass --from-backup, --from-backup-ts or --start-ts now.",
        )
    start_ts = resolve(options.start, cluster, *spans, writes_log=isinstance(options.target, LogTarget))
    _warn_if_id_in_use(cluster, options.changefeed_id)
    log.info("sync %s: starting at %d", options.changefeed_id, start_ts)
    if isinstance(options.target, LogTarget):
        warn_of_scan_window(options.target.id_for(options.changefeed_id), start_ts, cluster.pd.tso())
    return start_ts


def _check_restored(options: SyncOptions, cluster: Cluster, codec: KeyCodec, sink: TikvSink) -> None:
    """Refuse to start after a backup whose rows the sink does not have: a sync copies only later changes.

    A sample of its keys is asked for. Of these, half may have been changed since. Raises `ClusterUnfit`.
    """
    if not isinstance(options.start, FromBackup) or options.allow_incomplete:
        return
    backup = BackupSet.open(open_store(options.start.storage))
    keys = sample_keys(backup, codec.keyspace_id, options.span, cluster.clock.now())
    found = sink.count(keys)
    if found < len(keys) / 2:
        what = "is empty" if sink.is_empty(options.span) else "has other rows"
        raise ClusterUnfit(
            f"{sink.place} {what}: it lacks the rows of the backup at {options.start.storage.redacted()}, after which this sync "
            "would copy only later changes",
            hint="Restore the backup into it first. If it is meant to lack them, pass --allow-incomplete.",
        )
    log.info(
        "sync %s: the sink has %d of %d keys that were sampled of the backup; `tikv-br diff` compares all rows",
        options.changefeed_id,
        found,
        len(keys),
    )


def _warn_if_id_in_use(cluster: Cluster, changefeed_id: str) -> None:
    """Warn if PD already has a safe point with this name: two syncs that share one do not protect the slower of them."""
    name = service_id(changefeed_id)
    with suppress(ClusterError):  # only a warning
        if expiry(cluster, name):
            log.warning(
                "PD already has a safe point %s, of an earlier sync with this --id or of one that is still running. If two "
                "syncs share it, GC may pass the slower one. Pass a different --id for each sync of a cluster",
                name,
            )


def _check_subject(found: Checkpoint, subject: str, keyspace: str) -> None:
    """Refuse a checkpoint of other rows: also if another keyspace has the id by now, as after a restore of PD."""
    if found.keyspace and keyspace != found.keyspace:
        raise SyncStateMismatch(
            f"cannot resume sync {found.changefeed_id}: its checkpoint is of keyspace {found.keyspace}, and PD calls this one "
            f"{keyspace or 'by no name'}",
            hint="Pass --keyspace with the name of the earlier run, or another --id.",
        )
    if found.subject != subject:
        raise SyncStateMismatch(
            f"cannot resume sync {found.changefeed_id}: its checkpoint is of {found.subject}, but this sync is of {subject}",
            hint="Pass the options of the earlier run, or another --id.",
        )


def _check_checkpoint(found: Checkpoint, latest: int) -> None:
    """Raise `SyncStateDamaged` for a checkpoint that PD, which is at ``latest``, cannot have reached."""
    if not 0 < found.checkpoint_ts <= latest:
        raise SyncStateDamaged(
            f"the checkpoint {found.checkpoint_ts} of sync {found.changefeed_id} is not of this cluster: PD is at {latest}",
            hint="Check --pd. If the state was altered, start again with another --id from a backup; `tikv-br diff` shows what the sink lacks.",
        )


def _take_over(checkpoints: CheckpointStore, keeper: SafePointKeeper, start: Checkpoint) -> Checkpoint:
    """Become the owner, and save a first checkpoint: the previous owner's if there is one, else `start`."""
    epoch = checkpoints.claim()
    found = checkpoints.load()
    if found is not None:
        _check_subject(found, start.subject, start.keyspace)
    first = structs.replace(found or start, keyspace=start.keyspace, epoch=epoch, saved_ms=time.time_ns() // 1_000_000)
    checkpoints.save(first)
    keeper.advance(first.checkpoint_ts - 1)
    return first


@contextmanager
def _protected(cluster: Cluster, options: SyncOptions, ts: int, running: Follower) -> Iterator[SafePointKeeper]:
    """Protect from GC while the sync runs, and for its TTL after that unless another process has taken over."""
    options.fence()
    keeper = protect(cluster.pd, options.changefeed_id, ts, options.gc_ttl)
    try:
        yield keeper
        options.fence()
    except (SyncFenced, LeaseLost):
        keeper.stop()
        with suppress(ClusterError, EtcdError):  # then the next start waits to see that this process has ended
            cluster.ingests.follower_ended(keeper.service_id, running)
        raise
    except BaseException:
        with suppress(SafePointError):  # the error that led here is the one to raise
            _leave(cluster, keeper, options.gc_ttl, running)
        raise
    _leave(cluster, keeper, options.gc_ttl, running)


def _leave(cluster: Cluster, keeper: SafePointKeeper, gc_ttl: int, ended: Follower) -> None:
    """Keep the safe point for the next start. Raises `SafePointError` if it is lost; if PD is down, its last TTL applies."""
    try:
        with clean_up(time.monotonic()):
            leave(keeper, gc_ttl)
            with suppress(EtcdError):  # then a sync with other state waits before it starts
                cluster.ingests.register_follower(keeper.service_id, structs.replace(ended, has_ended=True))
    except SafePointError:
        raise
    except ClusterError as error:
        log.warning("cannot renew the safe point at the end of the sync: %s", error.message)
