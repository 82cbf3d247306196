"""Opens the sinks of the targets that `sinks.url` parses; has those without a module of their own.

A log archive (`tikv_br.archive`): every version of every key, in Parquet files.

A change log as JSON lines, in a file or a stream. A line is ``{"op": "put", "key": HEX, "value": HEX, "expire_ts": S,
"ts": TSO}`` or ``{"op": "delete", "key": HEX, "ts": TSO}``; ``expire_ts`` is omitted if it is 0. After a restart some lines
are duplicates.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from msgspec import structs

from tikv_br import __version__
from tikv_br.archive.records import InexactPeriod, MissedIngest
from tikv_br.archive.writer import LogWriter
from tikv_br.backupset.lease import LeaseOwner
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import REQUEST_TIMEOUT, ClusterConfig, TlsFiles
from tikv_br.cluster.ingests import Follower
from tikv_br.cluster.keyspaces import chosen_keyspace, matching_keyspace
from tikv_br.cluster.router import BATCH_ITEMS
from tikv_br.cluster.txnkv import refuse_transactions
from tikv_br.cluster.versions import WRITE_DEADLINE, WRITES
from tikv_br.errors import (
    ClusterTlsError,
    ClusterUnreachable,
    KafkaError,
    KafkaUnreachable,
    OutputClosed,
    RetryBudgetExhausted,
    StorageFull,
    StorageReadOnly,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import UnsupportedFormat
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.incremental.handover import check_no_return, check_none_returned, unsaid
from tikv_br.incremental.kafka.topic import TopicAdmin
from tikv_br.incremental.kafka.url import KafkaUrl
from tikv_br.incremental.sinks.base import Sink, unfenced
from tikv_br.incremental.sinks.kafka import KafkaSink
from tikv_br.incremental.sinks.tikv import CONCURRENCY, TikvSink
from tikv_br.incremental.sinks.url import BlackholeTarget, FileTarget, LogTarget, StdoutTarget, Target, TikvTarget
from tikv_br.incremental.sinks.writer import ReplicateOptions
from tikv_br.progress_events import Event, Notice
from tikv_br.retry import Backoff, Patience
from tikv_br.storage.local import Hints, storage_errors, sync_directory
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.incremental.feed.events import Missed, Scanned

_TAIL = 1 << 16
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}
_HINTS: Hints = {
    StorageFull: "Free space, then run the same command again: no change is lost.",
    StorageReadOnly: "Pass a file that this user can write to.",
}


class StreamSink(Sink):
    """Writes to an open stream, such as standard output; `close` does not close the stream."""

    place = "standard output"

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`; not durable unless the reader makes it so.

        Raises `OutputClosed` if the reader has closed the stream, `StorageError` if the stream is a file that cannot be written.
        """
        with storage_errors(self.place, "written", _HINTS):
            try:
                self._stream.write(lines(batch))
                self._stream.flush()
            except BrokenPipeError:
                raise OutputClosed("the reader of the change log has closed the stream") from None

    def close(self) -> None:
        pass


