"""The kernel from Arrow columns to data blocks."""

from __future__ import annotations

import numpy as np

from formats.columns import Bytes, Offsets
from formats.jit import njit
from formats.kernels.addresses import Int, address, copy
from formats.sst.encode import CURSOR, DONE, NO_ROOM, Blocks, free_slot, get, open_entry, put
from formats.sst.pack import Packing, pack


@njit
def encode_rows(
    blocks: Blocks, packing: Packing, key_offsets: Offsets, keys: Bytes, value_offsets: Offsets, values: Bytes
) -> Int:
    """Append rows from ``state[CURSOR]`` on; the slots have room for each key. Sealed blocks are packed for want of room."""
    keys_at, values_at = address(keys), address(values)
    row: Int = np.int64(get(blocks, CURSOR))
    while row < key_offsets.size - 1:
        length, value_length = key_offsets[row + 1] - key_offsets[row], value_offsets[row + 1] - value_offsets[row]
        copy(free_slot(blocks), keys_at + key_offsets[row], length)
        at = open_entry(blocks, length, value_length)
        if at < 0:
            if at == -NO_ROOM and pack(blocks, packing):
                continue
            return -at
        copy(at, values_at + value_offsets[row], value_length)
        row += 1
        put(blocks, CURSOR, row)
    return DONE
