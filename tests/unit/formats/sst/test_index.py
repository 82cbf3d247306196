"""Separators and indexes. RocksDB reads our indexes in test_writer; we read its in test_reader."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats import jit
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.sst.block import BlockReader, ChecksumType, Footer, encode_entries
from tikv_br.formats.sst.coding import BlockHandle
from tikv_br.formats.sst.encode import put_separator
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import (
    INDEX_KEYS_ARE_USER_KEYS,
    INDEX_TYPE,
    INDEX_VALUES_ARE_DELTAS,
    SstIndex,
    read_index,
)

PLAIN = {INDEX_KEYS_ARE_USER_KEYS: b"\x01"}
by_numba = pytest.mark.skipif(jit.EXTENSION is not None, reason="the extension has only what Python calls: see below")
similar_keys = st.text("\x00\x01\x7f\xfe\xff", max_size=6).map(lambda text: text.encode("latin-1"))


def shortest_separator(last: bytes, following: bytes) -> bytes:
    """The kernel's separator of two keys, without the suffix that makes it an internal key."""
    ours, theirs = (np.frombuffer(key + bytes(1), np.uint8) for key in (last, following))
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(last, following, strict=False)))
    out = np.full(len(last) + 24, 0xEE, np.uint8)
    begin = address(out)
    end = put_separator(begin, address(ours), len(last), address(theirs), len(following), shared) - begin
    assert out[end:].tolist() == [0xEE] * (len(out) - end)
    separator, trailer = out[: end - 8].tobytes(), out[end - 8 : end].tobytes()
    assert trailer == (b"\1" + bytes(7) if separator == last else b"\x11" + b"\xff" * 7)
    return separator


def address(array: npt.NDArray[np.uint8]) -> int:
    """Address of an array's data."""
    return int(array.ctypes.data)


@by_numba
@given(similar_keys | st.binary(max_size=20), similar_keys | st.binary(max_size=20))
def test_shortest_separator(one: bytes, other: bytes) -> None:
    """A separator lies at or after one key and before the next, and is never longer than the first."""
    last, following = sorted((one, other))
    if last != following:
        separator = shortest_separator(last, following)
        assert last <= separator < following
        assert len(separator) <= len(last)


@by_numba
def test_separators_are_short() -> None:
    """Keys that differ early have short separators."""
    assert shortest_separator(b"zuser000123", b"zuser100000") == b"zuser1"
    assert shortest_separator(b"zabcdef", b"zabf") == b"zabd"
    assert shortest_separator(b"za\xff\xff\x01", b"zb") == b"za\xff\xff\x02"
    assert shortest_separator(b"za", b"za\0") == b"za"
    assert shortest_separator(b"za", b"") == b"za"


@pytest.mark.skipif(jit.EXTENSION is None, reason="they ran")
def test_separators_by_numba() -> None:
    """The tests above, in a process whose setting turns the extension off."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "separator and not numba",
        __file__,
    ]
    done = subprocess.run(command, env={**os.environ, "NUMBA_OPT": "3"}, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout


def read_back(block: bytes, properties: dict[str, bytes], *, before: int = 1000) -> SstIndex:
    """The index in this block of a file, after so many bytes of data."""
    handle = BlockHandle(before, len(block))
    footer = Footer(2, ChecksumType.NONE, handle, handle)
    source = MemorySource(bytes(before) + block + bytes(5))
    return read_index(BlockReader(source, footer), handle, properties)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(b"b", BlockHandle(0, 10)), (b"a", BlockHandle(15, 10))], "do not ascend"),
        ([(b"a", BlockHandle(0, 10)), (b"b", BlockHandle(14, 10))], "starts before the last one ends"),
        ([(b"a", BlockHandle(0, 996))], "beyond 1000"),
        ([(b"a", BlockHandle(2**63, 2**63))], "beyond 1000"),
    ],
)
def test_damaged(entries: list[tuple[bytes, BlockHandle]], message: str) -> None:
    """Keys out of order, blocks that overlap and blocks that reach into the index are damage."""
    with pytest.raises(DamagedBytes, match=message):
        read_back(encode_entries((key, handle.encode()) for key, handle in entries), PLAIN)


def test_short_keys() -> None:
    """Keys that lack the eight bytes of an internal key are damage where the properties promise them."""
    with pytest.raises(DamagedBytes, match="sequence number"):
        read_back(encode_entries([(b"a", BlockHandle(0, 1).encode())]), {})


def test_first_keys() -> None:
    """An index whose entries carry the first key of each block is read past them, with and without deltas."""
    first_key = b"\x09first key"
    kind = {INDEX_TYPE: b"\x03\0\0\0"}
    handle = BlockHandle(0, 10)
    block = encode_entries([(b"a", handle.encode() + first_key)])
    assert read_back(block, PLAIN | kind).handles == [handle]
    deltas = b"\0\x01a" + handle.encode() + first_key + b"\x01\x01b" + b"\x04" + first_key
    block = deltas + bytes(4) + b"\x01\0\0\0"
    index = read_back(block, PLAIN | kind | {INDEX_VALUES_ARE_DELTAS: b"\x01"})
    assert index == SstIndex([b"a", b"ab"], [handle, BlockHandle(15, 12)])
