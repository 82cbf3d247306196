"""Feed, sorter and sink put together: what a sync runs for its span, and a capture for each of its sub-spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from formats.keys import KeyCodec
from incremental.checkpoint import Checkpoint, CheckpointStore
from incremental.feed import Feed, FeedOptions, Resolved, Rows
from incremental.replicate import ReplicateOptions, Replicator, SafePoint
from incremental.sinks.base import Sink
from incremental.sorter import Sorter
from incremental.span import Span
from tikv_br.cluster.cluster import Cluster
from tikv_br.spark.memory import keep_freed_memory

POLL_SECONDS = 0.5
"""How soon a sync that hears nothing notices that it is to stop."""
SORTER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How to run one span."""

    scratch: Path
    """A directory of this machine for what does not fit into memory."""
    sorter_bytes: int = SORTER_BYTES
    feed: FeedOptions = field(default_factory=FeedOptions)
    replicate: ReplicateOptions = field(default_factory=ReplicateOptions)


@dataclass(frozen=True, slots=True)
class Source:
    """What is followed."""

    cluster: Cluster
    codec: KeyCodec
    span: Span


@contextmanager
def pipeline(
    source: Source,
    begun: Checkpoint,
    options: PipelineOptions,
    *,
    sink: Sink,
    checkpoints: CheckpointStore,
    safe_point: SafePoint,
    stop: threading.Event,
) -> Iterator[Replicator]:
    """A replicator that is ready to `run` from a checkpoint; its parts are closed at the end of the block, the sink is not."""
    keep_freed_memory()
    with (
        Sorter(options.sorter_bytes, options.scratch) as sorter,
        Feed(source.cluster, source.codec, source.span, begun.checkpoint_ts, options.feed) as feed,
    ):
        yield Replicator(
            begun,
            feed=_told(feed, stop),
            sorter=sorter,
            sink=sink,
            checkpoints=checkpoints,
            safe_point=safe_point,
            options=options.replicate,
            stop=stop,
            feed_status=lambda: feed.status,
        )


def _told(feed: Feed, stop: threading.Event) -> Iterator[Rows | Resolved]:
    """What the feed tells, until it is to stop."""
    while not stop.is_set():
        said = feed.poll(POLL_SECONDS)
        if said is not None:
            yield said
