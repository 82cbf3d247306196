"""Blocks packed by kernels, against the same packed one by one in Python: the same file, byte for byte."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fastcrc import crc32
from hypothesis import given
from hypothesis import strategies as st

from formats import columns
from formats.jit import njit
from formats.kernels.addresses import address
from formats.kernels.crc32c import available, crc32c
from formats.sst import Compression, SstOptions, SstSummary, SstWriter, libraries
from tests.unit.formats_sst.tables import Row, batch

PACKED = [
    (Compression.NONE, 0),
    (Compression.LZ4, 0),
    (Compression.ZSTD, 0),
    (Compression.ZSTD, 3),
    (Compression.ZSTD, -5),
]
NOISE = np.random.default_rng(5).bytes(1 << 22)

values = st.binary(max_size=200) | st.binary(min_size=1, max_size=3).map(lambda data: data * 900)
tables = st.dictionaries(st.binary(max_size=40), values, min_size=1, max_size=80).map(lambda rows: sorted(rows.items()))


def written(rows: list[Row], options: SstOptions, batches: int = 1) -> tuple[bytes, SstSummary]:
    """The rows as a file, and what its writer says of it."""
    pieces: list[bytes] = []
    writer = SstWriter(pieces.append, options)
    step = -(-len(rows) // batches)
    for start in range(0, len(rows), step):
        writer.append(batch(rows[start : start + step]))
    summary = writer.finish()
    return b"".join(pieces), summary


def both_ways(rows: list[Row], options: SstOptions, batches: int = 1) -> tuple[tuple[bytes, SstSummary], ...]:
    """The file by kernels, and the one made block by block."""
    by_kernel = written(rows, options, batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("formats.kernels.crc32c.available", lambda: False)
        return by_kernel, written(rows, options, batches)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels know the checksum of x86 only")
def test_this_machine_packs_by_kernels() -> None:
    """Otherwise the tests here would compare Python with itself."""
    assert available()
    assert libraries.Zstd.open(1)
    assert libraries.lz4_compress()


@given(tables, st.sampled_from(PACKED), st.integers(2, 5), st.integers(1, 5))
def test_same_file(rows: list[Row], how: tuple[Compression, int], version: int, batches: int) -> None:
    """Whatever the rows, in each compression that kernels know."""
    options = SstOptions(*how, format_version=version, block_size=1024, restart_interval=3)
    by_kernel, one_by_one = both_ways(rows, options, batches)
    assert by_kernel == one_by_one


@pytest.mark.parametrize("how", PACKED)
def test_same_file_of_many_blocks(how: tuple[Compression, int]) -> None:
    """More blocks than one output or one round takes, noise that is skipped, and rows larger than all of that."""
    rows = [(b"a%06d" % row, NOISE[row : row + 150] if row % 900 < 500 else bytes(150)) for row in range(9000)]
    rows += [(b"b", NOISE[: 1 << 20]), (b"c", bytes(3 << 20)), (b"d", b""), (b"e", NOISE)]
    rows += [(b"f%06d" % row, b"value %d" % row) for row in range(3000)]
    by_kernel, one_by_one = both_ways(rows, SstOptions(*how, block_size=1024), 3)
    assert by_kernel == one_by_one
    assert by_kernel[1].data_blocks > 1200


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 65, 1000, 70_001])
def test_crc32c(size: int) -> None:
    """The instruction gives what an independent implementation does, at any alignment."""
    for start in range(3):
        data = NOISE[start : start + size]
        assert _crc32c(columns.from_bytes(NOISE), start, size) == crc32.iscsi(data)


@njit(cache=False)
def _crc32c(data: columns.Bytes, start: int, size: int) -> int:
    return int(crc32c(address(data) + start, size))


def test_without_cffi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zstd packs block by block where the library cannot be reached: into the same file."""
    rows = [(b"a%06d" % row, b"value %d" % row) for row in range(3000)]
    by_kernel = written(rows, SstOptions())
    libraries.zstd.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard._cffi", None)
    try:
        assert libraries.Zstd.open(1) is None
        assert written(rows, SstOptions()) == by_kernel
    finally:
        libraries.zstd.cache_clear()


def test_kernels_compile_without_the_instruction(tmp_path: Path) -> None:
    """For other processors too: LLVM would end the process."""
    script = "import numpy, formats.kernels.crc32c as k; assert not k.available(); print(k.crc32c(0, 0))"
    other = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **other}, check=True, timeout=120)
