"""The scan engine's task at 1, 4 and 16 times the data: its time and its memory, one after the other in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from bench.dataset import KEY_SIZE, Dataset
from bench.harness import Figure, Goal, Scale, Spread
from bench.replay import replaying

BENCH = "growth"
FACTORS = (1, 4, 16)
VALUE_SIZE = 1024
_PARTS = 8


def figures(scale: Scale) -> Iterator[Figure]:
    """CPU seconds and peak memory; the ratio of a time is that to what it would be in proportion."""
    least = max(scale.data_bytes // 2, 1 << 20)
    datasets = {factor: Dataset(factor * least // (VALUE_SIZE + KEY_SIZE), VALUE_SIZE) for factor in FACTORS}
    taken: dict[int, list[dict[str, float]]] = {factor: [] for factor in FACTORS}
    with replaying(datasets[FACTORS[-1]], regions=_PARTS * FACTORS[-1]) as address:
        for _ in range(scale.process_rounds):
            runs = _measured(address, [dataset.rows for dataset in datasets.values()])
            for factor, run in zip(FACTORS, runs, strict=True):
                taken[factor].append(run)
    for factor in FACTORS:
        yield _seconds(factor, taken, datasets[factor].user_bytes)
    for factor in FACTORS:
        peaks = [run["peak_mib"] for run in taken[factor]]
        yield Figure(
            BENCH, _case(factor, datasets[factor].user_bytes), "peak memory", "MiB", Spread.of(peaks), len(peaks)
        )


def _seconds(factor: int, taken: dict[int, list[dict[str, float]]], size: int) -> Figure:
    seconds = [run["cpu_seconds"] for run in taken[factor]]
    ratios = [
        run["cpu_seconds"] / factor / one["cpu_seconds"] for one, run in zip(taken[1], taken[factor], strict=True)
    ]
    largest = factor == FACTORS[-1]
    return Figure(
        BENCH,
        _case(factor, size),
        "time",
        "CPU s",
        Spread.of(seconds),
        len(seconds),
        compared_with="" if factor == 1 else _case(1, size // factor),
        ratio=None if factor == 1 else Spread.of(ratios),
        goal=Goal("ratio", at_most=1.1) if largest else None,
    )


def _case(factor: int, size: int) -> str:
    return f"{factor}x ({size / 1e6:.0f} MB)"


def _measured(address: str, counts: list[int]) -> list[dict[str, float]]:
    result = subprocess.run(
        [sys.executable, "-m", "bench.scan_once", address, *map(str, counts)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, float]] = json.loads(result.stdout)
    return found
