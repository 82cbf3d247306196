from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats.examples import keys, many
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys import codec


@many(3)
@given(keys(), st.binary(max_size=12))
def test_round_trip(data: bytes, tail: bytes) -> None:
    """Encoding round-trips, has the announced size, and ignores the bytes that follow."""
    encoded = codec.encode(data)
    assert len(encoded) == (len(data) // 8 + 1) * 9
    assert codec.decode(encoded + tail) == (data, len(encoded))


@many(3)
@given(keys(24), keys(24))
def test_order_is_kept(one: bytes, other: bytes) -> None:
    """Encoded forms compare as the strings do, whatever follows them, and none begins another."""
    assert (codec.encode(one) < codec.encode(other)) == (one < other)
    if one != other:
        assert not codec.encode(other).startswith(codec.encode(one))
        assert (codec.encode(one) + b"\xff" * 8 < codec.encode(other) + bytes(8)) == (one < other)


@many(3)
@given(keys(36))
def test_only_canonical_bytes_decode(data: bytes) -> None:
    """Any bytes are either refused or the one encoding of what comes out: no two forms of one string."""
    try:
        decoded, consumed = codec.decode(data)
    except DamagedBytes:
        return
    assert codec.encode(decoded) == data[:consumed]


@many(2)
@given(keys(), st.data())
def test_damage_never_goes_unseen(data: bytes, draw: st.DataObject) -> None:
    """Bytes cut short are refused; a changed byte is refused or changes what comes out."""
    encoded = codec.encode(data)
    at = draw.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(DamagedBytes):
        codec.decode(encoded[:at])
    flipped = encoded[:at] + bytes([encoded[at] ^ draw.draw(st.integers(1, 255))]) + encoded[at + 1 :]
    with contextlib.suppress(DamagedBytes):
        assert codec.decode(flipped)[0] != data
