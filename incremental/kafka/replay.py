"""Applies the changes of a topic to a cluster, in order of their timestamps.

Events wait in a sorter, in memory and then on disk, until every partition's resolved-ts has passed them. An offset is committed
once everything before it is in the sink; the record beside it says up to which ts that is, so that a resumed replay knows repeats.

TiKV-CDC sends no resolved-ts. A topic without any is applied as it arrives: in the order of each partition, which keeps the order of each key's changes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tikv_br.errors import SyncStateMismatch, TopicUnresolved
from tikv_br.incremental.checkpoint import Checkpoint, CheckpointStore
from tikv_br.incremental.kafka.group import Record, TopicGroup
from tikv_br.incremental.kafka.json_protocol import JsonCodec
from tikv_br.incremental.kafka.messages import Protocol
from tikv_br.incremental.kafka.open_protocol import OpenCodec, UserKeys
from tikv_br.incremental.kafka.topic_feed import RESOLVED_SECONDS, ReplayLimits, TopicFeed
from tikv_br.incremental.kafka.url import KafkaUrl
from tikv_br.incremental.pipeline import SORTER_BYTES, NoSafePoint, Replicator
from tikv_br.incremental.sinks.open import Origin, SinkOptions, wait_for_sink
from tikv_br.incremental.sinks.tikv import TikvSink
from tikv_br.incremental.sinks.url import TikvTarget
from tikv_br.incremental.sinks.writer import ReplicateOptions
from tikv_br.incremental.sorter import Sorter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """One replay."""

    source: KafkaUrl
    target: TikvTarget
    """Cluster to write to. A keyspace named in it may differ from the topic's."""
    scratch: Path
    """A local directory for changes that do not fit into memory."""
    group: str
    """The consumer group that has the progress."""
    patience: float = 600.0
    """Seconds for which Kafka may not answer; at the start at most 60."""
    limits: ReplayLimits = field(default_factory=ReplayLimits)
    once: bool = False
    """Stop at the ends that the partitions have at the start."""
    until_ts: int | None = None
    """Apply nothing after this, and stop when all before it is applied."""
    resolved_seconds: float = RESOLVED_SECONDS
    sorter_bytes: int = SORTER_BYTES
    sink: SinkOptions = field(default_factory=SinkOptions)
    replicate: ReplicateOptions = field(default_factory=ReplicateOptions)


