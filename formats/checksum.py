"""RawKV's checksum: the XOR over rows of CRC-64/XZ of key ‖ value, with the numbers of rows and bytes.

A CRC register changes linearly with the message: with the register at 0 before it, the register after the XOR of two
messages is the XOR of those after each, and zero bytes in front change nothing. So the rows are first XORed into one
buffer, aligned at their ends, and the CRC of that is taken once. CRC-64/XZ however starts with the register at all ones,
and a row of fewer than 8 bytes cannot carry that within itself; therefore every row is led by the 8 bytes that bring a
register of 0 to all ones (`_TO_ONES`), and the one message by the 8 bytes that bring all ones to 0 (`_TO_ZERO`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from fastcrc import crc64
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from tikv_br.formats.columns import Bytes, Flags

_ONES = (1 << 64) - 1
_POLYNOMIAL = 0xC96C_5795_D787_0F42
"""Polynomial ECMA-182, bits reversed."""
_REGISTER_BITS = 64
_TO_ZERO = b"\xff" * 8


class Checksum(Struct, frozen=True):
    """Checksum of a range, as of RawChecksum, or of a file of a backup. Checksums of disjoint ranges can be merged."""

    crc64xor: int = 0
    total_kvs: int = 0
    total_bytes: int = 0
    """Keys, with their prefix in V2, and values."""

    def merge(self, other: Checksum) -> Checksum:
        """The checksum of the rows of both."""
        return Checksum(
            self.crc64xor ^ other.crc64xor, self.total_kvs + other.total_kvs, self.total_bytes + other.total_bytes
        )

    __add__ = merge


def checksum(keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray, prefix: bytes = b"") -> Checksum:
    """The checksum over rows of `prefix` ‖ key ‖ value. Keys are as in RPCs: for user keys of V2, give the prefix.

    Raises `FormatError` for other types or unequal lengths, `DamagedBytes` for offsets that point astray.
    """
    return checksums(keys, values, (prefix,))[0]


def checksums(
    keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray, prefixes: Sequence[bytes]
) -> tuple[Checksum, ...]:
    """The checksum with each of the prefixes, at the price of one. Raises as `checksum` does."""
    from tikv_br.formats import columns
    from tikv_br.formats.errors import FormatError
    from tikv_br.formats.kernels.checksum import fold_rows

    rows = len(keys)
    if rows != len(values):
        raise FormatError(f"{rows} keys with {len(values)} values")
    key_offsets, key_data = columns.view(keys)
    value_offsets, value_data = columns.view(values)
    size = int(key_offsets[-1] - key_offsets[0] + value_offsets[-1] - value_offsets[0])
    folded = FoldedRows(*fold_rows(key_offsets, key_data, value_offsets, value_data), rows, size)
    return tuple(folded.checksum(prefix) for prefix in prefixes)


class FoldedRows(Struct, frozen=True):
    """Rows reduced to what their checksum with any prefix of keys depends on."""

    folded: Bytes
    """XOR of the rows, aligned at their ends: shape (bytes of the longest row,)."""
    odd: Flags
    """True for each size that an odd number of rows has, shape (longest row + 1,)."""
    rows: int
    size: int
    """Bytes of all keys and values."""

    def checksum(self, prefix: bytes = b"") -> Checksum:
        """The checksum with the prefix before every key."""
        return Checksum(self._crc(prefix), self.rows, self.size + self.rows * len(prefix))

    def _crc(self, prefix: bytes) -> int:
        from tikv_br.formats import columns
        from tikv_br.formats.kernels.checksum import lead_rows

        message = lead_rows(self.folded, self.odd, columns.from_bytes(_to_ones() + prefix))
        register = crc64.xz(message.data, crc64.xz(_TO_ZERO)) ^ _ONES
        return register ^ (_ONES if self.odd.sum() % 2 else 0)


@functools.cache
def _to_ones() -> bytes:
    """The 8 bytes that bring a register of 0 to all ones: the division, run backwards."""
    register = _ONES
    for _ in range(_REGISTER_BITS):
        high = register >> (_REGISTER_BITS - 1)
        register = ((register ^ (_POLYNOMIAL * high)) << 1 | high) & _ONES
    return register.to_bytes(8, "little")
