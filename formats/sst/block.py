"""Blocks: reading one from the file, and the entries of a small one.

A block is a run of entries, each ``shared, unshared, value length`` as varint32, the unshared end of the key and the
value; then the offsets of entries that share nothing (restarts, u32) and their number. Rows go through `decode`; this
plain form serves metaindex, properties and index, and is the twin that the kernel is tested against.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from formats.errors import DamagedBytes
from formats.sst.block_checksum import ChecksumType, context_modifier
from formats.sst.coding import BlockHandle, Readable, decode_varint, encode_varint
from formats.sst.compression import Decompressor
from formats.sst.footer import TRAILER_SIZE, Footer
from formats.sst.source import RandomAccess, read_exactly

_HASH_INDEX_BIT = 1 << 31
_U32 = 4


class BlockReader:
    """Reads blocks of one table: checksum first, then decompression. One thread at a time."""

    def __init__(self, source: RandomAccess, footer: Footer) -> None:
        self.source = source
        self._checksum = footer.checksum
        self._checksum_base = footer.checksum_base
        self._decompress = Decompressor()

    def read(self, handle: BlockHandle) -> Readable:
        """The block's contents. Raises `DamagedBytes`, `UnsupportedFormat`."""
        return self.unpack(self.stored(handle), handle)

    def stored(self, handle: BlockHandle) -> memoryview:
        """The block as it lies in the file, with its trailer."""
        return memoryview(read_exactly(self.source, handle.offset, handle.size + TRAILER_SIZE))

    def unpack(self, stored: Readable, handle: BlockHandle) -> Readable:
        """The contents of the block of which `stored` are the bytes in the file, trailer included."""
        if not self.is_sound(stored, handle):
            raise DamagedBytes(f"block at {handle.offset} of {handle.size} bytes: checksum does not match")
        return self.decompress(stored, handle)

    def decompress(self, stored: Readable, handle: BlockHandle) -> Readable:
        """As `unpack`, without a look at the checksum."""
        size = handle.size
        return self._decompress(stored[size], stored[:size])

    def is_sound(self, stored: Readable, handle: BlockHandle) -> bool:
        """Whether the checksum in the trailer is the block's, or the table has none."""
        if self._checksum is ChecksumType.NONE:
            return True
        offset, size = handle
        due = self._checksum.compute((stored[:size],), stored[size])
        if self._checksum_base:
            due = due + context_modifier(self._checksum_base, offset) & 0xFFFFFFFF
        return due == int.from_bytes(stored[size + 1 : size + TRAILER_SIZE], "little")


def entries_end(block: Readable) -> int:
    """Where the entries end and the restarts begin. Raises `DamagedBytes`."""
    if len(block) < _U32:
        raise DamagedBytes(f"block of {len(block)} bytes")
    packed: int = struct.unpack_from("<I", block, len(block) - _U32)[0]
    end = len(block) - _U32
    if packed & _HASH_INDEX_BIT:
        end -= 2 + int.from_bytes(block[max(0, end - 2) : end], "little")
    end -= (packed & ~_HASH_INDEX_BIT) * _U32
    if end < 0:
        raise DamagedBytes(f"block of {len(block)} bytes with {packed:#x} restarts")
    return end


def entries(block: Readable) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block. Raises `DamagedBytes` where an entry reaches beyond its block or its predecessor."""
    block = bytes(block)
    return ((key, block[start:end]) for key, start, end in extents(block))


def extents(block: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Keys of a block and where their values start and end. Raises as `entries` does."""
    end = entries_end(block)
    position, key = 0, b""
    while position < end:
        shared, unshared, length = block[position : position + 3]  # nearly always single bytes; restarts follow
        if (shared | unshared | length) < 0x80:
            position += 3
        else:
            shared, position = decode_varint(block, position, bits=32)
            unshared, position = decode_varint(block, position, bits=32)
            length, position = decode_varint(block, position, bits=32)
        if shared > len(key) or position + unshared + length > end:
            raise DamagedBytes(f"entry at byte {position} of a block reaches beyond it")
        key = key[:shared] + block[position : position + unshared]
        position += unshared
        yield key, position, position + length
        position += length


def encode_entries(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A block in which every entry is a restart, from pairs in order of their keys."""
    block, restarts = bytearray(), []
    for key, value in pairs:
        restarts.append(len(block))
        block += b"\0" + encode_varint(len(key)) + encode_varint(len(value)) + key + value
    return bytes(block) + encode_restarts(restarts)


def encode_restarts(restarts: list[int]) -> bytes:
    """The end of a block. One that has no entry still has one restart."""
    restarts = restarts or [0]
    return struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