@dataclass(frozen=True, slots=True)
class ReplayStatus:
    """The status of a replay; see `SyncStatus` for the fields of the same names."""

    topic: str
    group: str
    partitions: int
    unresolved_partitions: int
    """Partitions without any resolved-ts; nothing is applied while there is one, unless `as_it_arrives`."""
    as_it_arrives: bool
    """True if the topic has no resolved-ts and is applied in the order of each partition."""
    checkpoint_ts: int
    resolved_ts: int
    checkpoint_lag: float | None
    """None before the first resolved-ts."""
    messages: int
    events: int
    repeats: int
    written: int
    events_per_second: float
    sorter_memory_bytes: int
    sorter_disk_bytes: int
    sink_failures: int
    sink_failing_seconds: float
    sink_limited_share: float
    kafka_failing_seconds: float
    last_error: str


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay that has started. `status` may be called from any thread."""

    replicator: Replicator
    feed: TopicFeed
    group: TopicGroup
    topic: str
    partitions: int

    def status(self) -> ReplayStatus:
        now = self.replicator.status()
        return ReplayStatus(
            topic=self.topic,
            group=self.group.name,
            partitions=self.partitions,
            unresolved_partitions=len(self.feed.unresolved),
            as_it_arrives=self.feed.as_it_arrives,
            checkpoint_ts=now.checkpoint_ts,
            resolved_ts=now.resolved_ts,
            checkpoint_lag=now.checkpoint_lag if now.checkpoint_ts else None,
            messages=self.feed.messages,
            events=now.events,
            repeats=self.feed.repeats,
            written=now.written,
            events_per_second=now.events_per_second,
            sorter_memory_bytes=now.sorter_memory_bytes,
            sorter_disk_bytes=now.sorter_disk_bytes,
            sink_failures=now.sink_failures,
            sink_failing_seconds=now.sink_failing_seconds,
            sink_limited_share=now.sink_limited_share,
            kafka_failing_seconds=self.group.failures.failing_seconds,
            last_error=self.group.failures.last_error or now.last_error,
        )


class _Offsets(CheckpointStore):
    """The offsets of the group, as the checkpoint of the replay."""

    def __init__(self, group: TopicGroup, feed: TopicFeed, place: str) -> None:
        self._group, self._feed, self._place = group, feed, place

    def claim(self) -> int:
        """Commit where the replay starts, so that the group belongs to this sink."""
        self._group.commit(self._feed.offsets(self._feed.start_ts), Record(self._feed.start_ts, self._place))
        return 1

    def load(self) -> Checkpoint | None:
        """See `CheckpointStore.load`: the feed has read it already."""
        return None

    def save(self, checkpoint: Checkpoint) -> None:
        ts = checkpoint.checkpoint_ts
        self._group.commit(self._feed.offsets(ts), Record(self._feed.complete_up_to(ts), self._place))


def replay(options: ReplayOptions, stop: threading.Event, watch: Callable[[Replay], object]) -> ReplayStatus | None:
    """Apply a topic to a cluster until its end, or until `stop` is set. Calls `watch` before the first change is read.

    Returns None if stopped before that. Raises `KafkaError`, `TopicDamaged`, `TopicUnresolved` if nothing could be applied,
    `SyncFenced`, `SyncStateMismatch` if the group belongs to another sink, `UsageError`, `ClusterError`, and `StorageError` of the
    scratch directory.
    """
    url = options.source
    with ExitStack() as stack:
        group = stack.enter_context(TopicGroup(url, options.group, options.patience, stop))
        group.find_topic()
        sink = wait_for_sink(stack, options.target, Origin(0, 0), options.sink, options.replicate, stop)
        if not isinstance(sink, TikvSink):
            return None
        _check_sink(options.group, group.records().values(), sink.place)
        starts = group.join()
        _check_sink(options.group, (start.record for start in starts.values()), sink.place)
        feed = TopicFeed(
            group,
            url.topic,
            OpenCodec() if url.protocol is Protocol.OPEN else JsonCodec(url.encoding),
            starts,
            limits=options.limits,
            until_ts=options.until_ts,
            once=options.once,
            keys=UserKeys(url.key_prefix) if url.protocol is Protocol.OPEN else None,
            keyspace_id=None if options.target.keyspace != "" else sink.keyspace_id,
            resolved_seconds=options.resolved_seconds,
        )
        offsets = _Offsets(group, feed, sink.place)
        offsets.claim()
        sorter = stack.enter_context(Sorter(options.sorter_bytes, options.scratch))
        start = Checkpoint(options.group, feed.start_ts, feed.start_ts, 1, 0, sink.place)
        replicator = Replicator(
            start,
            feed=feed.events(stop),
            sorter=sorter,
            sink=sink,
            checkpoints=offsets,
            safe_point=NoSafePoint(group.check),
            options=options.replicate,
            stop=stop,
            clock=lambda: float(sink.now()),
        )
        running = Replay(replicator, feed, group, url.topic, len(starts))
        resumed = (
            "the committed offsets of its consumer group" if any(each.record.sink for each in starts.values()) else ""
        )
        where = f"ts {feed.start_ts}" if feed.start_ts else resumed or "its beginning"
        log.info("replaying %s from %s", url.topic, where)
        watch(running)
        replicator.run()
        if feed.has_applied_nothing and not stop.is_set():
            which = ", ".join(map(str, feed.unresolved)) or "all"
            raise TopicUnresolved(
                f"nothing was applied: {feed.changes:,} changes of topic {url.topic} wait for a later resolved-ts (partition {which})",
                hint="Check that the sync or changefeed that writes the topic runs; if it does not write to all partitions, pass partition-num.",
            )
        return running.status()


def _check_sink(name: str, records: Iterable[Record], place: str) -> None:
    for record in records:
        if record.sink not in {"", place}:
            raise SyncStateMismatch(
                f"consumer group {name} has replayed the topic to {record.sink}, but the sink is {place}",
                hint="Pass another --group for each target: its offsets are the progress of that target.",
            )
