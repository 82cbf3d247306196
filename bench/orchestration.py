"""Backup and restore through stores that take the time of 10 GiB: what the commands add to it.

A playground of three stores with 107 regions, each of which counts as 96 MiB: PD says so, and every store backs up and
downloads at `STORE_SPEED`, all its calls together. Splits, scatters, requests, files and checksums are as many as of 10 GiB;
only the bytes of each file are few. Smaller scales have faster stores: their share is that of the same own time in the
time that stores of `STORE_SPEED` would take.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.command import timed
from bench.harness import Figure, Goal, Scale, Spread
from bench.playgrounds import together
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

BENCH = "orchestration"
MIB = 1 << 20
REGION_BYTES = 96 * MIB
STORE_SPEED = 150_000_000
"""Bytes a second, as of a store on a disk of the middle class, or on S3."""
ROWS, VALUE_SIZE, KEY_SIZE = 20, 100, 16
"""Size of each region."""
WEIGHT = REGION_BYTES // (ROWS * (VALUE_SIZE + KEY_SIZE))
MOST = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """Cost of one command."""

    wall: float
    cpu: float
    busy: float
    """Seconds in which some store had a call under way."""
    least: float
    """Seconds that the busiest store's work takes at its speed."""


def figures(scale: Scale) -> Iterator[Figure]:
    """Seconds of both commands, of the stores, and the rest, as a share of the stores' time at `STORE_SPEED`."""
    taken: dict[str, list[Run]] = {"backup": [], "restore": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        pace = {"data_weight": WEIGHT, "store_speed": STORE_SPEED * scale.store_haste, "stores": 3}
        clusters = (live_cluster(folder / end, ApiVersion.V1, **pace) for end in ("source", "target"))
        source, target = stack.enter_context(together(*clusters))
        _fill(source, scale.store_regions)
        for number in range(scale.process_rounds):
            place = f"local://{folder}/backup-{number}"
            backup = ("backup", "raw", "-u", source.pd, "-s", place, "--engine", "store")
            taken["backup"].append(_run(source, *backup))
            restore = ("restore", "raw", "-u", target.pd, "-s", place, "--region-size", str(REGION_BYTES // WEIGHT))
            taken["restore"].append(_run(target, *restore))
            if number + 1 < scale.process_rounds:
                _clear(target)
            shutil.rmtree(folder / f"backup-{number}")
    for command, runs in taken.items():
        size = scale.store_regions * REGION_BYTES / (1 << 30)
        haste = f", time ÷ {scale.store_haste}" if scale.store_haste > 1 else ""
        yield from _figures(f"{command}, {size:.1f} GiB{haste}", runs, scale)


def _figures(case: str, runs: list[Run], scale: Scale) -> Iterator[Figure]:
    parts = {
        "whole command": [run.wall for run in runs],
        "stores at work": [run.busy for run in runs],
        "least that stores need": [run.least for run in runs],
        "the command's own": [run.wall - run.busy for run in runs],
        "its processor time": [run.cpu for run in runs],
    }
    for subject, seconds in parts.items():
        yield Figure(BENCH, case, subject, "s", Spread.of(seconds), len(runs))
    more = scale.store_haste - 1
    shares = [(run.wall - run.busy) / (run.busy + run.least * more) for run in runs]
    goal = Goal("value", at_most=MOST) if scale.store_regions * REGION_BYTES >= 10 * 1000 * MIB else None
    yield Figure(BENCH, case, "own share", "of the stores'", Spread.of(shares), len(runs), goal=goal)


def _fill(source: LiveCluster, regions: int) -> None:
    keys = [b"key-%012d" % number for number in range(regions * ROWS)]
    raw = source.raw()
    source.split(*(raw.codec.bound(key) for key in keys[ROWS::ROWS]))
    source.run("scatter")
    raw.batch_put(dict.fromkeys(keys, b"v" * VALUE_SIZE))


def _clear(target: LiveCluster) -> None:
    """Leave the target as it was: empty, and one region."""
    target.raw().delete_range(EVERY_KEY)
    regions = target.regions()
    for region in regions[1:]:
        target.run("merge", source=region["id"], target=regions[0]["id"])


def _run(cluster: LiveCluster, *arguments: str) -> Run:
    cluster.forget_calls()
    took = timed(*arguments)
    calls = cluster.calls()
    return Run(took.wall, took.cpu, float(calls["busy_seconds"]), float(calls["least_seconds"]))
