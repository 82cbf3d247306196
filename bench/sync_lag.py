"""How far `tikv-br sync` is behind, and what it costs: between two playgrounds, beside writers at a steady rate.

Source, target, sync, writers and probe share the processors, and the stores are Python: the lag beside real ones is less.

``python -m bench.sync_lag --rates 2000 4000 8000 --hold-back 0`` looks for the rate at which the lag begins to grow.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.harness import Figure, Goal, Scale, Spread
from bench.playgrounds import together
from tests.e2e.command import PROGRAM, environment
from tests.support.lag import Distribution, Load, Probe, put_many, spread_leaders
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.formats.api_version import ApiVersion

BENCH = "sync lag"
RATE = 2000.0
HOLD_BACKS = (0.0, 3.0)
GOAL = Goal("value", at_most=3.0)
"""For the 99th percentile without hold-back."""
STORES, REGIONS = 3, 12
START_SECONDS = 90.0
SETTLED = 2.0
"""Seconds beside the hold-back that the target may be behind when measuring begins."""
AFTERWARDS = 2.0
"""Seconds in which what was put last may still arrive; what has not counts as of then."""
GROWS = 1.0
"""Lag grows when the median of a step's last third is by so many seconds above that of its first."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one rate."""

    hold_back: float
    wanted: float
    """Rows a second."""
    events: float
    """Rows a second that the source took."""
    lag: Distribution
    grown: float
    """Seconds between the medians of the first and the last third; 0 if nothing was put in one of them."""
    cpu_us: float
    """Processor time of the sync for each row, in microseconds."""
    cores: float
    """Processor time of the sync each second."""
    memory_mib: int

    def __str__(self) -> str:
        verdict = f"grows by {self.grown:.1f} s" if self.grown > GROWS else "steady"
        return (
            f"hold-back {self.hold_back:g} s, {self.events:,.0f} of {self.wanted:,.0f} events/s: {self.lag}, {verdict}; "
            f"sync {self.cpu_us:.0f} us an event, {self.cores:.0%} of a core, {self.memory_mib} MiB; "
            f"machine load {os.getloadavg()[0]:.1f}"
        )


Pair = tuple[LiveCluster, LiveCluster]
"""Source and target."""


def figures(scale: Scale) -> Iterator[Figure]:
    """Percentiles of the time from put to visible, and processor time, with and without hold-back; then a backlog."""
    with clusters() as pair:
        yield from _lags(pair, scale)
        if rows := scale.backlog:
            yield Figure(BENCH, f"backlog of {rows:,}", "catching up", "events/s", Spread.of([catch_up(pair, rows)]), 1)


def _lags(pair: Pair, scale: Scale) -> Iterator[Figure]:
    for step in steps(pair, [RATE], scale.hold_backs, scale.lag_seconds):
        case = f"{step.wanted:,.0f}/s, hold-back {step.hold_back:g} s"
        lag = {"p50": step.lag.p50, "p90": step.lag.p90, "p99": step.lag.p99, "longest": step.lag.most}
        for subject, value in lag.items():
            goal = GOAL if subject == "p99" and not step.hold_back else None
            yield Figure(BENCH, case, subject, "s", Spread.of([value]), 1, goal=goal)
        yield Figure(BENCH, case, "sync's CPU per event", "us", Spread.of([step.cpu_us]), 1)


@contextlib.contextmanager
def clusters() -> Iterator[Pair]:
    """Source and target, both empty, their regions led by all stores."""
    settings = {"stores": STORES, "regions": REGIONS}
    with (
        tempfile.TemporaryDirectory(prefix="sync-lag-") as name,
        together(*(live_cluster(Path(name, end), ApiVersion.V2, **settings) for end in ("source", "target"))) as pair,
    ):
        source, target = pair
        spread_leaders(source)
        spread_leaders(target)
        yield source, target


