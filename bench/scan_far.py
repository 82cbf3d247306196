"""A scan of a store that is far away, by the clock: in as many lanes as pages are waited for, and in one."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.dataset import KEY_SIZE, Dataset
from bench.harness import Figure, Scale, Work, rates
from bench.replay import replaying
from bench.scan_to_sst import into_folder, scan_task
from tikv_br.backup import scan as scan_engine
from tikv_br.formats.sst.compression import Compression

VALUE_SIZE = 1024
DELAYS = (0.0, 0.02)
"""Seconds that each answer takes longer."""
_REGIONS = 16
_TIMES = 12
"""The data of other benches: a task is parted only after `scan_lane.PROBE_BYTES`."""


def figures(scale: Scale) -> Iterator[Figure]:
    """MB/s by the clock, of one task."""
    dataset = Dataset(_TIMES * scale.data_bytes // (VALUE_SIZE + KEY_SIZE), VALUE_SIZE, scale.data)
    for delay in DELAYS:
        with replaying(dataset, _REGIONS, delay) as address:
            subjects: dict[str, Work] = {
                "tikv-br": _seconds(address, scan_engine.MAX_PARALLEL_SCANS),
                "tikv-br, one lane": _seconds(address, 1),
            }
            case, megabytes = f"{1000 * delay:g} ms away", dataset.user_bytes / 1e6
            yield from rates("scan from afar", case, megabytes, "MB/s", subjects, scale.process_rounds)


def _seconds(address: str, most_lanes: int) -> Work:
    def scan(folder: str) -> float:
        before, scan_engine.MAX_PARALLEL_SCANS = scan_engine.MAX_PARALLEL_SCANS, most_lanes
        began = time.perf_counter()
        try:
            scan_task(address, folder, Compression.ZSTD)
        finally:
            scan_engine.MAX_PARALLEL_SCANS = before
        return time.perf_counter() - began

    return into_folder(scan)
