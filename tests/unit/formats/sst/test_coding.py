"""Varints and handles against protobuf's own."""

from __future__ import annotations

import pytest

from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.sst.coding import decode_varint, encode_varint


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9, b"\xff" * 11, b"\xff" * 9 + b"\x02"])
def test_damaged_varint(data: bytes) -> None:
    """A varint that breaks off, goes on too long or exceeds 64 bits is refused."""
    with pytest.raises(DamagedBytes):
        decode_varint(data)


def test_varint32() -> None:
    """Lengths have 32 bits: a larger number is refused."""
    assert decode_varint(encode_varint(2**32 - 1), bits=32) == (2**32 - 1, 5)
    with pytest.raises(DamagedBytes):
        decode_varint(encode_varint(2**32), bits=32)