class FileSink(Sink):
    """Appends to a file, with fsync. Raises `StorageError`."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Its content does not change before the first `write`: another sync may own it until then."""
        self._path = path
        self._is_complete = False
        self.place = f"file {path}"
        with storage_errors(path, "written", _HINTS):
            self._file = path.open("ab+", buffering=0)
            try:
                if not self._file.seek(0, os.SEEK_END):
                    sync_directory(path.parent)  # else a crash could lose a new file
            except BaseException:
                self._file.close()
                raise

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`. After an error the file contains nothing of the batch.

        The first write removes an incomplete line at the end, left by a killed process. A file lock makes processes on one
        machine take turns, so that a batch being written by another process is not mistaken for one.
        """
        data = memoryview(lines(batch))
        with storage_errors(self._path, "written", _HINTS), _locked(self._file):
            size = self._file.seek(0, os.SEEK_END) if self._is_complete else _remove_incomplete_line(self._file)
            self._is_complete = True
            try:
                while data:
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):
                    self._file.truncate(size)
                raise

    def close(self) -> None:
        self._file.close()


def lines(batch: pa.RecordBatch) -> bytes:
    columns = (batch[name].to_pylist() for name in ("key", "value", "expire_ts", "ts", "deleted"))
    return b"".join(_line(*row) for row in zip(*columns, strict=True))


def _line(key: bytes, value: bytes, expire_ts: int, ts: int, deleted: bool) -> bytes:  # noqa: FBT001 - a column
    row: dict[str, object] = {"op": "delete" if deleted else "put", "key": key.hex()}
    if not deleted:
        row |= {"value": value.hex()} | ({"expire_ts": expire_ts} if expire_ts else {})
    return json.dumps(row | {"ts": ts}).encode() + b"\n"


def _remove_incomplete_line(file: BinaryIO) -> int:
    """Truncate a file after its last newline; returns its new size."""
    end = file.seek(0, os.SEEK_END)
    while end:
        first = max(end - _TAIL, 0)
        file.seek(first)
        at = file.read(end - first).rfind(b"\n")
        if at >= 0:
            end = first + at + 1
            break
        end = first
    return file.truncate(end)


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Hold an exclusive lock on the file; the kernel releases it if the process is killed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # some network file systems have no locks: two syncs there can mix their lines
            raise
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


class LogSink(Sink):
    """Confirms what is part of the log, which is less than what was written. The first `resolve` starts or resumes the log."""

    all_versions = True

    def __init__(self, writer: LogWriter, place: str) -> None:
        self._writer = writer
        self.place = place

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`; durable only after `resolve` has returned a ts that covers it. Raises `StorageUnreachable`."""
        self._writer.append(batch)

    def resolve(self, ts: int, *, flush: bool = False) -> int:
        """See `Sink.resolve`. Raises as `LogWriter.start` and `LogWriter.flush`."""
        self._writer.start(ts)
        if flush or self._writer.is_due:
            self._writer.flush(ts)
        return self._writer.flushed_ts

    def mark_inexact(self, scanned: Scanned) -> None:
        """See `Sink.mark_inexact`: recorded in the next segment."""
        span = scanned.span
        self._writer.mark_inexact(InexactPeriod(span.start, span.end, scanned.from_ts, scanned.to_ts))

    def mark_missed(self, missed: Missed) -> None:
        """See `Sink.mark_missed`: recorded in the next segment, as a gap."""
        span = missed.span
        self._writer.mark_missed(MissedIngest(span.start, span.end, missed.from_ts, missed.to_ts, missed.cause))

    def close(self) -> None:
        """See `Sink.close`. Rows that are not part of the log yet are dropped: the feed delivers them again."""


class BlackholeSink(Sink):
    """Discards all changes."""

    place = "nowhere"

    def write(self, batch: pa.RecordBatch) -> None:
        pass

    def close(self) -> None:
        pass


log = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""Retry budget of one write, also for busy stores; then the failure is reported, and the batch is written again."""


