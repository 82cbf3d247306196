"""How much a disaster would lose: `tikv-br log start` to an S3 server beside a writer at a steady rate, then with the server away.

``python -m bench.log_rpo --seconds 300 --away 60``. Stores, server, log and writer share the processors.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.__main__ import row
from bench.command import MemoryWatch
from bench.dataset import Dataset
from bench.harness import Figure, Goal, Scale, Spread
from tests.e2e.command import PROGRAM, environment
from tests.integration.s3_servers import S3Server, versitygw_server
from tests.support.background import Background
from tests.support.lag import Distribution, spread_leaders
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.ports import reserved_ports
from tests.support.waiting import eventually
from tikv_br.archive.log import LogArchive
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.order import by_version, newest_by_key
from tikv_br.incremental.checkpoint import ObjectCheckpoints
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

BENCH = "log RPO"
RATE, BATCH = 1000, 100
"""Rows a second, and of a request."""
KEYS, KEY_SIZE, VALUE_SIZE = 100_000, 8, 100
FLUSH_SECONDS = 10
STORES, REGIONS = 3, 12
PATIENCE = 180.0
SAMPLE_SECONDS = 0.2
GOAL = Goal("value", at_most=20.0)


def figures(scale: Scale) -> Iterator[Figure]:
    """As long as five times a sync's lag is measured, and once as long without storage."""
    yield from measured(5 * scale.lag_seconds, scale.lag_seconds)


