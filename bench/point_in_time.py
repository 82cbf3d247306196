"""The log archive: writing it, merging it with a backup, and restoring a point in time beside a plain restore of as many rows.

Every change overwrites a random row of the base. The stores are Python and share the processors with the commands.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.command import timed
from bench.commands import STORES, VALUE_SIZE, fill
from bench.dataset import KEY_SIZE, Dataset
from bench.harness import Figure, Goal, Scale, Spread, cpu_seconds, paired, rates
from bench.scan_to_sst import into_folder
from tests.e2e.command import succeed
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.archive.compact import CompactionOptions, compact
from tikv_br.archive.records import LogDescription
from tikv_br.archive.writer import LogWriter
from tikv_br.dataflow.read import MergeSources
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

WRITER, COMPACTION, RESTORE, MERGE = "log writer", "log compaction", "point in time", "merge"
VALUE_SIZES = (100, 1024)
BATCH_ROWS = 4096
LENGTHS = (5, 10, 20)
"""Segments of the logs, each of which overwrites a tenth of the base's rows."""
RESTORED = 10
ENOUGH, LINEAR = Goal("ratio", at_most=1.5), Goal("ratio", at_most=1.1)


@dataclass(frozen=True, slots=True)
class Run:
    """Cost of one restore."""

    wall: float
    cpu: float
    busy: float
    """Seconds in which some store had a call under way."""
    peak_mib: float