def everything(ts: int) -> int:
    """`SinkOptions.complete_ts` of a sink that is the only one; not a lambda, so that options can be pickled."""
    return ts


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of the changes. A cluster as sink must not have the same keyspace; a log describes all of it."""

    cluster_id: int
    keyspace_id: int
    changefeed_id: str = ""
    whole: KeyRange = EVERY_KEY
    """Everything that is replicated to the sink, in RPC keys."""
    span: KeyRange = EVERY_KEY
    """Part of the range that this process replicates."""
    start_ts: int = 0
    """Start-ts of the whole range's replication; 0 = the start-ts of this process."""
    state: StorageLocation | None = None
    """Storage of the checkpoint; None = in etcd."""
    keyspace_name: str = ""
    """Name of the keyspace in the source's PD; empty = it has none."""
    ranges: tuple[KeyRange, ...] = ()
    """All ranges of a log of several keyspaces, in order, of which `whole` is the first."""
    keyspace_names: tuple[str, ...] = ()
    """Names of their keyspaces."""
    resumes: bool = False
    """Continue from a checkpoint."""

    def follower(self, state: str, sink: Sink, owner: LeaseOwner | None = None) -> Follower:
        """The record of a process that writes to a sink, for PD of the source."""
        found = Follower(state, owner)
        if not isinstance(sink, TikvSink) or sink.keyspace_id is None or not self.whole.start:
            return found  # a replay of a topic does not know the range of its source
        span = KeyCodec(ApiVersion.V2, self.keyspace_id).user_range(self.whole)
        return structs.replace(
            found, target=sink.cluster_id, keyspaces=(self.keyspace_id, sink.keyspace_id), spans=(span,)
        )


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Options of a sink. `fence` applies to clusters and Kafka, `complete_ts` to Kafka, all others to clusters only."""

    tls: TlsFiles = field(default_factory=TlsFiles)
    skip_version_check: bool = False
    """See `ClusterConfig.skip_version_check`."""
    drop_ttls: bool = False
    """Store rows with a TTL without it if the cluster does not support TTLs."""
    concurrency: int = CONCURRENCY
    batch_rows: int = BATCH_ITEMS
    """Maximum number of rows per request."""
    request_timeout: float = REQUEST_TIMEOUT
    """Timeout of one request, in seconds."""
    fence: Callable[[], object] = unfenced
    """Called right before each write request; raises if this process must not write any more."""
    wait: Callable[[str], object] = unsaid
    """Called with what the sync waits for before it can begin; empty: it goes on."""
    complete_ts: Callable[[int], int] = everything
    """Given the ts up to which this sink has everything, returns the one up to which the changefeed's other sinks have too; 0 if
    this sink does not announce it."""


def wait_for_sink(
    stack: ExitStack,
    target: Target,
    origin: Origin,
    options: SinkOptions,
    retries: ReplicateOptions,
    stop: threading.Event | None = None,
) -> Sink | None:
    """Open a sink until the end of a stack, with retries until it answers; None if `stop` is set before that.

    Raises as `open_sink`; `ClusterUnreachable` and `RetryBudgetExhausted` only after the patience is exceeded.
    """
    stop = stop or threading.Event()
    failures, began, tries = Patience(retries.patience, "--sink-patience"), time.monotonic(), 0
    while True:
        try:
            opened = stack.enter_context(open_sink(target, origin, options))
        except (ClusterUnreachable, RetryBudgetExhausted, KafkaUnreachable) as error:
            failures.fail(error, began)
            log.warning("cannot start yet, retrying: %s", error.message)
            options.wait(f"the sink has not answered for {failures.failing_seconds:.0f} s: {error.message}")
        else:
            options.wait("")
            return opened
        tries += 1
        if stop.wait(Backoff("sink", 0.1, retries.longest_wait).delay(tries, 0.0)):
            return None


@contextmanager
def open_sink(target: Target, origin: Origin, options: SinkOptions | None = None) -> Iterator[Sink]:
    """Open a sink until the end of the block. Errors of a cluster that does not answer name ``--sink``.

    Raises `UsageError` if the sink is the source, `ApiVersionMismatch`, `ClusterError`, `StorageError`.
    """
    options = options or SinkOptions()
    with ExitStack() as stack:
        sink: Sink
        match target:
            case TikvTarget():
                config = ClusterConfig(
                    pd=target.pd,
                    tls=options.tls,
                    request_timeout=options.request_timeout,
                    retry_budget=RETRY_SECONDS,
                    busy_budget=RETRY_SECONDS,
                    skip_version_check=options.skip_version_check,
                )
                with _sink_named(target):
                    sink = _tikv_open(stack.enter_context(Cluster.connect(config)), target, origin, options)
            case LogTarget():
                sink = _log_sink(target, origin)
            case KafkaUrl():
                with _sink_named(target):
                    admin = TopicAdmin(target, options.fence)
                    cluster_id = admin.cluster_id()
                    # A topic that does not exist is created at the first write: until then nothing changes.
                    sink = KafkaSink(
                        target,
                        cluster_id,
                        admin.find(),
                        keyspace_id=origin.keyspace_id,
                        retry_seconds=RETRY_SECONDS,
                        fence=options.fence,
                        complete_ts=options.complete_ts,
                    )
            case FileTarget():
                sink = FileSink(target.path)
            case StdoutTarget():
                sink = StreamSink(sys.stdout.buffer)
            case BlackholeTarget():
                sink = BlackholeSink()
        stack.callback(sink.close)
        yield sink


@contextmanager
def _sink_named(target: Target) -> Iterator[None]:
    """Name ``--sink`` in connection errors, which could also be the source's."""
    try:
        yield
    except ClusterTlsError as error:
        hint = error.hint.replace("--ca, --cert and --key", "--sink-ca, --sink-cert and --sink-key")
        raise type(error)(f"--sink {target}: {error.message}", hint=hint) from None
    except KafkaError as error:
        raise type(error)(f"--sink: {error.message}", hint=error.hint) from None
    except (ClusterUnreachable, RetryBudgetExhausted) as error:
        raise type(error)(f"--sink {target} does not answer: {error.message}", hint=error.hint) from None


