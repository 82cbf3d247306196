"""Many seeds, one after the other, and their sums: ``scripts/campaign.py storage|cluster --seeds A..B``."""

from __future__ import annotations

import argparse
import importlib
import json
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tikv_br
from bench.machine import Load, machine
from tests.trust.commands import Tally

KINDS = ("storage", "cluster")
"""Modules ``<kind>_seeds`` with ``clusters()`` and ``run_seed(clusters, seed)``, which raises for what must not be."""
REPORT_EVERY = 25
"""Seeds between two lines on how it goes."""


@dataclass(slots=True)
class Totals:
    """Totals of all seeds so far."""

    seeds: int = 0
    without_rerun: int = 0
    """Seeds whose commands all succeeded at once."""
    operations: int = 0
    commands: Counter[str] = field(default_factory=Counter)
    reruns: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)
    """Faults by seed: differences, and codes that no command may end with."""

    def add(self, tally: Tally) -> None:
        """Book a seed that ended well."""
        self.seeds += 1
        self.without_rerun += not tally.reruns
        self.operations += tally.operations
        self.commands += tally.commands
        self.reruns += tally.reruns
        self.faults += tally.faults

    def to_json(self) -> dict[str, Any]:
        """As printed."""
        counted = {name: dict(sorted(getattr(self, name).items())) for name in ("commands", "reruns", "faults")}
        return {
            "seeds": self.seeds,
            "without_rerun": self.without_rerun,
            "operations": self.operations,
            **counted,
            "failed": self.failed,
        }


def run_seeds(kind: str, seeds: range) -> Totals:
    """Run them on one set of clusters; after a seed that fails, on a new one."""
    module, totals, left = importlib.import_module(f"tests.trust.{kind}_seeds"), Totals(), list(seeds)
    while left:
        with module.clusters() as clusters:
            while left:
                seed = left.pop(0)
                try:
                    totals.add(module.run_seed(clusters, seed))
                except Exception as error:  # noqa: BLE001 - whatever it is, the seed has failed
                    totals.failed[seed] = f"{type(error).__name__}: {error}"[:2000]
                    print(f"seed {seed} FAILED: {''.join(traceback.format_exception(error))}", flush=True)
                    break
                if totals.seeds % REPORT_EVERY == 0:
                    print(f"{time.strftime('%H:%M:%S')} seed {seed}: {json.dumps(totals.to_json())}", flush=True)
    return totals


def main() -> int:
    """Read the options, run, and print the sums as JSON; 1 when a seed has failed."""
    parser = argparse.ArgumentParser(prog="campaign.py", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seeds", required=True, metavar="A..B", help="first and last; one number for a single seed")
    parser.add_argument("--json", type=Path, help="write the sums there, too")
    chosen = parser.parse_args()
    first, _, last = chosen.seeds.partition("..")
    load, started = Load(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    totals = run_seeds(chosen.kind, range(int(first), int(last or first) + 1))
    outcome = {
        "campaign": chosen.kind,
        "asked": chosen.seeds,
        "version": tikv_br.__version__,
        "started": started,
        "machine": machine(),
        "load": load.until_now(),
        **totals.to_json(),
    }
    text = json.dumps(outcome)
    print(text, flush=True)
    if chosen.json:
        chosen.json.write_text(f"{text}\n")
    return 1 if totals.failed else 0
