"""Kernels that turn rows into data blocks, many blocks per call, and that make the index.

They write blocks one after the other into an arena that stays in the processor's cache. There are two slots for keys: one has the key
of the last entry, into the other one the next key is written. `open_entry` compares the two, ends the block if it is full, writes the entry up to its value, and
returns where the value goes. `encode_page` does this for each pair of a RawScan page, and touches each byte once: to parse, convert, sum and write it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import Bytes, Flags, Offsets
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.addresses import (
    Int,
    address,
    common_prefix,
    copy,
    copy_words,
    copy_xor,
    load,
    load_byte,
    load_item,
    put_varint,
    store,
    store_byte,
    store_item,
    varint_size,
    xor,
)
from tikv_br.formats.kernels.rawscan import NOT_THERE, next_pair
from tikv_br.formats.keys.codec import ENCODED_GROUP, FULL, GROUP, MAX_TS, PREFIX_SIZE, TS_SIZE, KeyCodec
from tikv_br.formats.sst.block import TRAILER_SIZE
from tikv_br.formats.values import EXPIRE_SIZE

# Results of kernels.
DONE = 0  # all rows are written
NO_ROOM = 1  # the sealed blocks must be taken out before the next row
UNSORTED = 2  # the next row, whose key is in the free slot, does not sort after the one before
OUTSIDE = 3  # the key of the next row is outside of the keyspace
DAMAGED = 4  # the bytes of the input are not what was measured

# Fields of the state.
CURSOR = 0  # place in the input of the next row
START = 1  # place of the open block in the arena
SIZE = 2  # bytes of the open block
RESTARTS = 3  # number of restarts of the open block
RUN = 4  # rows since its last restart; 0 = the next row is one
SLOT = 5  # slot of the last key
LAST_LENGTH = 6  # length of the last key; -1 = none
LENGTH = 7  # length of the key in the other slot
SEALED = 8  # number of sealed blocks in the arena
SEPARATED = 9  # bytes of their separators
NEED = 10  # bytes that the block of the next row needs, after `NO_ROOM`
ROWS = 11  # all rows
KEY_BYTES = 12  # of all rows
VALUE_BYTES = 13  # of all rows
STATE_SIZE = 14  # number of fields

KEY_TRAILER = 8
"""Bytes behind the user key of every internal key."""
SLACK = 8
"""Bytes at the end of each slot, and behind the arena, for kernels that write whole words."""
_PUT = np.uint64(1)
"""Sequence number 0 and type 1, of every row."""
_SEEK = np.uint64(0xFFFF_FFFF_FFFF_FF11)
"""The highest sequence number, of a separator that is no row's key: it sorts before every row of that key."""


class Blocks(NamedTuple):
    """The memory that kernels fill, by addresses and sizes.

    Of arrays in a tuple every use would count references, which costs more than the rows do.
    """

    state: int
    """int64, `STATE_SIZE` of them."""
    arena: int
    """Sealed blocks, one behind the other, and behind them the open one."""
    arena_size: int
    """Size of the arena without the `SLACK` bytes behind it."""
    restarts: int
    """Restarts of the open block: uint32, as many as `block_size` and `restart_interval` allow."""
    ends: int
    """int64: where each sealed block ends in the arena."""
    separator_ends: int
    """int64: the same of its separator."""
    most_sealed: int
    """Maximum number of sealed blocks."""
    keys: int
    """Slots for the last two keys."""
    slot_size: int
    separators: int
    """Separators of sealed blocks: internal keys at or after the last row's and before the next block's first."""
    separators_size: int
    block_size: int
    restart_interval: int


@njit(forceinline=True)
def _lengths_size(shared: Int, unshared: Int, value_length: Int) -> Int:
    """Bytes of an entry's three lengths: nearly always 3."""
    if (shared | unshared | value_length) < 0x80:
        return np.int64(3)
    return varint_size(shared) + varint_size(unshared) + varint_size(value_length)


@njit(forceinline=True)
def put_u32(at: Int, number: Int) -> None:
    """Write a little-endian number of four bytes."""
    for byte in range(4):
        store_byte(at + byte, number >> (8 * byte) & 0xFF)


