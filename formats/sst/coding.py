"""Varints and block handles, decoded one by one: for headers and indexes, not for rows."""

from __future__ import annotations

from typing import NamedTuple

from tikv_br.formats.errors import DamagedBytes

Readable = bytes | memoryview


class BlockHandle(NamedTuple):
    """Location of a block: its offset in the file and its size without the trailer."""

    offset: int
    size: int

    def encode(self) -> bytes:
        """Two varint64, as in footers and indexes."""
        return encode_varint(self.offset) + encode_varint(self.size)


def encode_varint(number: int) -> bytes:
    """Encode a number that is not negative, low seven bits first."""
    if number < 0x80:
        return bytes((number,))
    encoded = []
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def decode_varint(data: Readable, position: int = 0, *, bits: int = 64) -> tuple[int, int]:
    """Decode the varint at `position`: the number and the position after it. Raises `DamagedBytes`."""
    if position < len(data) and data[position] < 0x80:
        return data[position], position + 1
    number = shift = 0
    while position < len(data) and shift < bits:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >> bits:
                break
            return number, position
        shift += 7
    raise DamagedBytes(f"varint{bits} truncated or too long at byte {position}")


def decode_handle(data: Readable, position: int = 0) -> tuple[BlockHandle, int]:
    """Decode the block handle at `position`, and the position after it. Raises `DamagedBytes`."""
    offset, position = decode_varint(data, position)
    size, position = decode_varint(data, position)
    return BlockHandle(offset, size), position


def zigzag(number: int) -> int:
    """The signed number that an unsigned one stands for: 0, -1, 1, -2, ..."""
    return number >> 1 ^ -(number & 1)
