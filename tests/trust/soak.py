"""A sync at steady load for long, and what it takes of its machine all the while: see docs/reliability.md.

Source, target, writers and sync share one machine. Every few seconds the lead of a region of the source moves on, so that
subscriptions come and go as they do in a living cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

import tikv_br
from bench.machine import Load as MachineLoad
from bench.machine import machine
from tests.e2e.command import PROGRAM, environment
from tests.support.background import Background
from tests.support.lag import Load, spread_leaders
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.formats.api_version import ApiVersion

START_SECONDS = 120.0
SORTER_MEMORY = "8MiB"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """The sync at one moment; ``at`` in seconds since the load began."""

    at: float
    rss: int
    """Bytes."""
    descriptors: int
    threads: int
    sorter_memory: int
    """Bytes."""
    sorter_disk: int
    """Bytes."""
    lag: float
    """Seconds from the checkpoint to now."""
    written: int
    """Rows that the target has confirmed."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through one figure of the samples."""

    first: float
    """First value of the fitted line."""
    last: float
    """Last value of the fitted line."""
    median: float
    most: float

    @classmethod
    def of(cls, at: Sequence[float], values: Sequence[float]) -> Trend:
        """By least squares; at least two samples."""
        slope, start = np.polyfit(np.asarray(at) - at[0], np.asarray(values, dtype=float), 1).tolist()
        return cls(
            round(start, 2),
            round(start + slope * (at[-1] - at[0]), 2),
            round(float(np.median(values)), 2),
            round(float(max(values)), 2),
        )

    @property
    def growth(self) -> float:
        """From the line's begin to its end."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum growth of the lines from start to end."""

    rss_mib: float = 16.0
    descriptors: float = 4.0
    threads: float = 4.0
    sorter_mib: float = 4.0
    lag: float = 1.0
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Soaked:
    """Result of a soak, without its warm-up."""

    seconds: float
    """Seconds of warm-up and measurement."""
    warm_up: float
    samples: int
    rows: int
    """That the target confirmed after the warm-up."""
    moves: int
    """Number of leader moves."""
    rss_mib: Trend
    descriptors: Trend
    threads: Trend
    sorter_mib: Trend
    """In memory and on disk."""
    lag: Trend

    @classmethod
    def of(cls, samples: Sequence[Sample], warm_up: float, moves: int) -> Soaked:
        """Compute the result from samples, the first of them from the warm-up."""
        warm = [sample for sample in samples if sample.at >= warm_up]
        at = [sample.at for sample in warm]
        return cls(
            round(samples[-1].at, 1),
            warm_up,
            len(warm),
            warm[-1].written - warm[0].written,
            moves,
            Trend.of(at, [sample.rss / MIB for sample in warm]),
            Trend.of(at, [sample.descriptors for sample in warm]),
            Trend.of(at, [sample.threads for sample in warm]),
            Trend.of(at, [(sample.sorter_memory + sample.sorter_disk) / MIB for sample in warm]),
            Trend.of(at, [sample.lag for sample in warm]),
        )

    def faults(self, limits: Limits) -> list[str]:
        """The figures that rise by more than they may."""
        return [
            f"{name} rises by {getattr(self, name).growth:.2f}, and may by {limit:g}"
            for name, limit in asdict(limits).items()
            if getattr(self, name).growth > limit
        ]


