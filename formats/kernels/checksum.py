"""The XOR of rows, aligned at their ends: the one message whose CRC `formats.checksum` takes."""

from __future__ import annotations

import numpy as np

from formats.columns import Bytes, Offsets
from formats.jit import njit
from formats.kernels.memory import xor


@njit
def longest_row(key_offsets: Offsets, value_offsets: Offsets) -> int:
    """Bytes of the longest key and value together."""
    longest = 0
    for row in range(len(key_offsets) - 1):
        size = key_offsets[row + 1] - key_offsets[row] + value_offsets[row + 1] - value_offsets[row]
        longest = max(longest, size)
    return longest


@njit
def fold_rows(key_offsets: Offsets, keys: Bytes, value_offsets: Offsets, values: Bytes, head: Bytes) -> Bytes:
    """The XOR of head ‖ key ‖ value over all rows, each right-aligned in a buffer that the longest one fills.

    The head is added once for each size that an odd number of rows has: all others cancel out.
    """
    longest = longest_row(key_offsets, value_offsets)
    folded = np.zeros(len(head) + longest, np.uint8)
    odd = np.zeros(longest + 1, np.bool_)
    for row in range(len(key_offsets) - 1):
        key, value = key_offsets[row], value_offsets[row]
        key_size, value_size = key_offsets[row + 1] - key, value_offsets[row + 1] - value
        at = len(folded) - key_size - value_size
        xor(folded, at, keys, key, key_size)
        xor(folded, at + key_size, values, value, value_size)
        odd[key_size + value_size] ^= True
    for size in range(longest + 1):
        if odd[size]:
            xor(folded, longest - size, head, 0, len(head))
    return folded
