"""The kernel that turns the pairs of a RawScan page into data blocks: each byte is parsed, converted, summed and written at one touch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import Bytes, Flags
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.addresses import (
    Int,
    address,
    copy,
    copy_xor,
    load,
    load_byte,
    load_item,
    store,
    store_byte,
    store_item,
    xor,
)
from tikv_br.formats.kernels.rawscan import NOT_THERE, next_pair
from tikv_br.formats.keys.codec import ENCODED_GROUP, FULL, GROUP, MAX_TS, PREFIX_SIZE, TS_SIZE, KeyCodec
from tikv_br.formats.sst.encode import CURSOR, DAMAGED, DONE, OUTSIDE, SLACK, Blocks, free_slot, open_entry
from tikv_br.formats.values import EXPIRE_SIZE

_DATA_PREFIX = ord("z")
_FIRST = GROUP - PREFIX_SIZE  # user bytes beside the prefix in the first group


class PageEncoding(NamedTuple):
    """Conversion from RPC keys and user values to storage rows of another API version.

    The first byte of a word is the lowest.
    """

    source_prefix: np.uint64
    """Prefix of every key of the page, which is left out."""
    source_prefix_size: int
    memcomparable: bool
    """True if keys are encoded as in V2: with a prefix, in groups, followed by the timestamp."""
    target_prefix: np.uint64
    """The `PREFIX_SIZE` bytes of it."""
    key_tail: np.uint64
    """Inverted timestamp."""
    value_zeros: int
    """Zero bytes behind every value."""


@njit
def largest_key(size: Int) -> Int:
    """The most bytes that a user key of `size` bytes takes in storage."""
    return 1 + ((PREFIX_SIZE + size) // GROUP + 1) * ENCODED_GROUP + TS_SIZE


@njit(forceinline=True)
def _word(at: Int, size: Int) -> np.uint64:
    """Return up to 8 bytes at an address as a number, the first one lowest."""
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
def _put_key(slot: Int, key: Int, size: Int, form: PageEncoding) -> Int:
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
def encode_page(blocks: Blocks, data: Bytes, form: PageEncoding, folded: Bytes, odd: Flags) -> Int:
    """Append the pairs from byte ``state[CURSOR]`` of the page on.

    XORs into `folded`, which has room for the longest key and value together, and into `odd`, which has room for one more,
    what `tikv_br.formats.kernels.checksum.fold_rows` returns for user keys and values. For a page that is not the measured one it
    writes no byte beyond these and the slots.
    """
    page, page_size, at, prefix_size = (
        address(data),
        data.size,
        load_item(blocks.state, CURSOR),
        form.source_prefix_size,
    )
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
            return -to
        xor(fold_end - size, page + key, key_size)
        copy_xor(to, fold_end - value_size, page + value, value_size)
        for index in range(form.value_zeros):
            store_byte(to + value_size + index, 0)
        store_byte(odds + size, load_byte(odds + size) ^ 1)
        at = following
        store_item(blocks.state, CURSOR, at)
    return DONE


_VALUE_ZEROS = {ApiVersion.V1: 0, ApiVersion.V1TTL: EXPIRE_SIZE, ApiVersion.V2: 1}
"""Bytes behind the values of rows that neither expire nor are deleted."""


def page_encoding(source: KeyCodec, target: KeyCodec, ts: int) -> PageEncoding:
    """Return the conversion for `encode_page`, with ``ts`` in V2; see `tikv_br.formats.rows.to_storage` for the rows."""
    return PageEncoding(
        source_prefix=_little_endian(source.prefix),
        source_prefix_size=len(source.prefix),
        memcomparable=target.is_v2,
        target_prefix=_little_endian(target.prefix),
        key_tail=_little_endian((MAX_TS - ts).to_bytes(TS_SIZE, "big")),
        value_zeros=_VALUE_ZEROS[target.api_version],
    )


def _little_endian(data: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(data, "little"))
