"""Rows of a Parquet file into an empty cluster: `load raw`, which ingests SSTs, beside `raw load`, which puts.

Processor time is that of the command and of all processes that it starts: the JVM, Spark's workers. That of the playground, whose stores
are Python, is measured beside it: it says nothing of real stores, for it writes no Raft log.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.command import TOO_LONG
from bench.dataset import Dataset
from bench.harness import Figure, Goal, Scale, Spread
from tests.e2e.command import PROGRAM, environment
from tests.support.background import Background
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.playground.home import Home

BENCH = "initial load"
OURS, PUTS = "load raw", "raw load (puts)"
VALUE_SIZE, STORES, WARM_UP_ROWS = 100, 3, 1000
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds that one load took."""

    wall: float
    client: float
    """Processor time of the command and its processes."""
    servers: float
    """Processor time of the playground."""


def figures(scale: Scale) -> Iterator[Figure]:
    """Rows per second of processor time, of the clients alone and with the playground's, and per second of wall time."""
    taken: dict[str, list[Load]] = {OURS: [], PUTS: []}
    with tempfile.TemporaryDirectory() as name, live_cluster(Path(name, "c"), ApiVersion.V1, stores=STORES) as live:
        pid = int((Home(Path(name, "c")).state() or {})["pid"])
        small, table = (
            _write(Path(name, "warm.parquet"), WARM_UP_ROWS),
            _write(Path(name, "t.parquet"), scale.store_rows),
        )
        for number in range(-1, scale.process_rounds):
            for subject in list(taken)[:: -1 if number % 2 else 1]:
                load = _load(live, pid, Path(name), subject, small if number < 0 else table)
                if number >= 0:
                    taken[subject].append(load)
    case = f"{scale.store_rows:,} rows of {VALUE_SIZE} B"
    for unit, least, seconds_of in (
        ("rows/s per core", None, [[run.client for run in runs] for runs in taken.values()]),
        ("rows/s per core, with stores", 2.0, [[run.client + run.servers for run in runs] for runs in taken.values()]),
        ("rows/s", 1.0, [[run.wall for run in runs] for runs in taken.values()]),
    ):
        ours, theirs = seconds_of
        ratio = Spread.of([their / our for our, their in zip(ours, theirs, strict=True)])
        goal = Goal("ratio", at_least=least) if least else None
        yield Figure(BENCH, case, OURS, unit, _rate(scale.store_rows, ours), len(ours))
        yield Figure(BENCH, case, PUTS, unit, _rate(scale.store_rows, theirs), len(ours), OURS, ratio, goal)


def _rate(rows: int, seconds: list[float]) -> Spread:
    return Spread.of([rows / each for each in seconds])


def _write(path: Path, rows: int) -> Path:
    with pq.ParquetWriter(path, pa.schema([("key", pa.binary()), ("value", pa.binary())])) as file:
        for batch in Dataset(rows, VALUE_SIZE).batches(1 << 14):
            columns = [batch[name].cast(pa.binary()) for name in ("key", "value")]
            file.write_batch(pa.record_batch(columns, schema=file.schema))
    return path


def _load(live: LiveCluster, servers: int, folder: Path, subject: str, table: Path) -> Load:
    """Load into the cluster, whose process is ``servers``, and empty it again."""
    command = ["raw", "load", str(table)]
    if subject == OURS:
        columns = ("--key-column", "key", "--value-column", "value")
        command = ["load", "raw", "--input", str(table), *columns, "--staging", str(folder / "staging")]
    before, began = _seconds(servers), time.perf_counter()
    with subprocess.Popen(
        [PROGRAM, *command, "--pd", live.pd],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment(),
        cwd="/",
        start_new_session=True,
    ) as process:
        try:
            with SessionWatch(process.pid) as watch:
                process.wait(TOO_LONG)
        finally:
            process.kill()
    wall = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{command}: exit code {process.returncode}")
    busy = _seconds(servers) - before
    live.raw().delete_range(EVERY_KEY)
    shutil.rmtree(folder / "staging", ignore_errors=True)
    return Load(wall, watch.seconds, busy)


class SessionWatch(Background):
    """Sums the processor time of all processes of a session while the block runs.

    By looking again and again: Spark's daemon lets the kernel forget its workers, so that no parent learns what they have used.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._used: dict[int, float] = {}
        super().__init__([(self._look, 0.02)])

    @property
    def seconds(self) -> float:
        """Up to the last look at each process."""
        return sum(self._used.values())

    def _look(self) -> None:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(folder.name)
                if os.getsid(pid) == self._session:
                    self._used[pid] = _seconds(pid)


def _seconds(pid: int) -> float:
    """The processor time of a process, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK
