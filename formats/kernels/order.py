"""The order of keys, and which of them are equal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tikv_br.formats.columns import Bytes, Flags, Numbers, Offsets
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.memory import U64, WORD, get_u64

Signs = npt.NDArray[np.int8]


@njit
def compare_neighbours(offsets: Offsets, data: Bytes) -> Signs:
    """Return the sign of each key minus the key before it, shape (rows,); 1 for the first row."""
    rows = len(offsets) - 1
    signs = np.ones(rows, np.int8)
    for row in range(1, rows):
        before, start, stop = offsets[row - 1], offsets[row], offsets[row + 1]
        common = min(start - before, stop - start)
        index = 0
        while index < common and data[U64(before + index)] == data[U64(start + index)]:
            index += 1
        if index < common:
            signs[row] = 1 if data[start + index] > data[before + index] else -1
        else:
            signs[row] = np.sign((stop - start) - (start - before))
    return signs


_FACTOR = U64(0x9E37_79B9_7F4A_7C15)
_HALF = U64(32)


@njit(forceinline=True)
def _word(data: Bytes, at: int, stop: int) -> np.uint64:
    """Return up to 8 bytes from `at`, big endian, with zeros for what lies at `stop` and after."""
    if stop - at >= WORD:
        return get_u64(data, at)
    number = U64(0)
    for index in range(WORD):
        number = (number << U64(8)) | (U64(data[U64(at + index)]) if at + index < stop else U64(0))
    return number


@njit
def codes(offsets: Offsets, data: Bytes) -> Numbers:
    """Numbers that never sort otherwise than the keys do, shape (rows,): the 8 bytes behind what all have in common."""
    rows = len(offsets) - 1
    found = np.empty(rows, np.uint64)
    if not rows:
        return found
    first, common = offsets[0], offsets[1] - offsets[0]
    for row in range(1, rows):
        common = min(common, offsets[row + 1] - offsets[row])
        index = 0
        while index < common and data[U64(first + index)] == data[U64(offsets[row] + index)]:
            index += 1
        common = index
    for row in range(rows):
        found[row] = _word(data, offsets[row] + common, offsets[row + 1])
    return found


@njit(forceinline=True)
def _hash(data: Bytes, start: int, stop: int, seed: np.uint64) -> np.uint64:
    number = seed ^ U64(stop - start)
    for at in range(start, stop, WORD):
        number = (number ^ _word(data, at, stop)) * _FACTOR
        number ^= number >> _HALF
    return number


@njit(forceinline=True)
def _same(offsets: Offsets, data: Bytes, row: int, other: int) -> bool:
    start, since, size = offsets[row], offsets[other], offsets[row + 1] - offsets[row]
    if size != offsets[other + 1] - since:
        return False
    for index in range(size):  # noqa: SIM110 - numba has no generators in `all`
        if data[U64(start + index)] != data[U64(since + index)]:
            return False
    return True


@njit
def last_of_keys(offsets: Offsets, data: Bytes, seed: np.uint64) -> Flags:
    """Return whether each row is the last of its key, shape (rows,).

    `seed` makes the order of the hash table unpredictable.
    """
    rows = len(offsets) - 1
    size = 2
    while size < 2 * rows:
        size *= 2
    table, hashes = np.full(size, -1, np.int64), np.empty(rows, np.uint64)
    last = np.ones(rows, np.bool_)
    for row in range(rows - 1, -1, -1):
        hashes[row] = _hash(data, offsets[row], offsets[row + 1], seed)
        slot = np.int64(hashes[row] & U64(size - 1))
        while table[slot] >= 0:
            other = table[slot]
            if hashes[other] == hashes[row] and _same(offsets, data, row, other):
                last[row] = False
                break
            slot = (slot + 1) & (size - 1)
        if last[row]:
            table[slot] = row
    return last
