"""What a sync brings to its target, beside what the target takes: the same requests, serialized beforehand, sent and no more.

Feed, sorter and sink run in this process, which is bound to one core for it as for the sending alone; source and target
are servers of their own processes that answer from memory (`bench.replay_feed`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bench import replay_feed
from bench.dataset import KEY_SIZE, Dataset
from bench.harness import Figure, Goal, Scale, Spread, paired
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.store import StoreClient
from tikv_br.incremental.checkpoint import Checkpoint, CheckpointStore
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.pipeline import PipelineOptions, Replicator, pipeline
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.tikv import CONCURRENCY, TikvSink

if TYPE_CHECKING:
    import pyarrow as pa

BENCH = "sync ceiling"
VALUE_SIZES = (100, 1024)
REGIONS = 48
MOST_BYTES = 128_000_000
"""Of keys and values: the source holds them three times."""
GOAL = Goal("ratio", at_least=0.5)


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one run."""

    cpu: float
    wall: float


def figures(scale: Scale) -> Iterator[Figure]:
    """Events a second, by processor time and by the clock; a ratio is what part of the other's speed the sync has."""
    for size in VALUE_SIZES:
        rows = min(2 * scale.data_bytes, MOST_BYTES) // (size + KEY_SIZE)
        dataset = Dataset(max(rows, replay_feed.EVENT_ROWS * REGIONS), size)
        with ends(dataset) as (source, target):
            subjects = {
                "tikv-br": partial(synced, source, target, dataset),
                "target's ceiling": partial(sent, target, requests_of(source, target, dataset)),
            }
            with one_core():
                taken = paired(subjects, scale.rounds)
        yield from _compared(f"{size} B", dataset.rows, taken)


@contextlib.contextmanager
def ends(dataset: Dataset) -> Iterator[tuple[Cluster, Cluster]]:
    """Connections to a source that sends the rows of a dataset, and to a target."""
    with (
        replay_feed.source(dataset, REGIONS) as source,
        replay_feed.target(dataset, REGIONS) as target,
        Cluster.connect(ClusterConfig(pd=(source,))) as following,
        Cluster.connect(ClusterConfig(pd=(target,))) as followed,
    ):
        yield following, followed


def synced(source: Cluster, target: Cluster, dataset: Dataset) -> Took:
    """Replicate all that the source sends, as a sync does it."""
    stop = threading.Event()

    def run() -> None:
        with replicating(source, replay_feed.START_TS, _Ending(sink, dataset.rows, stop), stop) as replicator:
            replicator.run()

    with contextlib.closing(
        TikvSink(RawClient(target.router, replay_feed.CODEC, target.cluster_id, now=target.clock.now))
    ) as sink:
        return _timed(run)


@contextlib.contextmanager
def replicating(source: Cluster, start_ts: int, sink: Sink, stop: threading.Event) -> Iterator[Replicator]:
    """A sync of all that a source tells after a timestamp, without hold-back; its checkpoints and its safe point are nowhere."""
    codec, begun = replay_feed.CODEC, Checkpoint("bench", start_ts, start_ts, 0, 0, "")
    span = codec.rpc_range()
    kept = cast("CheckpointStore", _Kept())
    with tempfile.TemporaryDirectory() as scratch:
        options = PipelineOptions(scratch=Path(scratch), feed=FeedOptions(hold_back=0))
        with pipeline(
            source, codec, [span], begun, options, sink=sink, checkpoints=kept, safe_point=_Kept(), stop=stop
        ) as replicator:
            yield replicator


def sent(target: Cluster, requests: Sequence[bytes]) -> Took:
    """Send serialized requests of RawBatchPut, as many at once as a sink does."""
    store = target.store(1)
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return _timed(lambda: list(pool.map(lambda request: store.call(store.batch_put, request), requests)))


def requests_of(source: Cluster, target: Cluster, dataset: Dataset) -> list[bytes]:
    """Requests of a sync, sent as a sync does it."""
    found: list[bytes] = []
    call = StoreClient.call

    def noted(store: StoreClient, method: object, request: object, **options: object) -> object:
        if isinstance(request, bytes):
            found.append(request)
        return call(store, method, request, **options)  # type: ignore[arg-type]

    StoreClient.call = noted  # type: ignore[method-assign, assignment]
    try:
        synced(source, target, dataset)
    finally:
        StoreClient.call = call  # type: ignore[method-assign]
    return found


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Bind all threads of this process, and those that they start, to one core: a client's own limit is the same for all."""
    cores = os.sched_getaffinity(0)
    _bind({max(cores)})
    try:
        yield
    finally:
        _bind(cores)


def _bind(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


class _Ending(Sink):
    """A sink that ends the sync when all rows are put."""

    def __init__(self, sink: TikvSink, rows: int, stop: threading.Event) -> None:
        self._sink, self._rows, self._stop = sink, rows, stop
        self.place = sink.place

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`."""
        self._sink.write(batch)
        if self._sink.puts == self._rows:
            self._stop.set()

    def close(self) -> None:
        """See `Sink.close`."""
        self._sink.close()


class _Kept:
    """Takes the place of checkpoints and of a safe point."""

    silent_seconds = 0.0

    def save(self, checkpoint: Checkpoint) -> None:
        """Forget it."""

    def check(self) -> None:
        """All is well."""

    def advance(self, safe_point: int) -> None:
        """Forget it."""


def _timed(action: Callable[[], object]) -> Took:
    clock, cpu = time.perf_counter(), time.process_time()
    action()
    return Took(time.process_time() - cpu, time.perf_counter() - clock)


def _compared(case: str, events: int, taken: dict[str, list[Took]]) -> Iterator[Figure]:
    ours = taken["tikv-br"]
    for unit, seconds in (("events/CPU s", _cpu), ("events/s", _wall)):
        for subject, theirs in taken.items():
            ratios = [seconds(other) / seconds(own) for own, other in zip(ours, theirs, strict=True)]
            rival = theirs is not ours
            yield Figure(
                BENCH,
                case,
                subject,
                unit,
                Spread.of([events / seconds(took) for took in theirs]),
                len(theirs),
                compared_with="tikv-br" if rival else "",
                ratio=Spread.of(ratios) if rival else None,
                goal=GOAL if subject == "target's ceiling" else None,
            )


def _cpu(took: Took) -> float:
    return took.cpu


def _wall(took: Took) -> float:
    return took.wall
