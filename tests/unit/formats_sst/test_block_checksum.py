"""Block checksums: published vectors, and pieces against the whole. RocksDB's files prove the rest in test_reader."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats.sst.block import ChecksumType, context_modifier

RFC_3720 = {bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E}


@pytest.mark.parametrize(("data", "crc"), RFC_3720.items())
def test_crc32c_vectors(data: bytes, crc: int) -> None:
    """Unmasked, the checksum is the CRC32c of RFC 3720's test vectors."""
    masked = ChecksumType.CRC32C.compute([data[:-1]], data[-1])
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(0, 255), st.sampled_from(ChecksumType))
def test_pieces(pieces: list[bytes], last: int, kind: ChecksumType) -> None:
    """However the bytes are cut, the checksum is that of the whole, and always 32 bits."""
    whole = kind.compute([b"".join(pieces)], last)
    assert kind.compute(pieces, last) == whole
    assert kind.compute([memoryview(piece) for piece in pieces], last) == whole
    assert 0 <= whole < 2**32


@pytest.mark.parametrize("kind", [kind for kind in ChecksumType if kind is not ChecksumType.NONE])
def test_last_byte_counts(kind: ChecksumType) -> None:
    """The byte that names the compression is covered too."""
    assert kind.compute([b"block"], 0) != kind.compute([b"block"], 7)


def test_context() -> None:
    """A block at another offset has another modifier, beyond 4 GiB too; without a base there is none."""
    assert context_modifier(0, 12345) == 0
    assert len({context_modifier(99, offset) for offset in (0, 1, 1 << 20, 1 << 32, 5 << 32)}) == 4
    assert context_modifier(99, 1) == context_modifier(99, 1 << 32)
    assert context_modifier(0xFFFFFFFF, (1 << 40) + 1) < 1 << 32
