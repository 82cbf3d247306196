"""The fuzzer in processes of their own, so that one which dies or hangs is noticed and what it read is kept."""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzzing.child import TARGETS
from tests.support.tools import ROOT

BATCH = 20_000
"""Inputs of one process."""
SECONDS_AT_LEAST, SECONDS_PER_INPUT = 120, 0.1
"""A process that takes longer hangs: on an idle core an input takes half a millisecond."""


@dataclass(frozen=True, slots=True)
class Died:
    """How a process ended that should not have."""

    reason: str
    error: str
    """The end of what it said."""


def run(command: Sequence[str], timeout: float) -> Counter[str] | Died:
    """The tally that a process prints, or how it died."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return Died(f"did not end within {timeout:.0f} s", "")
    if done.returncode < 0:
        return Died(f"killed by {signal.Signals(-done.returncode).name}", done.stderr[-2000:])
    if done.returncode:
        return Died(f"exit code {done.returncode}", done.stderr[-2000:])
    return Counter(json.loads(done.stdout))


def collect(name: str, folder: Path, golden: Path | None) -> int:
    """Write the inputs to damage into a folder; how many: our own and, where they are, real servers'."""
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as made:
        found = target.sound(Path(made))
    if golden is not None:
        found += target.recorded(golden)
    for number, data in enumerate(found):
        (folder / f"{number:04}.input").write_bytes(data)
    return len(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz; 0 = nothing but errors of ours came out of any input."""
    asked = _parser().parse_args(arguments)
    tally: Counter[str] = collections.Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = collect(asked.target, folder, asked.golden)
        for number, start in enumerate(range(0, asked.inputs, BATCH)):
            inputs, seed = min(BATCH, asked.inputs - start), asked.seed + number
            module = [sys.executable, "-m", "tests.fuzzing.child", asked.target, name, str(inputs), str(seed)]
            ended = run(module, SECONDS_AT_LEAST + inputs * SECONDS_PER_INPUT)
            if isinstance(ended, Died):
                kept = shutil.copy(folder / "current", asked.keep / f"fuzz-{seed}.{asked.target}")
                sys.stdout.write(f"seed {seed}: {ended.reason}; the input is {kept}\n{ended.error}")
                return 1
            tally += ended
            seconds = time.monotonic() - began
            sys.stdout.write(
                f"{tally.total()} inputs of {count} {asked.target}, seeds {asked.seed} to {seed}, {seconds:.0f} s: {dict(tally)}\n"
            )
            sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Damage SSTs or servers' messages and read them; any end but one of our errors is a failure."
    )
    parser.add_argument(
        "--target", choices=TARGETS, default="sst", help="SSTs, pages of RawScan, change events, or write records"
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="how many damaged ones")
    parser.add_argument("--seed", type=int, default=0, help=f"of the first {BATCH:,}; the next have the next seeds")
    parser.add_argument("--golden", type=Path, help="also damage what real servers sent and wrote, below this folder")
    parser.add_argument("--keep", type=Path, default=Path.cwd(), help="where an input goes that killed its reader")
    return parser
