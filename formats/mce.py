"""The memcomparable encoding (MCE) of byte strings, one at a time.

Groups of 8 bytes, each followed by a marker: 0xFF after a full group that is not the last, 0xFF - padding after the last
one, which is filled up with zero bytes. A length divisible by 8 ends in a group of padding only. The encoded forms
compare as the strings do, and none is a prefix of another. Whole columns: `formats.rows`.
"""

from __future__ import annotations

from formats.errors import DamagedBytes

GROUP = 8
"""Data bytes in a group."""
ENCODED_GROUP = GROUP + 1
"""Bytes of an encoded group: data and marker."""
FULL = 0xFF
"""The marker after a full group that is not the last."""


def encoded_size(size: int) -> int:
    """Bytes that `encode` makes of `size` bytes."""
    return (size // GROUP + 1) * ENCODED_GROUP


def encode(data: bytes) -> bytes:
    """Encode `data`; the result has `encoded_size(len(data))` bytes."""
    full, rest = divmod(len(data), GROUP)
    padding = GROUP - rest
    groups = [data[at * GROUP : at * GROUP + GROUP] + b"\xff" for at in range(full)]
    groups.append(data[full * GROUP :] + bytes(padding) + bytes([FULL - padding]))
    return b"".join(groups)


def decode(data: bytes) -> tuple[bytes, int]:
    """Decode the encoded string that `data` begins with: the string, and the bytes that it took.

    Raises `DamagedBytes` when `data` ends too soon, a marker is impossible, or the padding is not zero.
    """
    decoded = bytearray()
    for start in range(0, len(data), ENCODED_GROUP):
        group = data[start : start + ENCODED_GROUP]
        if len(group) < ENCODED_GROUP:
            break
        padding = FULL - group[GROUP]
        if padding > GROUP:
            raise DamagedBytes(f"memcomparable bytes: marker {group[GROUP]:#04x} at {start + GROUP}")
        decoded += group[: GROUP - padding]
        if padding:
            if any(group[GROUP - padding : GROUP]):
                raise DamagedBytes(f"memcomparable bytes: padding that is not zero before {start + GROUP}")
            return bytes(decoded), start + ENCODED_GROUP
    raise DamagedBytes(f"memcomparable bytes: no last group within {len(data)} bytes")


def decode_exact(data: bytes) -> bytes:
    """Decode `data`, all of it. Raises `DamagedBytes`, also when bytes follow the last group."""
    decoded, consumed = decode(data)
    if consumed != len(data):
        raise DamagedBytes(f"memcomparable bytes: {len(data) - consumed} bytes after the last group")
    return decoded
