from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.incremental.changes import Change, batch, changes
from tikv_br.errors import StorageError
from tikv_br.formats import columns
from tikv_br.incremental.sorter import Sorter

MIB = 1 << 20
MEASURED = pa.proxy_memory_pool(pa.default_memory_pool())
"""Counts what Arrow holds; never freed, for it must outlive every buffer."""

# One request may write a key twice, with one ts: the cluster keeps the last.
ROWS = st.builds(
    lambda ts, key, value: Change(ts, key, b"%d" % value + bytes(20), value, value == 3),
    st.integers(1, 12),
    st.sampled_from([b"", b"a", b"b", b"\xff"]),
    st.integers(0, 3),
)
STEPS = st.lists(st.one_of(st.lists(ROWS, max_size=8), st.integers(0, 4)), max_size=24)


class Model:
    """Simple model of a sorter."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, bytes], Change] = {}

    def add(self, rows: list[Change]) -> None:
        """Keep the last row of each ts and key."""
        self.held |= {(row.ts, row.key): row for row in rows}

    def take(self, ts: int) -> list[Change]:
        """Give the rows up to a ts by ts and key."""
        return [self.held.pop(key) for key in sorted(self.held) if key[0] <= ts]


def winners(batches: list[list[Change]], expected: list[Change]) -> None:
    """Fail unless the batches are the expected rows, cut where the ts changes, each without overwritten rows."""
    rest = list(expected)
    for rows in batches:
        assert rows, "an empty batch"
        count = sum(row.ts <= rows[-1].ts for row in rest)
        part, rest = rest[:count], rest[count:]
        assert rows == sorted({row.key: row for row in part}.values())
    assert not rest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS, memory=st.sampled_from([1, 10_000, 40_000, MIB]))
def test_gives_what_a_plain_model_gives(tmp_path: Path, steps: list[list[Change] | int], memory: int) -> None:
    """Whatever is added and taken in turn, with any memory, the rows, their order and the winners are the model's."""
    model, resolved = Model(), 0
    with Sorter(memory, tmp_path) as sorter:
        for step in [*steps, 99]:
            if isinstance(step, int):
                resolved += step
                winners([changes([rows]) for rows in sorter.take(resolved)], model.take(resolved))
            else:
                fresh = [row for row in step if row.ts > resolved]
                model.add(fresh)
                sorter.add(batch(fresh))
        assert sorter.late_rows == 0
        assert sorter.disk_bytes == 0
    assert not list(tmp_path.iterdir())


def test_a_late_row_is_given_out_and_counted(tmp_path: Path) -> None:
    """A row below what was taken is not lost, and is known of."""
    with Sorter(MIB, tmp_path) as sorter:
        assert changes(sorter.take(10)) == []
        sorter.add(batch([Change(9, b"k", b"v")]))
        assert changes(sorter.take(10)) == [Change(9, b"k", b"v")]
        assert sorter.late_rows == 1


def many(count: int, size: int, seed: int) -> Iterator[pa.RecordBatch]:
    """Batches of 1,000 rows of distinct keys, their timestamps in no order at all."""
    random = np.random.default_rng(seed)
    stamps = random.permutation(count).astype(np.uint64) + np.uint64(1)
    for first in range(0, count, 1000):
        ts = stamps[first : first + 1000]
        keys = columns.build(np.arange(len(ts) + 1, dtype=np.int64) * 8, ts.byteswap().view(np.uint8))
        data = random.integers(0, 256, len(ts) * size, np.uint8)
        values = columns.build(np.arange(len(ts) + 1, dtype=np.int64) * size, data)
        yield columns.records(keys, values, ts=ts)


def sort_many(folder: Path, memory: int, count: int) -> None:
    """Take as many rows as were added, in order; most of their bytes were on disk."""
    with Sorter(memory, folder) as sorter:
        for rows in many(count, 1000, seed=1):
            sorter.add(rows)
        assert sorter.disk_bytes > 0.8 * 1000 * count - memory
        next_ts = 1
        for taken in sorter.take(count):
            stamps = columns.numbers(taken["ts"])
            assert (stamps == np.arange(next_ts, next_ts + len(stamps))).all()
            next_ts += len(stamps)
        assert next_ts == count + 1


def measured_bytes(folder: Path, memory: int) -> int:
    """The most that Arrow and Python hold while twelve times as many bytes are sorted as a sorter may hold."""
    pa.set_memory_pool(MEASURED)
    sort_many(folder, memory, 4 * memory // 1000)  # loads and compiles what is needed
    tracemalloc.start()
    sort_many(folder, memory, 12 * memory // 1000)
    peak: int = MEASURED.max_memory() + tracemalloc.get_traced_memory()[1]
    return peak


@pytest.mark.slow
def test_survives_many_times_its_memory(tmp_path: Path) -> None:
    """Twelve times as many bytes as it may hold: at no moment does it hold more, and nothing is missing."""
    memory = 2 * MIB
    program = (  # alone in a process: threads that other tests have left would be counted
        "import os, sys, pathlib\n"
        "from tests.unit.incremental.test_sorter import measured_bytes\n"
        "print(measured_bytes(pathlib.Path(sys.argv[1]), int(sys.argv[2])), flush=True)\n"
        "os._exit(0)\n"  # or the pool is freed before its last buffer
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(memory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < memory + 5 * MIB  # a batch of ours, and the interpreter's own


def test_frees_the_disk_as_rows_are_taken(tmp_path: Path) -> None:
    """Runs that have been taken whole are closed."""
    with Sorter(MIB, tmp_path) as sorter:
        for first in range(1, 4000, 50):
            sorter.add(batch([Change(first + at, b"k%d" % at, bytes(1000)) for at in range(50)]))
        assert sorter.disk_bytes
        assert len(changes(sorter.take(4000))) == 4000
        assert sorter.disk_bytes == 0


def test_leaves_nothing_when_killed(tmp_path: Path) -> None:
    """After kill -9 with runs on disk, the directory is empty."""
    program = (
        "import sys, time, pathlib\n"
        "from tikv_br.incremental.sorter import Sorter\n"
        "from tests.unit.incremental.test_sorter import many\n"
        "sorter = Sorter(1 << 18, pathlib.Path(sys.argv[1]))\n"
        "[sorter.add(rows) for rows in many(5000, 200, 2)]\n"
        "print(sorter.disk_bytes, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        os.kill(process.pid, signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    """If runs cannot be written, the error names the directory."""
    with (
        Sorter(1, tmp_path / "gone") as sorter,
        pytest.raises(StorageError, match="gone"),
    ):
        sorter.add(batch([Change(1, b"k")]))