@njit(forceinline=True)
def _sorts_after(key: Int, length: Int, last: Int, last_length: Int, shared: Int) -> bool | np.bool:
    """Return whether a key sorts after another, given their addresses, lengths and number of common leading bytes."""
    if shared == length:
        return False
    return shared == last_length or load_byte(key + shared) > load_byte(last + shared)


@njit(forceinline=True)
def free_slot(blocks: Blocks) -> Int:
    """The address where the next key is to be written."""
    return blocks.keys + (1 - load_item(blocks.state, SLOT)) * blocks.slot_size


@njit
def put_separator(at: Int, last: Int, last_length: Int, key: Int, length: Int, shared: Int) -> Int:
    """Write the shortest internal key at or after `last` and before `key`; the address after it.

    Addresses and lengths; the keys ascend and share `shared` bytes. With a `key` of no bytes it is `last` itself.
    """
    end, trailer = last_length, _PUT
    if shared < last_length and shared < length:
        end = shared
        # Nothing fits between the two at this byte, and `key` ends there: a longer prefix of `last` is needed.
        if int(load_byte(last + shared)) + 1 >= int(load_byte(key + shared)) and shared + 1 >= length:
            end += 1
            while end < last_length and load_byte(last + end) == np.uint8(0xFF):
                end += 1
    copy(at, last, end)
    at += end
    if end < last_length:
        store_byte(at, load_byte(last + end) + 1)
        at, trailer = at + 1, _SEEK
    store(at, trailer)
    return at + KEY_TRAILER


@njit
def seal(blocks: Blocks, key: Int, length: Int, shared: Int) -> bool:
    """End the open block, whose restarts have room; False, with nothing done, where its separator has none.

    `key` is the address of the next block's first key, of no bytes if there is none.
    """
    number, separated, last_length = (
        load_item(blocks.state, SEALED),
        load_item(blocks.state, SEPARATED),
        load_item(blocks.state, LAST_LENGTH),
    )
    if number == blocks.most_sealed or separated + last_length + KEY_TRAILER > blocks.separators_size:
        return False
    count, end = load_item(blocks.state, RESTARTS), load_item(blocks.state, START) + load_item(blocks.state, SIZE)
    copy(blocks.arena + end, blocks.restarts, 4 * count)
    put_u32(blocks.arena + end + 4 * count, count)
    end += 4 * count + 4
    last = blocks.keys + load_item(blocks.state, SLOT) * blocks.slot_size
    at = put_separator(blocks.separators + separated, last, last_length, key, length, shared)
    store(blocks.ends + 8 * number, end)
    store(blocks.separator_ends + 8 * number, at - blocks.separators)
    store_item(blocks.state, SEALED, number + 1)
    store_item(blocks.state, SEPARATED, at - blocks.separators)
    store_item(blocks.state, START, end)
    store_item(blocks.state, SIZE, 0)
    store_item(blocks.state, RESTARTS, 0)
    store_item(blocks.state, RUN, 0)
    return True


@njit(forceinline=True)
def open_entry(blocks: Blocks, length: Int, value_length: Int) -> Int:
    """Append the entry of the key in the free slot but for its value: the address where that goes, or minus a result.

    A row that does not fit into `block_size` beside others starts a new block; alone it may be larger.
    """
    key, last = free_slot(blocks), blocks.keys + load_item(blocks.state, SLOT) * blocks.slot_size
    last_length = load_item(blocks.state, LAST_LENGTH)
    common: Int = np.int64(0)
    store_item(blocks.state, LENGTH, length)
    if last_length >= 0:
        common = common_prefix(last, key, min(last_length, length))
        if not _sorts_after(key, length, last, last_length, common):
            return -UNSORTED
    run, restarts, opened = (
        load_item(blocks.state, RUN),
        load_item(blocks.state, RESTARTS),
        load_item(blocks.state, SIZE),
    )
    shared: Int = common if run else np.int64(0)
    unshared = length - shared + KEY_TRAILER
    size = opened + _lengths_size(shared, unshared, value_length) + unshared + value_length
    if restarts and size + 4 * (restarts + (run == 0) + 1) > blocks.block_size:
        if not seal(blocks, key, length, common):
            return -NO_ROOM
        run, restarts, opened, shared, unshared = 0, 0, 0, 0, length + KEY_TRAILER
        size = _lengths_size(shared, unshared, value_length) + unshared + value_length
    sealed = size + 4 * (restarts + (run == 0) + 1)
    if load_item(blocks.state, START) + sealed > blocks.arena_size:
        store_item(blocks.state, NEED, sealed)
        return -NO_ROOM
    if run == 0:
        put_u32(blocks.restarts + 4 * restarts, opened)
        store_item(blocks.state, RESTARTS, restarts + 1)
    at = put_varint(blocks.arena + load_item(blocks.state, START) + opened, shared)
    at = put_varint(put_varint(at, unshared), value_length)
    copy_words(at, key + shared, length - shared)
    store(at + length - shared, _PUT)
    _count(blocks, size, run, length, value_length)
    return at + unshared