class Served:
    """A running sync that reports its status."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.url = url
        self._process = psutil.Process(process.pid)

    def sample(self, at: float) -> Sample:
        """As it is now."""
        reported = self._metrics()
        with self._process.oneshot():
            rss, threads = self._process.memory_info().rss, self._process.num_threads()
        return Sample(
            round(at, 2),
            rss,
            self._process.num_fds(),
            threads,
            int(reported["tikv_br_sync_sorter_memory_bytes"]),
            int(reported["tikv_br_sync_sorter_disk_bytes"]),
            round(reported["tikv_br_sync_checkpoint_lag_seconds"], 3),
            int(reported["tikv_br_sync_written_rows_total"]),
        )

    def wait_until_near(self, seconds: float = 30.0) -> None:
        """Until it is no further behind than that."""
        until = time.monotonic() + START_SECONDS
        while self._metrics().get("tikv_br_sync_checkpoint_lag_seconds", seconds) >= seconds:
            assert time.monotonic() < until, "the sync does not come up"
            time.sleep(0.2)

    def _metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return {sample.name: sample.value for family in families for sample in family.samples}


@contextlib.contextmanager
def syncing(source: LiveCluster, sink: str, folder: Path, *more: str) -> Iterator[Served]:
    """A sync from now on, as a process with ``more`` flags; its last lines are in ``folder / "log"``."""
    folder.mkdir(exist_ok=True)
    command = [str(PROGRAM), "sync", "--pd", source.pd, "--sink", sink, "--start-ts", "now"]
    places = ["--state-dir", str(folder / "state"), "--scratch-dir", str(folder), "--sorter-memory", SORTER_MEMORY]
    status = ["--status-addr", "0", "--no-status-key", "--status-every", "60s", "--output", "json"]
    with (
        (folder / "log").open("wb") as log,
        (folder / "out").open("wb") as out,
        subprocess.Popen(
            [*command, *places, *status, *more], stdout=out, stderr=log, env=environment(), cwd="/"
        ) as process,
    ):
        try:
            yield Served(process, _url_in(folder / "out", process))
        finally:
            process.terminate()
            process.wait(60)


def _url_in(out: Path, process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        for line in out.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError, KeyError):
                return str(json.loads(line)["url"])
        time.sleep(0.1)
    raise AssertionError("the sync does not serve its status")


class Moves(Background):
    """Hands the lead of one region after the other to the next store."""

    def __init__(self, live: LiveCluster, every: float) -> None:
        super().__init__([(self._move, every)])
        self.done = 0
        self._live, self._turns = live, itertools.count()

    def _move(self) -> None:
        turn, regions = next(self._turns), self._live.regions()
        region, stores = regions[turn % len(regions)], self._live.store_ids
        after = stores[(stores.index(region["leader_store"]) + 1) % len(stores)]
        self._live.transfer_leader(region_id=region["id"], store_id=after)
        self.done += 1


def soak(
    seconds: float,
    warm_up: float,
    *,
    rate: float,
    every: float,
    moves_every: float,
    tell: Callable[[Sample], object] = lambda _sample: None,
) -> Soaked:
    """Write ``rate`` rows a second for so long, with a sample each ``every`` seconds."""
    settings: dict[str, Any] = {"stores": 3, "regions": 12}
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as name,
        live_cluster(Path(name, "source"), ApiVersion.V2, **settings) as source,
        live_cluster(Path(name, "target"), ApiVersion.V2, **settings) as target,
    ):
        for live in (source, target):
            spread_leaders(live)
        with syncing(source, f"tikv://{target.pd}", Path(name)) as served:
            served.wait_until_near()
            began, samples = time.monotonic(), list[Sample]()
            with Load(source.raw(), rate), Moves(source, moves_every) as moves:
                while (at := time.monotonic() - began) < seconds:
                    samples.append(served.sample(at))
                    tell(samples[-1])
                    time.sleep(every)
        return Soaked.of(samples, warm_up, moves.done)


def main() -> int:
    """Read the options, soak, and print a line each minute and the outcome as JSON; 1 when a limit is passed."""
    parser = argparse.ArgumentParser(prog="soak.py", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="in all")
    parser.add_argument("--warm-up", type=float, default=300.0, help="seconds at the beginning that do not count")
    parser.add_argument("--rate", type=float, default=500.0, help="rows a second")
    parser.add_argument("--every", type=float, default=5.0, help="seconds from sample to sample")
    parser.add_argument("--moves-every", type=float, default=10.0, help="seconds from one move of a leader to the next")
    parser.add_argument("--json", type=Path, help="write the outcome there, too")
    chosen = parser.parse_args()
    reported, load, started = itertools.count(), MachineLoad(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def tell(sample: Sample) -> None:
        if next(reported) % max(1, round(60 / chosen.every)) == 0:
            print(json.dumps(asdict(sample)), flush=True)

    soaked = soak(
        chosen.seconds,
        chosen.warm_up,
        rate=chosen.rate,
        every=chosen.every,
        moves_every=chosen.moves_every,
        tell=tell,
    )
    faults = soaked.faults(Limits())
    outcome = {
        "version": tikv_br.__version__,
        "started": started,
        "machine": machine(),
        "load": load.until_now(),
        "rate": chosen.rate,
        **asdict(soaked),
        "faults": faults,
    }
    text = json.dumps(outcome)
    print(text, flush=True)
    if chosen.json:
        chosen.json.write_text(f"{text}\n")
    return 1 if faults else 0