def measured(seconds: float, away: float) -> Iterator[Figure]:
    """Now minus checkpoint, bytes stored, and the process's memory; at the end the log must have every version."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="log-rpo-")))
        source = stack.enter_context(live_cluster(folder / "source", ApiVersion.V2, stores=STORES, regions=REGIONS))
        spread_leaders(source)
        [port] = stack.enter_context(reserved_ports(1))
        server = stack.enter_context(versitygw_server(folder / "s3", port=port))
        log = stack.enter_context(_following(source, server, folder))
        rpo, memory = stack.enter_context(_Rpo(log.place)), stack.enter_context(MemoryWatch(log.pid))
        log.reach(source)
        with _Writer(source.raw()) as writer:
            log.reach(source)
            began, rows = time.monotonic(), writer.rows
            time.sleep(seconds)
            ended, rows = time.monotonic(), writer.rows - rows
            case = f"{rows / (ended - began):,.0f}/s, flush {FLUSH_SECONDS} s"
            yield from _distribution(case, rpo.between(began, ended))
            yield _one(case, "peak memory", "MiB", memory.peak_mib)
            server.kill()
            time.sleep(away)
            stack.enter_context(versitygw_server(folder / "s3", port=port))
            back = time.monotonic()
            log.reach(source)
            caught_up = time.monotonic()
        log.reach(source)
        log.stop()
        case = f"storage away for {away:g} s"
        yield _one(case, "longest", "s", max(rpo.between(ended, caught_up)))
        yield _one(case, "caught up after", "s", caught_up - back)
        yield _one(case, "peak memory", "MiB", memory.peak_mib)
        found = log.versions()
        if dict(zip(*(newest_by_key(found)[each].to_pylist() for each in ("key", "value")), strict=True)) != contents(
            source
        ):
            raise SystemExit("the log does not have the rows of the source")
        yield _one(
            "all of it", "versions in the log", "of those put", found.num_rows / writer.rows, Goal("value", at_least=1)
        )
        yield _one("all of it", "stored", "bytes per user byte", log.size / (writer.rows * (KEY_SIZE + VALUE_SIZE)))


def _distribution(case: str, seconds: list[float]) -> Iterator[Figure]:
    found = Distribution.of(seconds)
    for subject, value in {"p50": found.p50, "p99": found.p99, "longest": found.most}.items():
        yield _one(case, subject, "s", value, GOAL if subject == "p99" else None)


def _one(case: str, subject: str, unit: str, value: float, goal: Goal | None = None) -> Figure:
    return Figure(BENCH, case, subject, unit, Spread.of([value]), 1, goal=goal)


@dataclass(frozen=True, slots=True)
class _Log:
    """A running log, and the folder that the server keeps it in."""

    process: subprocess.Popen[bytes]
    place: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(path.stat().st_size for path in self.place.rglob("*") if path.is_file())

    def reach(self, source: LiveCluster) -> None:
        """Wait until the checkpoint has come to what is now."""
        now = source.cluster.pd.tso()
        eventually(
            lambda: self.process.poll() is not None or checkpoint_ts(self.place) > now, PATIENCE, every=SAMPLE_SECONDS
        )
        if self.process.poll() is not None:
            raise SystemExit(f"the log ended with {self.process.returncode}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)

    def versions(self) -> pa.RecordBatch:
        """All rows, each once."""
        archive = LogArchive.open(open_store(parse(f"local://{self.place.parent}")), self.place.name)
        if archive.damage or archive.gaps():
            raise SystemExit(f"the log is damaged: {archive.damage or archive.gaps()}")
        files = {file.name: file for segment in archive.segments for file in segment.files}
        return by_version(pa.concat_batches([batch for file in files.values() for batch in archive.rows(file)]))


def checkpoint_ts(place: Path) -> int:
    """The checkpoint of a log that a restart would find; 0 = none."""
    found = ObjectCheckpoints(open_store(parse(f"local://{place}/state")), place.name).load()
    return 0 if found is None else found.checkpoint_ts


@contextlib.contextmanager
def _following(source: LiveCluster, server: S3Server, folder: Path) -> Iterator[_Log]:
    command = [str(PROGRAM), "log", "start", "--pd", source.pd, "--storage", server.url("logs"), "--start-ts", "now"]
    command += ["--flush-interval", f"{FLUSH_SECONDS}s", "--scratch-dir", str(folder)]
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment(), cwd="/") as process,
    ):
        try:
            yield _Log(process, folder / "s3" / "backups" / "logs" / "default")
        except BaseException:
            print((folder / "output").read_text()[-2000:])
            raise
        finally:
            process.kill()


class _Rpo(Background):
    """Notes now minus checkpoint, again and again."""

    def __init__(self, place: Path) -> None:
        super().__init__([(self._look, SAMPLE_SECONDS)])
        self._place = place
        self._seen: list[tuple[float, float]] = []

    def between(self, since: float, until: float) -> list[float]:
        """What was seen between two monotonic times, in seconds."""
        return [rpo for at, rpo in self._seen if since <= at < until]

    def _look(self) -> None:
        if ts := checkpoint_ts(self._place):
            self._seen.append((time.monotonic(), time.time() - physical_ms(ts) / 1000))


class _Writer(Background):
    """Overwrites rows at `RATE`, neighbours in one request."""

    def __init__(self, raw: RawClient) -> None:
        super().__init__()
        self.rows = 0
        """That the cluster has confirmed."""
        self._raw = raw
        self._values = Dataset(KEYS, VALUE_SIZE).records()["value"]
        self._spawn(self._write)

    def _write(self) -> None:
        chance, due = np.random.default_rng(0), time.monotonic()
        while not self._enough.wait(max(0.0, due - time.monotonic())):
            first, value = chance.integers(KEYS - BATCH, size=2).tolist()
            keys = [(number * (1 << 64) // KEYS).to_bytes(KEY_SIZE, "big") for number in range(first, first + BATCH)]
            self._raw.batch_put(dict(zip(keys, self._values[value : value + BATCH].to_pylist(), strict=True)))
            self.rows += BATCH
            due += BATCH / RATE


def main() -> None:
    """Read the options, and print a line for each figure."""
    parser = argparse.ArgumentParser(prog="bench.log_rpo", description="Measure how far a log is behind.")
    parser.add_argument("--seconds", type=float, default=300.0, help="for which it is measured with its storage")
    parser.add_argument("--away", type=float, default=60.0, help="seconds without it")
    options = parser.parse_args()
    for figure in measured(options.seconds, options.away):
        print(row(figure), flush=True)


if __name__ == "__main__":
    main()
