"""The footer of a table, and its blocks: trailers, checksums, and the entries of a small one."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Iterator

import xxhash
from fastcrc import crc32
from msgspec import Struct

from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.sst.coding import BlockHandle, Readable, decode_handle, decode_varint, encode_varint
from tikv_br.formats.sst.compression import Decompressor
from tikv_br.formats.sst.source import RandomAccess, read_exactly

_LOW_32 = 0xFFFFFFFF
_CRC_MASK_DELTA = 0xA282EAD8
_XXH3_LAST_BYTE = 0x6B9083D9


class ChecksumType(enum.IntEnum):
    """Numbers as in a table's footer."""

    NONE = 0
    CRC32C = 1
    XXHASH = 2
    XXHASH64 = 3
    XXH3 = 4

    def compute(self, pieces: Iterable[Readable], last: int) -> int:
        """The 32 bits over `pieces` followed by the byte `last`."""
        return _FUNCTIONS[self](pieces, last)


def context_modifier(base: int, offset: int) -> int:
    """Return the number that format version 6 adds to a block's checksum, from its offset; 0 without a base."""
    return base ^ (offset + (offset >> 32)) & _LOW_32 if base else 0


def _masked_crc32c(pieces: Iterable[Readable], last: int) -> int:
    crc = 0
    for piece in pieces:
        crc = crc32.iscsi(piece, crc)
    return _masked(crc32.iscsi(bytes((last,)), crc))


def _masked(crc: int) -> int:
    """RocksDB stores CRCs rotated and shifted, for bytes that hold CRCs themselves."""
    return (crc >> 15 | crc << 17) + _CRC_MASK_DELTA & _LOW_32


def _digest(state: xxhash.xxh32 | xxhash.xxh64 | xxhash.xxh3_64, pieces: Iterable[Readable]) -> int:
    for piece in pieces:
        state.update(piece)
    return state.intdigest() & _LOW_32


_FUNCTIONS: dict[ChecksumType, Callable[[Iterable[Readable], int], int]] = {
    ChecksumType.NONE: lambda _pieces, _last: 0,
    ChecksumType.CRC32C: _masked_crc32c,
    ChecksumType.XXHASH: lambda pieces, last: _digest(xxhash.xxh32(), (*pieces, bytes((last,)))),
    ChecksumType.XXHASH64: lambda pieces, last: _digest(xxhash.xxh64(), (*pieces, bytes((last,)))),
    ChecksumType.XXH3: lambda pieces, last: _digest(xxhash.xxh3_64(), pieces) ^ last * _XXH3_LAST_BYTE & _LOW_32,
}


FOOTER_SIZE = 53
TRAILER_SIZE = 5
"""Bytes after every block: compression method and checksum."""

VERSIONS = range(2, 7)
MAGIC = 0x88E241B785F4CFF7
_LEGACY_MAGIC = 0xDB4775248B80FB57
_HANDLES_END = 41
_FORMAT_6 = 6
_EXTENDED_MAGIC = b"\x3e\x00\x7a\x00"


class Footer(Struct, frozen=True):
    """Metadata needed to read anything else of a table."""

    format_version: int
    checksum: ChecksumType
    metaindex: BlockHandle
    index: BlockHandle | None
    """None in version 6, where the metaindex names it."""
    checksum_base: int = 0
    """Mixed into block checksums by version 6; 0 = not."""

    def encode(self) -> bytes:
        """The bytes of a footer of version 2 to 5."""
        if self.index is None or self.format_version >= _FORMAT_6:
            raise UnsupportedFormat(f"cannot write a footer of version {self.format_version}")
        handles = bytes([self.checksum]) + self.metaindex.encode() + self.index.encode()
        return handles.ljust(_HANDLES_END, b"\0") + struct.pack("<IQ", self.format_version, MAGIC)


