"""One process of a run: ``python -m tests.fuzzing.child TARGET FOLDER INPUTS SEED`` prints how the inputs ended, as JSON.

Its inputs are those in the folder, damaged; the one under way is in the folder's file ``current``.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path

import pyarrow as pa

from tests.fuzzing import messages, tables, write_records
from tests.fuzzing.target import MEMORY, Target, limit_memory, outcomes

TARGETS: dict[str, Target] = {
    "sst": tables.SST,
    "page": messages.PAGE,
    "cdc": messages.CDC,
    "write": write_records.RECORDS,
}


def main(name: str, folder: str, inputs: int, seed: int) -> None:
    """Run."""
    target = TARGETS[name]
    originals = [path.read_bytes() for path in sorted(Path(folder).glob("*.input"))]
    with Path(folder, "current").open("wb", buffering=0) as file:

        def note(data: bytes) -> None:
            os.pwrite(file.fileno(), data, 0)
            file.truncate(len(data))

        pa.allocate_buffer(1 << 20)  # Arrow's allocator takes a gigabyte of addresses at once
        list(outcomes(target, originals, seed - 1, 100))  # what is loaded and compiled once is not their memory
        limit_memory(MEMORY)
        tally = collections.Counter(outcomes(target, originals, seed, inputs, note))
    sys.stdout.write(json.dumps(tally) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
