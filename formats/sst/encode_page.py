"""The kernel from a page of RawScan to data blocks: each byte is parsed, converted, summed and laid out at one touch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from formats.columns import Bytes, Flags
from formats.jit import njit
from formats.kernels.addresses import Int, address, copy, copy_xor, load, load_byte, store, store_byte, xor
from formats.kernels.rawscan import NOT_THERE, next_pair
from formats.keys import PREFIX_SIZE, TS_SIZE
from formats.mce import ENCODED_GROUP, FULL, GROUP
from formats.sst.encode import CURSOR, DAMAGED, DONE, NO_ROOM, OUTSIDE, SLACK, Blocks, free_slot, get, open_entry, put
from formats.sst.pack import Packing, pack

_DATA_PREFIX = ord("z")
_FIRST = GROUP - PREFIX_SIZE  # user bytes beside the prefix in the first group


class Form(NamedTuple):
    """From the RPC keys and user values of one API version to the storage rows of another. Words have the first byte lowest."""

    source_prefix: np.uint64
    """Before every key of the page; left out."""
    source_prefix_size: int
    memcomparable: bool
    """Whether keys are encoded as in V2: with a prefix, in groups, and the timestamp behind them."""
    target_prefix: np.uint64
    """The `PREFIX_SIZE` bytes of it."""
    key_tail: np.uint64
    """The inverted timestamp."""
    value_zeros: int
    """Zero bytes behind every value."""


@njit
def largest_key(size: Int) -> Int:
    """The most bytes that a user key of `size` bytes takes in storage."""
    return 1 + ((PREFIX_SIZE + size) // GROUP + 1) * ENCODED_GROUP + TS_SIZE


@njit(forceinline=True)
def _word(at: Int, size: Int) -> np.uint64:
    """Up to 8 bytes at an address as a number, the first one lowest."""
    word = np.uint64(0)
    for index in range(size):
        word |= np.uint64(load_byte(at + index)) << np.uint64(8 * index)
    return word


@njit(forceinline=True)
def _put_group(at: Int, word: np.uint64, filled: Int) -> Int:
    store(at, word)
    store_byte(at + GROUP, FULL - GROUP + filled)
    return at + ENCODED_GROUP


@njit(forceinline=True)
def _put_key(slot: Int, key: Int, size: Int, form: Form) -> Int:
    """Write the storage key of the user key at an address; its length."""
    store_byte(slot, _DATA_PREFIX)
    at = slot + 1
    if not form.memcomparable:
        copy(at, key, size)
        return size + 1
    first = min(size, _FIRST)
    at = _put_group(at, form.target_prefix | _word(key, first) << np.uint64(8 * PREFIX_SIZE), PREFIX_SIZE + first)
    if first == _FIRST:
        key, size = key + first, size - first
        while size >= GROUP:
            at = _put_group(at, load(key), GROUP)
            key, size = key + GROUP, size - GROUP
        at = _put_group(at, _word(key, size), size)
    store(at, form.key_tail)
    return at + TS_SIZE - slot


@njit
def encode_page(blocks: Blocks, packing: Packing, data: Bytes, form: Form, folded: Bytes, odd: Flags) -> Int:
    """Append the pairs from byte ``state[CURSOR]`` of the page on. Sealed blocks are packed for want of room.

    `folded` has room for the longest key and value together, `odd` for one more: XORed into them is what
    `formats.kernels.checksum.fold_rows` finds for user keys and values. A page other than the measured one leads to no
    byte beyond these and the slots.
    """
    page, page_size, at, prefix_size = address(data), data.size, get(blocks, CURSOR), form.source_prefix_size
    fold_end, odds, longest = address(folded) + folded.size, address(odd), min(folded.size, odd.size - 1)
    while at < page_size:
        following, key, key_size, value, value_size = next_pair(page, page_size, at)
        if following == NOT_THERE:
            return DAMAGED
        if key_size < prefix_size or _word(page + key, prefix_size) != form.source_prefix:
            return OUTSIDE
        key, key_size = key + prefix_size, key_size - prefix_size
        size = key_size + value_size
        if size > longest or largest_key(key_size) + SLACK > blocks.slot_size:
            return DAMAGED
        length = _put_key(free_slot(blocks), page + key, key_size, form)
        to = open_entry(blocks, length, value_size + form.value_zeros)
        if to < 0:
            if to == -NO_ROOM and pack(blocks, packing):
                continue
            return -to
        xor(fold_end - size, page + key, key_size)
        copy_xor(to, fold_end - value_size, page + value, value_size)
        for index in range(form.value_zeros):
            store_byte(to + value_size + index, 0)
        store_byte(odds + size, load_byte(odds + size) ^ 1)
        at = following
        put(blocks, CURSOR, at)
    return DONE
