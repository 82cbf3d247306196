"""Backup and restore through stores on a playground: what the commands take beyond the time in which stores were at work.

The playground's stores are slower than real ones, and share the processors with the command; what is left when their
time is taken off does not depend on that.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.command import TOO_LONG, timed
from bench.harness import Figure, Scale, Spread
from tests.e2e.command import succeed
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

BENCH = "store engine"
VALUE_SIZE, REGIONS, STORES = 100, 12, 3


def figures(scale: Scale) -> Iterator[Figure]:
    """Seconds of wall time of both commands: all of it, the stores', and the rest."""
    taken: dict[str, list[tuple[float, float]]] = {"backup": [], "restore": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        source = stack.enter_context(live_cluster(folder / "source", ApiVersion.V1, stores=STORES))
        fill(source, scale.store_rows)
        target = stack.enter_context(live_cluster(folder / "target", ApiVersion.V2, stores=STORES))
        for number in range(scale.process_rounds):
            place = f"local://{folder}/backup-{number}"
            backup = ("backup", "raw", "-u", source.pd, "-s", place, "--dst-api-version", "v2", "--engine", "store")
            taken["backup"].append(_timed(source, *backup))
            taken["restore"].append(_timed(target, "restore", "raw", "-u", target.pd, "-s", place))
            target.raw().delete_range(EVERY_KEY)
            shutil.rmtree(folder / f"backup-{number}")
    for command, runs in taken.items():
        yield from _figures(f"{command}, {scale.store_rows:,} rows", runs)


def _figures(case: str, runs: list[tuple[float, float]]) -> Iterator[Figure]:
    parts: dict[str, Callable[[float, float], float]] = {
        "whole command": lambda wall, _: wall,
        "stores at work": lambda _, busy: busy,
        "the command's own": lambda wall, busy: wall - busy,
    }
    for subject, part in parts.items():
        yield Figure(BENCH, case, subject, "s", Spread.of([part(*run) for run in runs]), len(runs))


def fill(source: LiveCluster, rows: int) -> None:
    """Load as many rows of `VALUE_SIZE`, into regions that all stores lead."""
    codec, keys = source.raw().codec, [b"key-%012d" % (rows * part // REGIONS) for part in range(1, REGIONS)]
    source.split(*(codec.bound(codec.rpc_key(key)) for key in keys))
    source.run("scatter")
    succeed("raw", "import", "--pd", source.pd, "--count", str(rows), "--value-size", str(VALUE_SIZE), timeout=TOO_LONG)


def _timed(cluster: LiveCluster, *arguments: str) -> tuple[float, float]:
    """Seconds of a command, and of them those in which some store had a call under way."""
    cluster.forget_calls()
    return timed(*arguments).wall, float(cluster.calls()["busy_seconds"])
