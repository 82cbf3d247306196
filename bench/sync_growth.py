"""Whether a sync falls further and further behind: its lag over time, at several parts of what its target takes.

The source (`bench.paced_feed`) tells rows at a rate, each with the time at which it was due as its timestamp; source and
target answer from memory, and the sync is bound to one core, as in `bench.sync_ceiling`, whose ceiling is measured first.

``python -m bench.sync_growth --shares 0.25 0.5 0.6 --seconds 20`` prints a line for each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bench import replay_feed
from bench.dataset import KEY_SIZE, Dataset
from bench.harness import QUICK, Figure, Goal, Scale, Spread
from bench.paced_feed import paced
from bench.sync_ceiling import REGIONS, ends, one_core, replicating, requests_of, sent
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.timestamps import compose, physical_ms
from tikv_br.formats import columns
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.tikv import TikvSink

BENCH = "sync growth"
VALUE_SIZE = 100
WARM_UP = 2.0
"""Seconds of each step that do not count."""
GROWS = 0.02
"""Seconds a second above which a lag grows."""
ENOUGH = Goal("value", at_most=GROWS)
ENOUGH_SHARE = 0.5
"""Share of the ceiling up to which no lag may grow."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one rate."""

    share: float
    """Share of the ceiling."""
    rate: float
    """Rows a second that the source delivered, or would have if it had been listened to."""
    slope: float
    """Seconds by which the lag has grown each second."""
    lag: float
    """Its median, in seconds: from when the newest row of a batch was due until the target has confirmed the batch."""
    written: float
    """Rows a second that the target has confirmed."""
    cores: float
    """Processor time of the sync each second; well below 1 where it could not keep up, others had the core."""

    @property
    def grows(self) -> bool:
        """Whether the sync cannot keep up."""
        return self.slope > GROWS

    def __str__(self) -> str:
        verdict = "GROWS" if self.grows else "steady"
        return (
            f"{self.share:.0%} of the ceiling, {self.rate:,.0f} events/s: lag {self.lag:.2f} s, {self.slope:+.3f} s/s, {verdict}; "
            f"written {self.written:,.0f}/s with {self.cores:.0%} of a core; machine load {os.getloadavg()[0]:.1f}"
        )


def figures(scale: Scale) -> Iterator[Figure]:
    """The slope of the lag at each share of the ceiling; goal: none up to half of it. Then the rate at which it grows."""
    with measuring(scale) as (ceiling, target):
        found = [step_at(target, share, ceiling, scale.lag_seconds) for share in scale.rate_shares]
    for step in found:
        case = f"{step.share:.0%}, {step.rate:,.0f} events/s"
        goal = ENOUGH if step.share <= ENOUGH_SHARE else None
        yield Figure(BENCH, case, "lag grows by", "s/s", _one(max(step.slope, 1e-6)), 1, goal=goal)
        yield Figure(BENCH, case, "lag, median", "s", _one(step.lag), 1)
        yield Figure(BENCH, case, "sync's processor time", "cores", _one(step.cores), 1)
    growing = [step.written for step in found if step.grows]
    if growing:
        yield Figure(BENCH, "onset", "lag begins to grow at", "events/s", _one(min(growing)), 1)


@contextlib.contextmanager
def measuring(scale: Scale) -> Iterator[tuple[float, Cluster]]:
    """Speed of a target on one core, in rows a second, and a connection to it."""
    rows = scale.data_bytes // (VALUE_SIZE + KEY_SIZE)
    least = replay_feed.EVENT_ROWS * REGIONS
    dataset = Dataset(max(rows // least, 1) * least, VALUE_SIZE)
    with ends(dataset) as (source, target):
        requests = requests_of(source, target, dataset)
        with one_core():
            seconds = sorted(sent(target, requests).wall for _ in range(scale.rounds + 1))
        yield dataset.rows / seconds[len(seconds) // 2], target


def step_at(target: Cluster, share: float, ceiling: float, seconds: float) -> Step:
    """Drive a sync at a part of the ceiling for so long, after a warm-up."""
    rate, least = share * ceiling, replay_feed.EVENT_ROWS * REGIONS
    lap = Dataset(max(int(rate / 4) // least, 1) * least, VALUE_SIZE)
    """A quarter of a second: no row comes twice between two resolved timestamps."""
    with paced(lap, REGIONS, rate) as address, Cluster.connect(ClusterConfig(pd=(address,))) as source:
        raw = RawClient(target.router, replay_feed.CODEC, target.cluster_id, now=target.clock.now)
        with contextlib.closing(_Watched(TikvSink(raw))) as sink, one_core():
            _run(source, sink, WARM_UP + seconds)
    return sink.step(share, rate)


def _run(source: Cluster, sink: _Watched, seconds: float) -> None:
    """Replicate for so long after the first rows have arrived."""
    stop, timers = threading.Event(), list[threading.Timer]()

    def begun() -> None:
        timers.append(threading.Timer(seconds, stop.set))
        timers[0].start()

    sink.on_first = begun
    try:
        with replicating(source, compose(int(time.time() * 1000) - 60_000), sink, stop) as replicator:
            replicator.run()
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()


class _Watched(Sink):
    """A sink that notes when which timestamps had been written."""

    def __init__(self, sink: TikvSink) -> None:
        self._sink = sink
        self.place = sink.place
        self.on_first: Callable[[], None] = _nothing
        self._seen: list[tuple[float, float, int, float]] = []
        """Time, lag, rows and processor time so far of each write."""

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`."""
        self._sink.write(batch)
        if not self._seen:
            self.on_first()
        now, last_ts = time.time(), int(columns.numbers(batch["ts"])[-1])
        self._seen.append((now, now - physical_ms(last_ts) / 1000, batch.num_rows, time.process_time()))

    def close(self) -> None:
        """See `Sink.close`."""
        self._sink.close()

    def step(self, share: float, rate: float) -> Step:
        """Samples after the warm-up."""
        seen = np.array(self._seen)
        at, lag, rows, cpu = seen[seen[:, 0] >= seen[0, 0] + WARM_UP].T
        seconds = at[-1] - at[0]
        slope = np.polyfit(at - at[0], lag, 1)[0]
        return Step(
            share=share,
            rate=rate,
            slope=float(slope),
            lag=float(np.median(lag)),
            written=float(rows[1:].sum() / seconds),
            cores=float((cpu[-1] - cpu[0]) / seconds),
        )


def _nothing() -> None:
    """Happens at the first rows, as a rule."""


def _one(value: float) -> Spread:
    return Spread.of([value])


def main() -> None:
    """Read the options, and print a line for each share."""
    parser = argparse.ArgumentParser(prog="bench.sync_growth", description="Look for the rate at which a lag grows.")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="of the target's ceiling")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which each is measured")
    options = parser.parse_args()
    with measuring(QUICK) as (ceiling, target):
        print(f"ceiling {ceiling:,.0f} events/s", flush=True)
        for share in options.shares:
            print(step_at(target, share, ceiling, options.seconds), flush=True)


if __name__ == "__main__":
    main()
