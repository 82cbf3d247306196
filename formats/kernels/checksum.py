"""The XOR of rows, aligned at their ends: the one message whose CRC `tikv_br.formats.checksum` takes."""

from __future__ import annotations

import numpy as np

from tikv_br.formats.columns import Bytes, Flags, Offsets
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.memory import copy, xor


@njit
def longest_row(key_offsets: Offsets, value_offsets: Offsets) -> int:
    """Bytes of the longest key and value together."""
    longest = 0
    for row in range(len(key_offsets) - 1):
        size = key_offsets[row + 1] - key_offsets[row] + value_offsets[row + 1] - value_offsets[row]
        longest = max(longest, size)
    return longest


@njit
def fold_rows(key_offsets: Offsets, keys: Bytes, value_offsets: Offsets, values: Bytes) -> tuple[Bytes, Flags]:
    """The XOR of key ‖ value over all rows, each right-aligned in a buffer that the longest one fills.

    Also for each size, up to the longest, whether an odd number of rows has it.
    """
    longest = longest_row(key_offsets, value_offsets)
    folded = np.zeros(longest, np.uint8)
    odd = np.zeros(longest + 1, np.bool_)
    for row in range(len(key_offsets) - 1):
        key, value = key_offsets[row], value_offsets[row]
        key_size, value_size = key_offsets[row + 1] - key, value_offsets[row + 1] - value
        at = longest - key_size - value_size
        xor(folded, at, keys, key, key_size)
        xor(folded, at + key_size, values, value, value_size)
        odd[key_size + value_size] ^= True
    return folded, odd


@njit
def lead_rows(folded: Bytes, odd: Flags, head: Bytes) -> Bytes:
    """Return the result of `fold_rows` for the same rows with `head` in front of every key.

    The head is added once for each size that an odd number of rows has: all others cancel out.
    """
    out = np.zeros(len(head) + len(folded), np.uint8)
    copy(out, len(head), folded, 0, len(folded))
    for size in range(len(odd)):
        if odd[size]:
            xor(out, len(folded) - size, head, 0, len(head))
    return out
