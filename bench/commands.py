"""Whole commands on a playground: what they take beyond the time in which stores were at work, by wall and by processor time.

The playground's stores are slower than real ones, and share the processors with the command; what is left when their
time is taken off does not depend on that. With the path of another work tree in `BEFORE`, its commands run by turns with these.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.command import TOO_LONG, timed
from bench.harness import Figure, Scale, Spread, paired
from tests.e2e.command import succeed
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

BENCH = "commands"
BEFORE = "TIKV_BR_BENCH_BEFORE"
VALUE_SIZE, REGIONS, STORES = 100, 12, 3


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of one command; `busy` are those in which some store had a call under way."""

    wall: float
    cpu: float
    busy: float


PARTS: dict[str, Callable[[Run], float]] = {
    "whole command": lambda run: run.wall,
    "stores at work": lambda run: run.busy,
    "the command's own": lambda run: run.wall - run.busy,
    "its processor time": lambda run: run.cpu,
}


def figures(scale: Scale) -> Iterator[Figure]:
    """Seconds of each command: all of it, the stores', the rest, and processor time."""
    trees = {"": "", **({"before: ": os.environ[BEFORE]} if os.environ.get(BEFORE) else {})}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        place = Path(name, "backup")
        source = stack.enter_context(live_cluster(Path(name, "source"), ApiVersion.V1, stores=STORES))
        fill(source, scale.store_rows)
        target = stack.enter_context(live_cluster(Path(name, "target"), ApiVersion.V2, stores=STORES))
        backup = ("backup", "raw", "-u", source.pd, "-s", f"local://{place}", "--dst-api-version", "v2", "--engine")
        key = f"key-{0:012d}"

        def run(cluster: LiveCluster, arguments: tuple[str, ...], tree: str) -> Run:
            if arguments[0] == "backup":
                shutil.rmtree(place, ignore_errors=True)
            elif arguments[0] == "restore":
                target.raw().delete_range(EVERY_KEY)
            cluster.forget_calls()
            took = timed(*arguments, tree=tree)
            return Run(took.wall, took.cpu, float(cluster.calls()["busy_seconds"]))

        commands = {
            "raw get": (source, ("raw", "get", "-u", source.pd, key)),
            "backup, scan": (source, (*backup, "scan")),
            "backup, store": (source, (*backup, "store")),  # last: the next one restores it
            "restore": (target, ("restore", "raw", "-u", target.pd, "-s", f"local://{place}")),
        }
        for command, (cluster, arguments) in commands.items():
            subjects = {label: partial(run, cluster, arguments, tree) for label, tree in trees.items()}
            case = f"{command}, {scale.store_rows:,} rows"
            for label, runs in paired(subjects, scale.process_rounds).items():
                for part, of in PARTS.items():
                    yield Figure(
                        BENCH, case, label + part, "s", Spread.of([max(of(each), 1e-6) for each in runs]), len(runs)
                    )


def fill(source: LiveCluster, rows: int) -> None:
    """Load as many rows of `VALUE_SIZE`, into regions that all stores lead."""
    codec, keys = source.raw().codec, [b"key-%012d" % (rows * part // REGIONS) for part in range(1, REGIONS)]
    source.split(*(codec.bound(codec.rpc_key(key)) for key in keys))
    source.run("scatter")
    succeed("raw", "import", "--pd", source.pd, "--count", str(rows), "--value-size", str(VALUE_SIZE), timeout=TOO_LONG)