@njit(forceinline=True)
def _count(blocks: Blocks, size: Int, run: Int, length: Int, value_length: Int) -> None:
    """Take note of an entry with which the open block has `size` bytes."""
    store_item(blocks.state, SIZE, size)
    store_item(blocks.state, RUN, 0 if run + 1 == blocks.restart_interval else run + 1)
    store_item(blocks.state, LAST_LENGTH, length)
    store_item(blocks.state, SLOT, 1 - load_item(blocks.state, SLOT))
    store_item(blocks.state, ROWS, load_item(blocks.state, ROWS) + 1)
    store_item(blocks.state, KEY_BYTES, load_item(blocks.state, KEY_BYTES) + length)
    store_item(blocks.state, VALUE_BYTES, load_item(blocks.state, VALUE_BYTES) + value_length)


@njit
def encode_rows(blocks: Blocks, key_offsets: Offsets, keys: Bytes, value_offsets: Offsets, values: Bytes) -> Int:
    """Append rows from ``state[CURSOR]`` on; the slots have room for each key."""
    keys_at, values_at = address(keys), address(values)
    row: Int = np.int64(load_item(blocks.state, CURSOR))
    while row < key_offsets.size - 1:
        length, value_length = key_offsets[row + 1] - key_offsets[row], value_offsets[row + 1] - value_offsets[row]
        copy(free_slot(blocks), keys_at + key_offsets[row], length)
        at = open_entry(blocks, length, value_length)
        if at < 0:
            return -at
        copy(at, values_at + value_offsets[row], value_length)
        row += 1
        store_item(blocks.state, CURSOR, row)
    return DONE


@njit
def encode_index(
    out: Bytes,
    separators: Bytes,
    ends: Offsets,
    sizes: Offsets,
    user_keys: bool,  # noqa: FBT001 - kernels know no keywords
    deltas: bool,  # noqa: FBT001
) -> Int:
    """Write the index block, for which `out` has room: all entries, each a restart; returns its size."""
    begin, keys_at, restarts = address(out), address(separators), np.empty(len(sizes), np.int64)
    at: Int = begin
    key: Int = np.int64(0)
    offset: Int = np.int64(0)
    for number in range(len(sizes)):
        restarts[number] = at - begin
        length, size = ends[number] - key - (KEY_TRAILER if user_keys else 0), sizes[number]
        at = put_varint(put_varint(at, 0), length)
        if not deltas:
            at = put_varint(at, varint_size(offset) + varint_size(size))
        copy(at, keys_at + key, length)
        at = put_varint(put_varint(at + length, offset), size)
        key, offset = ends[number], offset + size + TRAILER_SIZE
    for number in range(len(sizes)):
        put_u32(at, restarts[number])
        at += 4
    put_u32(at, len(sizes))
    return at + 4 - begin


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

    For the checksum it XORs into `folded` and `odd` what `tikv_br.formats.kernels.checksum.fold_rows` would return for the user keys and
    values. `folded` is as long as the longest key and value together, `odd` one longer: from a page with a longer row than was measured,
    `DAMAGED` is returned before anything is written beyond them.
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