def _log_sink(target: LogTarget, origin: Origin) -> LogSink:
    from tikv_br.archive.records import LogDescription, state_location
    from tikv_br.archive.writer import FlushOptions, LogWriter

    log_id = target.id_for(origin.changefeed_id)
    # A short patience: the pipeline retries, and checks between retries whether it must stop.
    patience = min(target.location.s3.patience, RETRY_SECONDS)
    location = replace(target.location, s3=structs.replace(target.location.s3, patience=patience))
    description = LogDescription(
        log_id=log_id,
        tool_version=__version__,
        cluster_id=origin.cluster_id,
        api_version=ApiVersion.V2,
        keyspace_id=origin.keyspace_id,
        keyspace_name=origin.keyspace_name,
        ranges=origin.ranges or (origin.whole,),
        start_ts=origin.start_ts,
        started_ms=time.time_ns() // 1_000_000,
        has_checkpoint=origin.state is not None
        and origin.state.redacted() == state_location(target.location, log_id).redacted(),
        encryption=location.crypter.method,
        keyspace_names=origin.keyspace_names,
    )
    options = FlushOptions(target.flush_interval, target.flush_size, target.rate_limit)
    place = f"log {log_id} at {location.bucket or 'local'}:{location.path}"
    writer = LogWriter(open_store(location), description, origin.span, options, more=origin.ranges[1:])
    return LogSink(writer, place)


def _log_notice(event: Event) -> None:
    if isinstance(event, Notice):
        log.log(logging.WARNING if event.warning else logging.INFO, "%s", event.message)


def _tikv_open(cluster: Cluster, target: TikvTarget, origin: Origin, options: SinkOptions) -> Sink:
    version = cluster.api_version
    target.check(version)
    cluster.require(WRITES)
    refuse_transactions(cluster)
    cluster.notice_without(WRITE_DEADLINE)
    if target.keyspace != "":
        keyspace_id = chosen_keyspace(cluster, target.keyspace)
    elif version is ApiVersion.V2:
        names = {origin.keyspace_id: origin.keyspace_name}
        keyspace_id = matching_keyspace(
            cluster.pd, origin.keyspace_id, names, "?keyspace=NAME behind the address of --sink", _log_notice
        )
    else:
        keyspace_id = 0
    if (cluster.cluster_id, keyspace_id) == (origin.cluster_id, origin.keyspace_id):
        raise UsageError(
            "--sink and the source are the same keyspace of the same cluster",
            hint="Correct --pd or --sink. To write to another keyspace of that cluster, append ?keyspace=NAME to its address.",
        )
    try:
        raw = cluster.raw(keyspace_id, options.fence)
    except UnsupportedFormat as error:
        raise UsageError(f"--sink: {error}") from None
    opened = TikvSink(raw, drop_ttls=options.drop_ttls, concurrency=options.concurrency, batch_rows=options.batch_rows)
    ours = origin.follower("", opened)
    check_no_return(cluster, origin.cluster_id, ours, options.fence, options.wait)
    check_none_returned(cluster, origin.cluster_id, origin.changefeed_id, ours, resumes=origin.resumes)
    return opened
