"""Varints and handles against protobuf's own."""

from __future__ import annotations

import pytest
from google.protobuf.wrappers_pb2 import UInt64Value  # type: ignore[import-untyped, unused-ignore]
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.sst.coding import BlockHandle, decode_handle, decode_varint, encode_varint, zigzag


def protobuf_varint(number: int) -> bytes:
    """The same varint by protobuf, behind the tag of a message's first field."""
    message: bytes = UInt64Value(value=number).SerializeToString()
    return message[1:] or b"\0"


@given(st.integers(0, 2**64 - 1), st.binary(max_size=5))
def test_varint(number: int, rest: bytes) -> None:
    """Varints equal protobuf's and decode to the number and the place behind them."""
    encoded = encode_varint(number)
    assert encoded == protobuf_varint(number)
    assert decode_varint(encoded + rest) == (number, len(encoded))
    assert decode_varint(memoryview(rest + encoded), len(rest)) == (number, len(rest + encoded))


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


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_handle(offset: int, size: int) -> None:
    """A handle is its two numbers."""
    handle = BlockHandle(offset, size)
    assert decode_handle(b"\0" + handle.encode(), 1) == (handle, 1 + len(handle.encode()))


def test_zigzag() -> None:
    """Signed numbers count as protobuf's sint64 does."""
    assert [zigzag(number) for number in range(5)] == [0, -1, 1, -2, 2]
    assert zigzag(2**64 - 1) == -(2**63)
