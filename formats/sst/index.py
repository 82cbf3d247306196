"""The index of a table: for each data block a key at or after its last one, and the block's handle.

The key is an internal key (user key and eight bytes) or, from format version 3 on and when the properties say so, a user
key. From version 4 on the handles may be deltas: the size relative to the block before, which ends where this one
starts. A two-level index holds the handles of index blocks that hold the handles of data blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from formats.errors import DamagedBytes, UnsupportedFormat
from formats.sst import properties as names
from formats.sst.block import BlockReader, entries, entries_end
from formats.sst.coding import BlockHandle, Readable, decode_handle, decode_varint, zigzag
from formats.sst.footer import TRAILER_SIZE

_KEY_TRAILER = 8
_TWO_LEVELS = 2
_WITH_FIRST_KEYS = 3
_INDEX_TYPES = range(4)  # 0 and 1 are searched in different ways but read alike


@dataclass(frozen=True, slots=True)
class Index:
    """Data blocks in file order; `separators` are user keys, one a block, at or after its last key."""

    separators: list[bytes]
    handles: list[BlockHandle]

    @property
    def data_end(self) -> int:
        """Offset after the last data block."""
        return self.handles[-1].offset + self.handles[-1].size + TRAILER_SIZE if self.handles else 0


@dataclass(frozen=True, slots=True)
class _Form:
    user_keys: bool
    deltas: bool
    first_keys: bool


def read_index(blocks: BlockReader, handle: BlockHandle, properties: Mapping[str, bytes]) -> Index:
    """Read the whole index.

    Raises `DamagedBytes` for keys that do not ascend and for blocks that overlap or reach beyond the start of the
    index, `UnsupportedFormat` for an unknown kind of index.
    """
    kind = names.fixed_number(properties, names.INDEX_TYPE)
    if kind not in _INDEX_TYPES:
        raise UnsupportedFormat(f"index of type {kind}")
    form = _Form(
        user_keys=bool(names.number(properties, names.INDEX_KEYS_ARE_USER_KEYS)),
        deltas=bool(names.number(properties, names.INDEX_VALUES_ARE_DELTAS)),
        first_keys=kind == _WITH_FIRST_KEYS,
    )
    index = _checked(_decode(blocks.read(handle), form), handle.offset, "index")
    if kind != _TWO_LEVELS:
        return index
    separators: list[bytes] = []
    handles: list[BlockHandle] = []
    for partition in index.handles:
        part = _decode(blocks.read(partition), form)
        separators += part.separators
        handles += part.handles
    data_limit = index.handles[0].offset if index.handles else 0
    return _checked(Index(separators, handles), data_limit, "partitioned index")


def _decode(block: Readable, form: _Form) -> Index:
    if form.deltas:
        pairs = list(_delta_entries(bytes(block), with_first_keys=form.first_keys))
    else:
        pairs = [(key, decode_handle(value)[0]) for key, value in entries(block)]
    if not form.user_keys and any(len(key) < _KEY_TRAILER for key, _ in pairs):
        raise DamagedBytes("index key shorter than its sequence number")
    return Index([key if form.user_keys else key[:-_KEY_TRAILER] for key, _ in pairs], [at for _, at in pairs])


def _delta_entries(block: bytes, *, with_first_keys: bool) -> Iterator[tuple[bytes, BlockHandle]]:
    """Entries without a value length: after the key a handle or, where the key shares bytes, a difference of sizes."""
    end = entries_end(block)
    block = block[:end]
    position, key, handle = 0, b"", BlockHandle(0, 0)
    while position < end:
        shared, position = decode_varint(block, position, bits=32)
        unshared, position = decode_varint(block, position, bits=32)
        if shared > len(key) or position + unshared > end:
            raise DamagedBytes(f"index entry at byte {position} reaches beyond its block")
        key = key[:shared] + block[position : position + unshared]
        position += unshared
        if shared:
            difference, position = decode_varint(block, position)
            handle = BlockHandle(handle.offset + handle.size + TRAILER_SIZE, handle.size + zigzag(difference))
        else:
            handle, position = decode_handle(block, position)
        if with_first_keys:
            length, position = decode_varint(block, position, bits=32)
            position += length
        yield key, handle


def _checked(index: Index, limit: int, what: str) -> Index:
    end = 0
    for number, handle in enumerate(index.handles):
        if handle.offset < end or handle.size < 0:
            raise DamagedBytes(f"{what}: block {number} at {handle.offset} starts before the last one ends, at {end}")
        end = handle.offset + handle.size + TRAILER_SIZE
    if end > limit:
        raise DamagedBytes(f"{what}: data reaches to {end}, beyond {limit}")
    if any(left > right for left, right in pairwise(index.separators)):
        raise DamagedBytes(f"{what}: keys do not ascend")
    return index