def read_footer(source: RandomAccess) -> Footer:
    """Read and check the end of the file. Raises `DamagedBytes`, `UnsupportedFormat`."""
    if source.size < FOOTER_SIZE:
        raise DamagedBytes(f"{source.size} bytes are too few for a table")
    offset = source.size - FOOTER_SIZE
    data = bytes(read_exactly(source, offset, FOOTER_SIZE))
    version, magic = struct.unpack_from("<IQ", data, _HANDLES_END)
    if magic == _LEGACY_MAGIC:
        raise UnsupportedFormat("table of format version 0")
    if magic != MAGIC:
        raise DamagedBytes(f"not a block-based table: magic number {magic:#x}")
    if version not in VERSIONS:
        raise UnsupportedFormat(f"table of format version {version}: {VERSIONS[0]} to {VERSIONS[-1]} are read")
    try:
        checksum = ChecksumType(data[0])
    except ValueError:
        raise UnsupportedFormat(f"table with checksums of type {data[0]}") from None
    footer = _decode_6(data, checksum, offset) if version == _FORMAT_6 else _decode(data, checksum, version)
    for handle in filter(None, (footer.metaindex, footer.index)):
        if handle.offset + handle.size + TRAILER_SIZE > offset:
            raise DamagedBytes(f"footer names a block at {handle.offset} of {handle.size} bytes, beyond itself")
    return footer


def _decode(data: bytes, checksum: ChecksumType, version: int) -> Footer:
    handles = data[:_HANDLES_END]
    metaindex, position = decode_handle(handles, 1)
    index, _ = decode_handle(handles, position)
    return Footer(version, checksum, metaindex, index)


def _decode_6(data: bytes, checksum: ChecksumType, offset: int) -> Footer:
    extended, stored, base, size = struct.unpack_from("<4sIII", data, 1)
    if extended != _EXTENDED_MAGIC:
        raise DamagedBytes(f"footer of version 6 with extended magic number {extended.hex()}")
    unsigned = data[:5] + bytes(4) + data[9:]
    expected = checksum.compute([unsigned[:-1]], unsigned[-1]) + context_modifier(base, offset) & 0xFFFFFFFF
    if checksum is not ChecksumType.NONE and stored != expected:
        raise DamagedBytes(f"footer checksum is {stored:#x}, expected {expected:#x}")
    if size + TRAILER_SIZE > offset:
        raise DamagedBytes(f"footer names a metaindex of {size} bytes in {offset}")
    return Footer(_FORMAT_6, checksum, BlockHandle(offset - TRAILER_SIZE - size, size), None, base)


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
        self.require_sound(stored, handle)
        return self.decompress(stored, handle)

    def decompress(self, stored: Readable, handle: BlockHandle) -> Readable:
        """Decompress as `unpack`, without verifying the checksum."""
        size = handle.size
        return self._decompress(stored[size], stored[:size])

    def require_sound(self, stored: Readable, handle: BlockHandle) -> None:
        """Raise `DamagedBytes` unless the block `is_sound`."""
        if not self.is_sound(stored, handle):
            raise DamagedBytes(f"block at {handle.offset} of {handle.size} bytes: checksum does not match")

    def is_sound(self, stored: Readable, handle: BlockHandle) -> bool:
        """Return whether the checksum in the trailer is the block's; also true if the table has none."""
        if self._checksum is ChecksumType.NONE:
            return True
        offset, size = handle
        if self._checksum is ChecksumType.CRC32C:  # of many blocks, one call each
            due = _masked(crc32.iscsi(stored[: size + 1]))
        else:
            due = self._checksum.compute((stored[:size],), stored[size])
        if self._checksum_base:
            due = due + context_modifier(self._checksum_base, offset) & 0xFFFFFFFF
        return due == int.from_bytes(stored[size + 1 : size + TRAILER_SIZE], "little")


def entries_end(block: Readable) -> int:
    """Return the offset at which the entries end and the restarts begin. Raises `DamagedBytes`."""
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
    restarts = restarts or [0]  # a block without entries has one too
    return bytes(block) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
