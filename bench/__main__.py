"""Run the benches: ``python -m bench [--quick | --tiny] [--data KIND] [--only NAME] [--json FILE]``; see docs/benchmarks.md."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import tikv_br
from bench.dataset import KINDS
from bench.harness import FULL, QUICK, TINY, Figure, Scale
from bench.machine import Load, machine

SCHEMA_VERSION = 1
BENCHES = (
    "scan_to_sst",
    "sst_files",
    "codecs",
    "scan_far",
    "growth",
    "planning",
    "commands",
    "orchestration",
    "spark_tasks",
    "sync_ceiling",
    "sync_growth",
    "sync_lag",
    "point_in_time",
    "log_rpo",
    "load_raw",
)
"""Modules with a function ``figures(scale)``, in the order of their table."""
NOT_QUICK = {"scan_far", "commands", "spark_tasks", "sync_growth", "point_in_time", "log_rpo", "load_raw"}
"""Left out of ``--quick`` unless asked for: without rivals, or as `orchestration` and `sync_ceiling`, and slow."""


def main() -> int:
    """Run, print and write."""
    arguments = _parser().parse_args()
    wanted: Scale = arguments.scale
    scale = replace(wanted, data=arguments.data)
    load, started = Load(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    found: list[Figure] = []
    seconds: dict[str, float] = {}
    print(_line("bench", "case", "subject", "median", "low to high", "", "ratio", "low to high", "goal"))
    for name in arguments.only or benches_of(scale):
        began = time.monotonic()
        for figure in _figures(name, scale):
            found.append(figure)
            print(row(figure), flush=True)
        seconds[name] = round(time.monotonic() - began, 1)
    document = {
        "schema": SCHEMA_VERSION,
        "version": tikv_br.__version__,
        "scale": scale.name,
        "data": scale.data,
        "started": started,
        "machine": machine(),
        "load": load.until_now() | {"seconds_of": seconds},
        "figures": [figure.to_json() for figure in found],
    }
    print(_about(document))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def benches_of(scale: Scale) -> list[str]:
    """Those that run when none is named."""
    return [name for name in BENCHES if scale.name != QUICK.name or name not in NOT_QUICK]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description="Measure tikv-br beside others; see docs/benchmarks.md.")
    parser.add_argument(
        "--quick",
        dest="scale",
        action="store_const",
        const=QUICK,
        default=FULL,
        help="with less data, in a minute",
    )
    parser.add_argument(
        "--tiny", dest="scale", action="store_const", const=TINY, help="only to see that all of it runs"
    )
    parser.add_argument("--data", default=KINDS[0], choices=KINDS, help="what values are like, in scans and SSTs")
    parser.add_argument("--only", action="append", choices=BENCHES, help="this bench only; may be repeated")
    parser.add_argument("--json", help="write the figures there")
    return parser


def _figures(name: str, scale: Scale) -> Iterator[Figure]:
    figures: Iterator[Figure] = importlib.import_module(f"bench.{name}").figures(scale)
    return figures


def row(figure: Figure) -> str:
    """A line of the table."""
    value, ratio = figure.value, figure.ratio
    goal = "" if figure.goal is None else f"{figure.goal} {'reached' if figure.reached else 'MISSED'}"
    return _line(
        figure.bench,
        figure.case,
        figure.subject,
        _number(value.median),
        f"{_number(value.low)} to {_number(value.high)}",
        figure.unit,
        f"{ratio.median:.2f}x" if ratio else "",
        f"{ratio.low:.2f} to {ratio.high:.2f}" if ratio else "",
        goal,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _line(*cells: str) -> str:
    widths = (17, 26, 30, 8, 16, 14, 8, 15, 0)
    right = {3, 4, 6, 7}
    return " ".join(
        f"{cell:>{width}}" if at in right else f"{cell:<{width}}"
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def _about(document: dict[str, Any]) -> str:
    about, load = document["machine"], document["load"]
    before, after = load["load_before"][0], load["load_after"][0]
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in load["seconds_of"].items())
    return (
        f"{about['cores']} cores of {about['processor']}, {about['memory_mib']:,} MiB, {about['system']}, "
        f"Python {about['python']}\n{load['seconds']:.0f} s ({parts}); load average {before:.1f} before, {after:.1f} after; "
        f"processors busy {load['busy_share']:.0%}, stolen {load['stolen_share']:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
