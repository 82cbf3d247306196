"""The scan engine's task over more and more rows, in a fresh process: ``python -m bench.scan_once ADDRESS ROWS...``.

Prints as JSON what each took. A small task before them loads what a worker loads once.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from bench.dataset import Dataset
from bench.scan_to_sst import MEMORY, scan_task
from tests.support.peak_memory import peak_mib
from tikv_br.formats.sst.compression import Compression

WARM_UP_ROWS = 2_000


def main(address: str, counts: list[int]) -> None:
    """Measure the first rows of a server, as many as each of the counts says."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        _scan(address, folder, WARM_UP_ROWS)
        print(json.dumps([_measured(address, folder, count) for count in counts]))


def _measured(address: str, folder: str, rows: int) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak to the current memory
    began = time.process_time()
    _scan(address, folder, rows)
    return {"cpu_seconds": time.process_time() - began, "peak_mib": peak_mib()}


def _scan(address: str, folder: str, rows: int) -> None:
    scan_task(address, f"{folder}/{rows}", Compression.ZSTD, Dataset(rows, 1).key(rows))


if __name__ == "__main__":
    main(sys.argv[1], [int(count) for count in sys.argv[2:]])
