"""The last 53 bytes of a block-based table.

Versions 2 to 5: checksum type, handles of metaindex and index padded to 40 bytes, version, magic number.
Version 6: checksum type, extended magic number, checksum of the footer, base of block checksums, size of the metaindex
block (which lies right before the footer), 24 zero bytes, version, magic number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from formats.errors import DamagedBytes, UnsupportedFormat
from formats.sst.block_checksum import ChecksumType, context_modifier
from formats.sst.coding import BlockHandle, decode_handle
from formats.sst.source import RandomAccess, read_exactly

FOOTER_SIZE = 53
TRAILER_SIZE = 5
"""Bytes after every block: compression method and checksum."""

VERSIONS = range(2, 7)
MAGIC = 0x88E241B785F4CFF7
_LEGACY_MAGIC = 0xDB4775248B80FB57
_HANDLES_END = 41
_FORMAT_6 = 6
_EXTENDED_MAGIC = b"\x3e\x00\x7a\x00"


@dataclass(frozen=True, slots=True)
class Footer:
    """What a reader must know before anything else."""

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
        raise DamagedBytes(f"footer checksum {stored:#x} where {expected:#x} is due")
    if size + TRAILER_SIZE > offset:
        raise DamagedBytes(f"footer names a metaindex of {size} bytes in {offset}")
    return Footer(_FORMAT_6, checksum, BlockHandle(offset - TRAILER_SIZE - size, size), None, base)
