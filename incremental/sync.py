"""One sync from its options to its end: hand-over, feed, sorter, sink, checkpoint and safe point put together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace

from incremental.checkpoint import Checkpoint, CheckpointStore, ObjectCheckpoints
from incremental.etcd_checkpoint import EtcdCheckpoints
from incremental.handover import GC_TTL, Start, leave, protect, resolve, service_id
from incremental.pipeline import PipelineOptions, Source, pipeline
from incremental.replicate import Replicator, SyncStatus
from incremental.sinks.open import Origin, SinkOptions, open_sink, unfenced
from incremental.sinks.url import Target
from incremental.span import Span, keyspace_codec
from tikv_br.backupset.coverage import KeyRange
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig, EtcdConfig
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.pd_status import gc_status
from tikv_br.cluster.safepoint import SafePointApi, SafePointKeeper
from tikv_br.errors import (
    ClusterError,
    LeaseLost,
    RetryBudgetExhausted,
    SafePointError,
    StorageFull,
    StorageReadOnly,
    SyncFenced,
    SyncStateMismatch,
    UsageError,
)
from tikv_br.storage.disk_errors import Hints
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

log = logging.getLogger(__name__)

_STATE_HINTS: Hints = {
    StorageFull: "Free space, then start the same command again: it goes on from the last checkpoint.",
    StorageReadOnly: "Choose a --state-dir that this user may write.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions(PipelineOptions):
    """One sync. Keys are user keys; an empty end is no end."""

    changefeed_id: str
    source: ClusterConfig
    target: Target
    state: StorageLocation | EtcdConfig
    """Where the checkpoint is kept."""
    start: Start | None = None
    """From where, if there is no checkpoint; None = there must be one."""
    keyspace: str = ""
    """Id or name; ``""`` = the default one."""
    start_key: bytes = b""
    end_key: bytes = b""
    gc_ttl: int = GC_TTL
    """Seconds that GC waits for a sync that is down."""
    fence: Callable[[], object] = unfenced
    """Called before whatever the sync writes: rows, its checkpoint, its safe point at the end. Raises `LeaseLost` when it
    may write no more."""
    sink: SinkOptions = field(default_factory=SinkOptions)


def sync(options: SyncOptions, stop: threading.Event, watch: Callable[[Replicator], None]) -> SyncStatus:
    """Replicate until `stop` is set; `watch` gets the replicator once it is about to run.

    Raises `UsageError`, `SyncStateMismatch`, `SyncFenced`, `SafePointError`, other `ClusterError`, `StorageError`, `EtcdError`,
    `BackupSetError` for a backup to start from, `ConversionUnsupported` for a row that the sink cannot hold, and what its fence
    raises.
    """
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster.connect(options.source))
        codec = keyspace_codec(cluster, options.keyspace)
        span = KeyRange(*codec.rpc_range(options.start_key, options.end_key))
        origin = Origin(cluster.cluster_id, codec.keyspace_id)
        how = replace(options.sink, fence=lambda: _go_on(options, stop))
        sink = stack.enter_context(open_sink(options.target, origin, how))
        subject = f"cluster {cluster.cluster_id} {span} to {sink.place}"
        checkpoints = _Fenced(stack.enter_context(_checkpoints(options, cluster.cluster_id)), options.fence)
        start_ts = _start_ts(options, cluster, span, checkpoints, subject)
        keeper = stack.enter_context(_protected(cluster.pd, options, start_ts))
        begun = _take_over(checkpoints, keeper, Checkpoint(options.changefeed_id, start_ts, start_ts, 0, 0, subject))
        replicator = stack.enter_context(
            pipeline(
                Source(cluster, codec, Span(span.start, span.end)),
                begun,
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


def _go_on(options: SyncOptions, stop: threading.Event) -> None:
    """Have a write end that may not be, and one that is tried again and again when the sync is to stop."""
    options.fence()
    if stop.is_set():
        raise RetryBudgetExhausted("the sync is to stop")


@dataclass(frozen=True, slots=True)
class _Fenced(CheckpointStore):
    """Asks before it writes, and says of trouble with the storage what it means for a sync."""

    store: CheckpointStore
    fence: Callable[[], object]

    def claim(self) -> int:
        """See `CheckpointStore.claim`."""
        self.fence()
        with _state_trouble():
            return self.store.claim()

    def load(self) -> Checkpoint | None:
        """See `CheckpointStore.load`."""
        return self.store.load()

    def save(self, checkpoint: Checkpoint) -> None:
        """See `CheckpointStore.save`."""
        self.fence()
        with _state_trouble():
            self.store.save(checkpoint)


@contextmanager
def _state_trouble() -> Iterator[None]:
    try:
        yield
    except (StorageFull, StorageReadOnly) as error:
        raise type(error)(error.message, hint=_STATE_HINTS[type(error)]) from None


@contextmanager
def _checkpoints(options: SyncOptions, cluster_id: int) -> Iterator[CheckpointStore]:
    match options.state:
        case EtcdConfig():
            with Etcd.open(options.state) as etcd:
                yield EtcdCheckpoints(etcd, cluster_id, options.changefeed_id)
        case StorageLocation():
            yield ObjectCheckpoints(open_store(options.state), options.changefeed_id)


def _start_ts(
    options: SyncOptions, cluster: Cluster, span: KeyRange, checkpoints: CheckpointStore, subject: str
) -> int:
    """The checkpoint of an earlier run of the same sync, or else the start that was asked for."""
    found = checkpoints.load()
    if found is not None:
        _check_subject(found, subject)
        log.info("goes on from checkpoint %d of %s", found.checkpoint_ts, options.changefeed_id)
        return found.checkpoint_ts
    if options.start is None:
        place = options.state if isinstance(options.state, EtcdConfig) else options.state.redacted()
        raise UsageError(
            f"sync {options.changefeed_id} has no checkpoint at {place} to go on from",
            hint="Say --from-backup, --from-backup-ts or --start-ts now.",
        )
    start_ts = resolve(options.start, cluster, span)
    _warn_of_namesake(cluster, options.changefeed_id)
    log.info("%s begins at %d", options.changefeed_id, start_ts)
    return start_ts


def _warn_of_namesake(cluster: Cluster, changefeed_id: str) -> None:
    """Say so where the safe point of a sync that begins is there already: with two of a name GC passes the slower one."""
    name = service_id(changefeed_id)
    with suppress(ClusterError):  # it is no more than a warning
        if any(each.service == name and each.expires > time.time() for each in gc_status(cluster.pd_http).services):
            log.warning(
                "PD holds a safe point %s already, of another sync of this name or of an earlier one: while both run, GC "
                "may pass the slower one. Each sync of a cluster needs an --id of its own",
                name,
            )


def _check_subject(found: Checkpoint, subject: str) -> None:
    if found.subject != subject:
        raise SyncStateMismatch(f"sync {found.changefeed_id} was of {found.subject}; this would be of {subject}")


def _take_over(checkpoints: CheckpointStore, keeper: SafePointKeeper, start: Checkpoint) -> Checkpoint:
    """Become the owner; what the owner before has saved by then counts, and a first checkpoint is saved."""
    epoch = checkpoints.claim()
    found = checkpoints.load()
    if found is not None:
        _check_subject(found, start.subject)
    begun = Checkpoint(
        changefeed_id=start.changefeed_id,
        checkpoint_ts=start.checkpoint_ts if found is None else found.checkpoint_ts,
        resolved_ts=start.resolved_ts if found is None else found.resolved_ts,
        epoch=epoch,
        saved_ms=time.time_ns() // 1_000_000,
        subject=start.subject,
    )
    checkpoints.save(begun)
    keeper.advance(begun.checkpoint_ts - 1)
    return begun


@contextmanager
def _protected(pd: SafePointApi, options: SyncOptions, ts: int) -> Iterator[SafePointKeeper]:
    """GC held back while the sync runs, and for its TTL after; whoever took over has the safe point now."""
    options.fence()
    keeper = protect(pd, options.changefeed_id, ts, options.gc_ttl)
    try:
        yield keeper
        options.fence()
    except (SyncFenced, LeaseLost):
        keeper.stop()
        raise
    except BaseException:
        with suppress(SafePointError):  # if it is lost, that is what is being raised, or comes second to it
            _leave(keeper, options.gc_ttl)
        raise
    _leave(keeper, options.gc_ttl)


def _leave(keeper: SafePointKeeper, gc_ttl: int) -> None:
    """Leave the safe point for the next start. Raises `SafePointError` when it is lost; PD may be away, it stands longer."""
    try:
        leave(keeper, gc_ttl)
    except SafePointError:
        raise
    except ClusterError as error:
        log.warning("the safe point could not be renewed at the end: %s", error.message)
