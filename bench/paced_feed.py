"""A source of a sync that never ends: ``python -m bench.paced_feed RATE ROWS VALUE_SIZE REGIONS``.

It tells the same rows over and over, `RATE` a second, each with the time at which it was due as its timestamp: whoever
does not keep up finds the rest late. Messages are serialized beforehand; only timestamps are written into them.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from bench.canned_pd import serving
from bench.dataset import Dataset
from bench.replay_feed import EVENT_ROWS, initialized, resolved, rows_delivered, serve_feed
from tikv_br.cluster.timestamps import LOGICAL_BITS

RESOLVED_SECONDS = 0.2
TS_BYTES = 9
"""Size of the varint of a timestamp: a number of 57 to 63 bits, as they are from 1978 on for a thousand years."""
_SHIFTS = np.arange(0, 7 * TS_BYTES, 7, dtype=np.uint64)
_ONES = sum(1 << int(shift) for shift in _SHIFTS)
"""A timestamp whose varint has another byte at each place than that of twice as much."""
_MORE = np.array([0x80] * (TS_BYTES - 1) + [0], dtype=np.uint8)


def paced(dataset: Dataset, regions: int, rate: float) -> AbstractContextManager[str]:
    """Start such a source; yields its address. `rate` is in rows a second; the rows are a multiple of `EVENT_ROWS`."""
    return serving("bench.paced_feed", rate, dataset.rows, dataset.value_size, regions)


def timestamps(due: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
    """Timestamps of times in seconds since 1970, as PD would give them, to the microsecond."""
    micros = (due * 1e6).astype(np.uint64)
    return (micros // 1000 << np.uint64(LOGICAL_BITS)) + micros % 1000 * np.uint64(256)


class Template:
    """A message whose timestamps are still to be written."""

    def __init__(self, one: bytes, other: bytes) -> None:
        """The message twice, with `_ONES` and with twice as much for each timestamp."""
        self._data = np.frombuffer(one, np.uint8).copy()
        self._places = np.flatnonzero(self._data != np.frombuffer(other, np.uint8)).reshape(-1, TS_BYTES)
        self.rows = len(self._places) // 2
        """Each has two timestamps."""

    def message(self, ts: npt.NDArray[np.uint64]) -> bytes:
        """The message with the timestamps of its events."""
        each = np.repeat(ts, 2 * EVENT_ROWS)[: len(self._places)]
        self._data[self._places] = (each[:, None] >> _SHIFTS & np.uint64(0x7F)).astype(np.uint8) | _MORE
        return self._data.tobytes()


def templates(dataset: Dataset, regions: int) -> list[Template]:
    """All rows of a dataset."""
    ones, others = (
        rows_delivered(dataset, regions, lambda _: _ONES),
        rows_delivered(dataset, regions, lambda _: 2 * _ONES),
    )
    pairs = zip(ones, others, strict=True)
    return [Template(one.SerializeToString(), other.SerializeToString()) for one, other in pairs]


def delivered(found: list[Template], regions: int, rate: float) -> Iterator[bytes]:
    """Messages for a subscriber, from now on without end."""
    yield initialized(regions)
    due = next_resolved = time.time()
    for template in itertools.cycle(found):
        ts = timestamps(due + np.arange(0, template.rows, EVENT_ROWS) / rate)
        due += template.rows / rate
        time.sleep(max(0.0, due - time.time()))
        yield template.message(ts)
        if due >= next_resolved:
            yield resolved(int(ts[-1]), regions)
            next_resolved = due + RESOLVED_SECONDS


def main(rate: float, rows: int, value_size: int, regions: int) -> None:
    """Serve."""
    dataset = Dataset(rows, value_size)
    found = templates(dataset, regions)
    serve_feed(dataset, regions, lambda: delivered(found, regions, rate))


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