def steps(
    pair: Pair, rates: Sequence[float], hold_backs: Sequence[float], seconds: float, *, batch: int = 10
) -> Iterator[Step]:
    """Measure each rate for a while, one after the other, for each hold-back."""
    source, target = pair
    for hold_back in hold_backs:
        with (
            syncing(source, f"tikv://{target.pd}", hold_back) as process,
            Probe(source.raw(), target.raw()) as probe,
            Load(source.raw(), rates[0], batch=batch) as load,
        ):
            wait_for(probe, process, SETTLED + hold_back)
            for rate in rates:
                load.rate = rate
                yield measure(process, probe, load, seconds, hold_back)


def catch_up(pair: Pair, rows: int) -> float:
    """Rows a second at which a sync that was held up for `rows` rows brings them to the target.

    The time also holds what is left of a store's second until its next resolved-ts. The rows must be written within ten
    seconds: connections end of which one side stands still for longer.
    """
    source, target = pair[0].raw(), pair[1].raw()
    with syncing(pair[0], f"tikv://{pair[1].pd}", 0.0) as process, Probe(source, target) as probe:
        wait_for(probe, process, SETTLED)
        process.suspend()
        try:
            put_many(source, rows)
        finally:
            process.resume()
        began = time.monotonic()
        while probe.oldest < began and process.is_running():
            time.sleep(0.02)
        return rows / (time.monotonic() - began)


@contextlib.contextmanager
def syncing(source: LiveCluster, sink: str, hold_back: float) -> Iterator[psutil.Process]:
    """A running sync from now on."""
    command = [str(PROGRAM), "sync", "--pd", source.pd, "--sink", sink, "--start-ts", "now"]
    with (
        tempfile.TemporaryDirectory(prefix="sync-lag-state-") as state,
        Path(state, "log").open("wb") as log,
        subprocess.Popen(
            [*command, "--state-dir", state, "--hold-back", f"{hold_back}s"],
            stdout=log,
            stderr=log,
            env=environment(),
            cwd="/",
        ) as process,
    ):
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def measure(process: psutil.Process, probe: Probe, load: Load, seconds: float, hold_back: float) -> Step:
    """Samples of the next seconds."""
    began, written, spent = time.monotonic(), load.written, _cpu_seconds(process)
    time.sleep(seconds)
    ended, rows, cpu = time.monotonic(), load.written - written, _cpu_seconds(process) - spent
    until = time.monotonic() + AFTERWARDS + hold_back
    while probe.oldest < ended and time.monotonic() < until:
        time.sleep(0.02)
    first, last = probe.lags(began, began + seconds / 3), probe.lags(ended - seconds / 3, ended)
    # A single slow put may take all of a third of a short step.
    grown = Distribution.of(last).p50 - Distribution.of(first).p50 if first and last else 0.0
    return Step(
        hold_back=hold_back,
        wanted=load.rate,
        events=rows / (ended - began),
        lag=Distribution.of(probe.lags(began, ended)),
        grown=grown,
        cpu_us=cpu / max(rows, 1) * 1e6,
        cores=cpu / (ended - began),
        memory_mib=process.memory_info().rss >> 20,
    )


def _cpu_seconds(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def wait_for(probe: Probe, process: psutil.Process, behind: float) -> None:
    """Wait until the target is no further behind than that, or as near as it will come."""
    until = time.monotonic() + START_SECONDS
    while (not probe.seen or probe.behind > behind) and time.monotonic() < until:
        time.sleep(0.2)
    if not probe.seen or not process.is_running():
        raise SystemExit("the sync does not come up")


def main() -> None:
    """Read the options, and print a line for each step."""
    parser = argparse.ArgumentParser(prog="bench.sync_lag", description="Measure how far a sync is behind.")
    parser.add_argument("--rates", type=float, nargs="+", default=[RATE], help="rows a second, one after the other")
    parser.add_argument("--hold-back", type=float, nargs="+", default=HOLD_BACKS, help="seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which each rate is measured")
    parser.add_argument("--batch", type=int, default=10, help="rows of a request")
    options = parser.parse_args()
    with clusters() as pair:
        for step in steps(pair, options.rates, options.hold_back, options.seconds, batch=options.batch):
            print(step, flush=True)


if __name__ == "__main__":
    main()