def figures(scale: Scale) -> Iterator[Figure]:
    """MB/s of the writer; restores by the clock; merges with longer and longer logs by processor time."""
    for size in VALUE_SIZES:
        dataset = Dataset(scale.data_bytes // (size + KEY_SIZE), size, scale.data)
        changes = list(_changes(dataset, dataset.rows, first_ts=1))
        works = {WRITER: partial(_written, changes), COMPACTION: partial(_compacted, changes)}
        for bench, work in works.items():
            subjects = {"tikv-br": into_folder(work)}
            yield from rates(bench, f"{size} B", dataset.user_bytes / 1e6, "MB/s per core", subjects, scale.rounds)
    dataset = Dataset(scale.store_rows, VALUE_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        with live_cluster(Path(folder, "source"), ApiVersion.V2, stores=STORES) as source:
            _prepare(source, dataset, folder)
        yield from _restores(dataset, folder, scale.process_rounds)
        yield from _merges(dataset, folder, scale.process_rounds)


def _changes(dataset: Dataset, count: int, first_ts: int) -> Iterator[pa.RecordBatch]:
    """Overwritten rows in random order, as a feed delivers them; each has a timestamp of its own."""
    chance, rows = np.random.default_rng(first_ts), dataset.records()
    keys, values = (chance.choice(dataset.rows, count, replace=False) for _ in range(2))
    for first in range(0, count, BATCH_ROWS):
        some = slice(first, min(first + BATCH_ROWS, count))
        ts = np.arange(some.start, some.stop, dtype=np.uint64) + np.uint64(first_ts)
        yield columns.records(rows["key"].take(pa.array(keys[some])), rows["value"].take(pa.array(values[some])), ts=ts)


def _write(
    folder: str, log_id: str, cluster_id: int, start_ts: int, segments: Sequence[Sequence[pa.RecordBatch]]
) -> None:
    """Write a log of these segments, whose rows come by ascending timestamp."""
    codec = KeyCodec(ApiVersion.V2)
    span = codec.rpc_range()
    description = LogDescription(
        log_id, "bench", cluster_id, ApiVersion.V2, 0, (span,), start_ts, 1, has_checkpoint=False
    )
    writer = LogWriter(open_store(StorageLocation("local", folder)), description, span)
    writer.start(start_ts)
    for batches in segments:
        for batch in batches:
            writer.append(batch)
        writer.flush(int(columns.numbers(batches[-1]["ts"])[-1]))


def _written(changes: Sequence[pa.RecordBatch], folder: str) -> float:
    return cpu_seconds(lambda: _write(folder, "log", 1, 1, [changes]))()


def _compacted(changes: Sequence[pa.RecordBatch], folder: str) -> float:
    _write(folder, "log", 1, 1, [changes[first::RESTORED] for first in range(min(RESTORED, len(changes)))])
    options = CompactionOptions(StorageLocation("local", folder), "log", executor="driver")
    return cpu_seconds(lambda: compact(options))()


def _prepare(source: LiveCluster, dataset: Dataset, folder: str) -> None:
    """Write a base, and logs of all lengths that begin with it."""
    fill(source, dataset.rows)
    base = f"local://{folder}/base"
    succeed("backup", "raw", "-u", source.pd, "-s", base, "--safe-interval", "0s", "--executor", "driver")
    sources = MergeSources.open(StorageLocation("local", f"{folder}/base"), None)
    first_ts, count = sources.window()[0] + 1, dataset.rows // 10
    segments = [list(_changes(dataset, count, first_ts + number * count)) for number in range(max(LENGTHS))]
    for length in LENGTHS:
        _write(f"{folder}/log", f"{length}", sources.base.cluster_id, sources.base.backup_ts, segments[:length])
    _write(f"{folder}/log", "compacted", sources.base.cluster_id, sources.base.backup_ts, segments[:RESTORED])
    succeed("log", "compact", "-s", f"local://{folder}/log", "--id", "compacted")


def _restores(dataset: Dataset, folder: str, rounds: int) -> Iterator[Figure]:
    """Seconds of each command on a new cluster; a ratio is that of its time to the plain restore's."""
    base, log = f"local://{folder}/base", f"local://{folder}/log"
    point = ("restore", "point", "-s", log, "--full-backup-storage", base, "--log-id")
    commands = {
        "restore raw": ("restore", "raw", "-s", base),
        "restore point": (*point, str(RESTORED)),
        "the same, compacted": (*point, "compacted"),
    }
    taken: dict[str, list[Run]] = {name: [] for name in commands}
    for number in range(rounds):
        for name in list(commands)[:: -1 if number % 2 else 1]:
            taken[name].append(_restored(Path(folder, f"{name} {number}"), commands[name]))
    plain = taken["restore raw"]
    for name, runs in taken.items():
        is_plain = runs is plain
        changes = "" if is_plain else f" + {RESTORED} x {dataset.rows // 10:,}"
        case = f"{name}, {dataset.rows:,}{changes}"
        ratios = [run.wall / other.wall for run, other in zip(runs, plain, strict=True)]
        parts = {
            "stores at work": ("s", [run.busy for run in runs]),
            "the command's own": ("s", [run.wall - run.busy for run in runs]),
            "its processor time": ("s", [run.cpu for run in runs]),
            "peak memory": ("MiB", [run.peak_mib for run in runs]),
        }
        whole = Spread.of([run.wall for run in runs])
        against, ratio = ("", None) if is_plain else ("restore raw", Spread.of(ratios))
        goal = ENOUGH if name == "the same, compacted" else None
        yield Figure(RESTORE, case, "whole command", "s", whole, rounds, against, ratio, goal)
        for subject, (unit, values) in parts.items():
            yield Figure(RESTORE, case, subject, unit, Spread.of(values), rounds)


def _restored(folder: Path, command: Sequence[str]) -> Run:
    with live_cluster(folder, ApiVersion.V2, stores=STORES) as target:
        took = timed(*command, "-u", target.pd, "--executor", "driver")
        return Run(took.wall, took.cpu, float(target.calls()["busy_seconds"]), took.peak_mib)


def _merges(dataset: Dataset, folder: str, rounds: int) -> Iterator[Figure]:
    """CPU seconds; the ratio of a time is that to what it would be in proportion to the shortest log's."""

    def merge(length: int) -> float:
        place = f"{folder}/merged"
        sources = ("--base", f"local://{folder}/base", "--log", f"local://{folder}/log", "--log-id", str(length))
        took = timed("backup", "merge", *sources, "-s", f"local://{place}", "--executor", "driver")
        shutil.rmtree(place)
        return took.cpu

    taken = paired({f"{length} x {dataset.rows // 10:,}": partial(merge, length) for length in LENGTHS}, rounds)
    (first, shortest), *_ = taken.items()
    for length, (case, seconds) in zip(LENGTHS, taken.items(), strict=True):
        factor = length / LENGTHS[0]
        ratios = [each / factor / one for each, one in zip(seconds, shortest, strict=True)]
        is_first = seconds is shortest
        yield Figure(
            MERGE,
            case,
            "time",
            "CPU s",
            Spread.of(seconds),
            rounds,
            "" if is_first else first,
            None if is_first else Spread.of(ratios),
            LINEAR if length == LENGTHS[-1] else None,
        )
